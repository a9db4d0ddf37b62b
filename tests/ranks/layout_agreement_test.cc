#include <gtest/gtest.h>

#include "ranks/guarded_ranks.h"

namespace holdfast {
namespace {

using Layout = std::vector<BucketSlice>;

const Layout kLayout = {{"conv1.weight", 0, 216}, {"conv1.bias", 216, 8}, {"fc.weight", 224, 640}};

GuardOptions unwatched() {
  GuardOptions options;
  options.watchdog = false;
  return options;
}

// agree_on_layout() on `ranks` ranks; the status that all of them got.
Status agree(
    int ranks, const std::function<Layout(int)>& layout,
    const std::function<int(int)>& group = [](int) { return 0; }) {
  std::vector<Status> statuses(static_cast<std::size_t>(ranks));
  ThreadGroup(ranks).run([&](Collective& collective) {
    const int rank = collective.rank();
    GuardOptions options = unwatched();
    options.replica_group = group(rank);
    const auto guard = create_guard(collective, options);
    const Layout mine = layout(rank);
    if (guard) statuses[static_cast<std::size_t>(rank)] = guard->agree_on_layout(mine);
  });
  for (const Status& status : statuses) EXPECT_EQ(status.to_string(), statuses[0].to_string());
  return statuses[0];
}

Status with_one_odd(int ranks, int odd, const Layout& layout) {
  return agree(ranks, [&](int rank) { return rank == odd ? layout : kLayout; });
}

TEST(LayoutAgreement, EqualLayoutsAgree) {
  for (const int ranks : {1, 2, 5}) EXPECT_TRUE(agree(ranks, [](int) { return kLayout; }).ok());
  EXPECT_TRUE(agree(3, [](int) { return Layout(); }).ok());
}

TEST(LayoutAgreement, TrainingGoesOnAfterwards) {
  Decisions decisions(3);
  run_guarded(3, unwatched(), [&](StepGuard& guard, int rank) {
    EXPECT_TRUE(guard.agree_on_layout(kLayout).ok());
    decisions.add(rank, attempt(guard, [] {}));
  });
  EXPECT_EQ(decisions.agreed_actions(), Actions{"APPLY"});
}

TEST(LayoutAgreement, AnyDifferenceOnOneRankIs83) {
  const std::pair<const char*, Layout> differences[] = {
      {"name", {{"conv1.weight", 0, 216}, {"conv1.bias", 216, 8}, {"fc.weights", 224, 640}}},
      {"case of a name", {{"conv1.weight", 0, 216}, {"conv1.Bias", 216, 8}, {"fc.weight", 224, 640}}},
      {"order", {{"conv1.bias", 216, 8}, {"conv1.weight", 0, 216}, {"fc.weight", 224, 640}}},
      {"names exchanged", {{"conv1.bias", 0, 216}, {"conv1.weight", 216, 8}, {"fc.weight", 224, 640}}},
      {"size", {{"conv1.weight", 0, 216}, {"conv1.bias", 216, 8}, {"fc.weight", 224, 641}}},
      {"offset", {{"conv1.weight", 0, 216}, {"conv1.bias", 217, 7}, {"fc.weight", 224, 640}}},
      {"one tensor fewer", {{"conv1.weight", 0, 216}, {"conv1.bias", 216, 8}}},
      {"one tensor more",
       {{"conv1.weight", 0, 216}, {"conv1.bias", 216, 8}, {"fc.weight", 224, 640}, {"", 864, 0}}},
      {"none", {}},
      {"a name that takes from its neighbour",
       {{"conv1.weight", 0, 216}, {"conv1.bias", 216, 8}, {"fc.weigh", 224, 640}}}};
  for (const auto& [what, layout] : differences) {
    const Status status = with_one_odd(4, 2, layout);
    EXPECT_EQ(status.exit_code(), 83) << what;
    EXPECT_EQ(status.message(), "rank 0: ranks hold different tensors: rank 2 against rank 0,1,3") << what;
  }
}

TEST(LayoutAgreement, WhicheverRankIsTheOddOneIsNamed) {
  for (int odd = 0; odd < 3; ++odd) {
    const std::string text = with_one_odd(3, odd, {}).message();
    EXPECT_NE(text.find("different tensors: rank " + std::to_string(odd) + " against rank "),
              std::string::npos)
        << text;
  }
}

TEST(LayoutAgreement, OfTwoRanksBothAreNamed) {
  const std::string text = with_one_odd(2, 1, {}).message();
  EXPECT_TRUE(text.ends_with(": rank 0 against rank 1") || text.ends_with(": rank 1 against rank 0"))
      << text;
}

TEST(LayoutAgreement, OfThreeCampsAllAreNamed) {
  const Status status = agree(6, [](int rank) {
    if (rank == 4) return Layout();
    return rank < 2 ? Layout{{"w", 0, 1}} : kLayout;
  });
  EXPECT_EQ(status.exit_code(), 83);
  EXPECT_NE(status.message().find("rank 4 against rank 0,1 against rank 2,3,5"), std::string::npos)
      << status.message();
}

TEST(LayoutAgreement, ReplicaGroupsMayHoldDifferentLayers) {
  const auto stage = [](int rank) { return rank % 2; };
  EXPECT_TRUE(agree(
                  4,
                  [&](int rank) {
                    return stage(rank) == 0 ? kLayout : Layout{{"head", 0, 10}};
                  },
                  stage)
                  .ok());
  // But not within one.
  const Status status = agree(
      6,
      [&](int rank) {
        return rank == 3 || stage(rank) == 0 ? kLayout : Layout{{"head", 0, 10}};
      },
      stage);
  EXPECT_EQ(status.exit_code(), 83);
  EXPECT_NE(status.message().find("rank 3 against rank 1,5 (replica group 1)"), std::string::npos)
      << status.message();
}

TEST(LayoutAgreement, AGroupsNumberMayBeAny) {
  EXPECT_TRUE(agree(
                  3,
                  [](int rank) {
                    return Layout{{"w", 0, rank}};
                  },
                  [](int rank) { return rank - 1; })
                  .ok());
}

TEST(LayoutAgreement, AHugeCampIsNamedByItsFirstSixteen) {
  const std::string text = with_one_odd(20, 0, {}).message();
  EXPECT_NE(text.find("rank 0 against rank 1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16 and 3 more"),
            std::string::npos)
      << text;
}

}  // namespace
}  // namespace holdfast
