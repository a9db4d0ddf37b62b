#include "holdfast/coord/incident.h"

#include <gtest/gtest.h>

#include <bit>
#include <random>

#include "coord/sample_incident.h"

namespace holdfast {
namespace {

void expect_same(const RankView& a, const RankView& b) {
  EXPECT_EQ(a.rank, b.rank);
  EXPECT_EQ(a.host, b.host);
  ASSERT_EQ(a.findings.size(), b.findings.size());
  for (std::size_t i = 0; i < a.findings.size(); ++i) {
    EXPECT_EQ(a.findings[i].stage, b.findings[i].stage);
    EXPECT_EQ(a.findings[i].tensor, b.findings[i].tensor);
    EXPECT_EQ(a.findings[i].index, b.findings[i].index);
    EXPECT_EQ(a.findings[i].counts, b.findings[i].counts);
    EXPECT_EQ(a.findings[i].micro_batch, b.findings[i].micro_batch);
  }
  ASSERT_EQ(a.error.has_value(), b.error.has_value());
  if (a.error) {
    EXPECT_EQ(a.error->stage, b.error->stage);
    EXPECT_EQ(a.error->what, b.error->what);
  }
  ASSERT_EQ(a.has_loss, b.has_loss);
  if (a.has_loss) {
    EXPECT_EQ(std::bit_cast<std::uint64_t>(a.loss), std::bit_cast<std::uint64_t>(b.loss));
  }
  EXPECT_EQ(agreement_hash(a.agreement), agreement_hash(b.agreement));
  EXPECT_EQ(a.replica_digests, b.replica_digests);
  EXPECT_EQ(a.proven_tensors, b.proven_tensors);
}

RankView full_view() {
  RankView view = sample_view(
      511, {{Stage::kOptimizer, "embed/\xff\xfe \n\"", ~std::uint64_t{0}, {1, 2, 3}, 7},
            {Stage::kInput, "", 0, {~std::uint64_t{0}, 0, 0}, 0},
            {Stage::kInput, std::string("a\0b", 3), 1, {0, 0, std::uint64_t{1} << 44}, 2147483647}});
  view.host = "\x80 host";
  view.error = LocalError{Stage::kLoss, std::string("what\0\xc3(", 7)};
  view.agreement = {~std::uint64_t{0}, 3, 0x9f01};
  view.replica_digests = {~std::uint64_t{0}, 0};
  view.proven_tensors = {"w\xff", ""};
  return view;
}

TEST(RankViewBytes, GiveBackEveryField) {
  RankView read;
  ASSERT_TRUE(decode_rank_view(encode_rank_view(full_view()), &read));
  expect_same(full_view(), read);
  ASSERT_TRUE(decode_rank_view(encode_rank_view(RankView()), &read));
  expect_same(RankView(), read);
}

TEST(RankViewBytes, KeepTheLossBitForBit) {
  const std::vector<std::uint64_t> patterns = {0x7ff8000000000000u, 0xfff8000000000000u, 0x7ff0000000000001u,
                                               0x7ff8dead0000beefu,  // NaNs
                                               0x7ff0000000000000u, 0xfff0000000000000u, 0x8000000000000000u,
                                               0x0000000000000001u, 0x3ff0000000000000u};
  for (const std::uint64_t bits : patterns) {
    RankView view = sample_view(1, {});
    view.has_loss = true;
    view.loss = std::bit_cast<double>(bits);
    RankView read;
    ASSERT_TRUE(decode_rank_view(encode_rank_view(view), &read));
    expect_same(view, read);
  }
}

TEST(RankViewBytes, AnEmptyErrorTextIsStillAnError) {
  RankView view = sample_view(1, {});
  view.error = LocalError{Stage::kInput, ""};
  RankView read;
  ASSERT_TRUE(decode_rank_view(encode_rank_view(view), &read));
  expect_same(view, read);
}

TEST(RankViewBytes, AStageThatDoesNotExistIsRefused) {
  RankView read;
  for (const int stage : {-1, kStageCount, 1 << 30}) {
    RankView view = sample_view(0, {{static_cast<Stage>(stage), "t", 0, {1, 0, 0}, 0}});
    EXPECT_FALSE(decode_rank_view(encode_rank_view(view), &read)) << stage;
    view.findings.clear();
    view.error = LocalError{static_cast<Stage>(stage), "x"};
    EXPECT_FALSE(decode_rank_view(encode_rank_view(view), &read)) << stage;
  }
}

TEST(RankViewBytes, TruncatedOrRandomBytesNeverGiveAnUnknownStage) {
  std::mt19937 random(4);
  const auto check = [](const std::string& bytes) {
    RankView read;
    if (!decode_rank_view(bytes, &read)) return;
    for (const Finding& finding : read.findings) EXPECT_LT(static_cast<int>(finding.stage), kStageCount);
    if (read.error) {
      EXPECT_LT(static_cast<int>(read.error->stage), kStageCount);
    }
  };
  const std::string whole = encode_rank_view(full_view());
  for (std::size_t size = 0; size < whole.size(); ++size) check(whole.substr(0, size));
  for (int round = 0; round < 20000; ++round) {
    std::string bytes(random() % 60, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    check(bytes);
    std::string flipped = whole;
    for (int i = 0; i < 3; ++i) flipped[random() % flipped.size()] = static_cast<char>(random());
    check(flipped);
  }
}

// Field case 33: a NaN that one rank made is on every rank after the sum; only where it began is an origin.
TEST(Incident, OriginsAreTheRanksThatSawTheEarliestStage) {
  Incident incident = sample_incident(8, [](Record& sum) {
    sum.add_bad(Stage::kBackward, {3, 1, 0});
    sum.add_bad(Stage::kReduction, {8, 0, 0});
  });
  incident.views = {sample_view(0, {{Stage::kReduction, "w", 5, {1, 0, 0}, 0}}),
                    sample_view(2, {{Stage::kReduction, "w", 5, {1, 0, 0}, 0},
                                    {Stage::kBackward, "b", 9, {1, 0, 0}, 1},
                                    {Stage::kBackward, "c", 2, {1, 1, 0}, 0}}),
                    sample_view(6, {{Stage::kBackward, "c", 3, {1, 0, 0}, 0}})};
  const std::vector<Origin> origins = incident.origins();
  ASSERT_EQ(origins.size(), 2u);
  EXPECT_EQ(origins[0].rank, 2);
  EXPECT_EQ(origins[0].host, "node2");
  EXPECT_EQ(origins[0].finding.tensor, "b");  // the first that it saw
  EXPECT_EQ(origins[0].finding.index, 9u);
  EXPECT_EQ(origins[0].counts, (BadCounts{2, 1, 0}));  // over both of its tensors
  EXPECT_EQ(origins[1].rank, 6);
  EXPECT_EQ(origins[1].counts, (BadCounts{1, 0, 0}));
  EXPECT_EQ(incident.stage(), Stage::kBackward);
  EXPECT_EQ(incident.describe(),
            "4 non-finite values at backward, first on rank 2 (host node2) in b[9] and on 1 more");
}

TEST(Incident, WithoutNonFiniteValuesThereAreNoOrigins) {
  const Incident incident = exception_on(1, "cannot read shard 7");
  EXPECT_TRUE(incident.origins().empty());
  EXPECT_EQ(incident.stage(), Stage::kForward);
  EXPECT_EQ(incident.describe(), "exception on rank 1 (host node1) at forward: cannot read shard 7");
}

TEST(Incident, OfSeveralErrorsTheLowestRankIsNamed) {
  Incident incident = exception_on(1, "first");
  incident.views.push_back(exception_on(3, "second").views[0]);
  ASSERT_NE(incident.first_error(), nullptr);
  EXPECT_EQ(incident.first_error()->rank, 1);
}

TEST(Incident, CanBeDescribedWithoutAnyReport) {
  Incident incident = sample_incident(4, [](Record& sum) { sum.add_bad(Stage::kLoss, {0, 2, 0}); });
  EXPECT_EQ(incident.describe(), "2 non-finite values at loss");
  EXPECT_TRUE(incident.origins().empty());
  incident = sample_incident(4, [](Record& sum) { sum.set_error(); });
  EXPECT_FALSE(incident.describe().empty());
  EXPECT_FALSE(incident.stage());
  EXPECT_EQ(incident.first_error(), nullptr);
}

}  // namespace
}  // namespace holdfast
