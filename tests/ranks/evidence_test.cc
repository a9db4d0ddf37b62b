// What the ranks contribute to the record of an incident, and that it costs a clean attempt nothing.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cmath>
#include <stdexcept>

#include "coord/events.h"
#include "count_allocations.h"
#include "holdfast/coord/evidence/bundle.h"
#include "holdfast/coord/evidence/evidence.pb.h"
#include "ranks/guarded_ranks.h"

namespace holdfast {
namespace {

constexpr int kRanks = 4;
constexpr int kBadRank = 2;

// Calls of a rank's providers, by rank.
struct Calls {
  std::array<std::atomic<int>, kRanks> batch{};
  std::array<std::atomic<int>, kRanks> rerun{};
};

using Counts = std::vector<int>;
Counts counts(const std::array<std::atomic<int>, kRanks>& calls) { return {calls.begin(), calls.end()}; }

// One value of `batch` bytes, and a layer that is bad where the subject says.
EvidenceProviders providers(int rank, Calls* calls, std::size_t batch = 4) {
  EvidenceProviders all;
  const auto at = static_cast<std::size_t>(rank);
  all.batch = [=](const EvidenceSubject&, EvidenceRecorder& to) {
    ++calls->batch[at];
    const std::vector<float> values(batch / sizeof(float), static_cast<float>(rank));
    to.batch("images", TensorView::of(values), 0);
    to.fact("samples", std::to_string(rank));
  };
  all.rerun = [=](const EvidenceSubject& subject, EvidenceRecorder& to) {
    ++calls->rerun[at];
    std::vector<float> values(64, 1.0f);
    to.layer(Stage::kForward, EvidenceRecorder::Kind::kActivation, "first", TensorView::of(values), 0, false);
    if (subject.index >= 0) values.at(static_cast<std::size_t>(subject.index)) = kNanF;
    to.layer(subject.stage, EvidenceRecorder::Kind::kOther, subject.tensor, TensorView::of(values), -1,
             false);
  };
  all.configuration = {{"workload", "threads"}};
  all.injected = {"nan@backward"};
  return all;
}

void bad_attempt(StepGuard& guard, bool bad, Action action = Action::kSkip) {
  const Decision decision = attempt(guard, [&] {
    observe_values(guard, Stage::kForward, "output", {1.0f});
    observe_values(guard, Stage::kBackward, "w", {1.0f, 2.0f, bad ? kNanF : 3.0f});
  });
  EXPECT_EQ(decision.action, action);
}

GuardOptions recording(const TempDir& temp, const std::string& policy = "") {
  return guard_options(std::string(kSkipAnything) + " " + policy, temp / "run");
}

BundleManifest manifest_of(const TempDir& temp, const std::string& name) {
  std::unique_ptr<Bundle> bundle;
  const Status opened = Bundle::open(real_file_system(), temp / ("run/incidents/" + name), &bundle);
  EXPECT_TRUE(opened.ok()) << opened.to_string();
  if (!bundle) return {};
  EXPECT_EQ(bundle->verify(), std::vector<std::string>());
  return bundle->manifest();
}

const EvidencePart* part_of(const BundleManifest& manifest, int rank) {
  for (const EvidencePart& part : manifest.parts()) {
    if (part.rank() == rank) return &part;
  }
  return nullptr;
}

constexpr char kFirst[] = "e0001-a0000000000";

TEST(Evidence, CleanAttemptsAskForNothing) {
  const TempDir temp;
  Calls calls;
  run_guarded(kRanks, recording(temp), [&](StepGuard& guard, int rank) {
    guard.provide_evidence(providers(rank, &calls));
    for (int i = 0; i < 50; ++i) bad_attempt(guard, false, Action::kApply);
    EXPECT_TRUE(guard.close().apply());
  });
  EXPECT_EQ(counts(calls.batch), Counts(kRanks, 0));
  EXPECT_EQ(counts(calls.rerun), Counts(kRanks, 0));
  EXPECT_TRUE(events_named(temp / "run", "evidence_written").empty());
}

TEST(Evidence, OriginsAreAskedAndNobodyElse) {
  const TempDir temp;
  Calls calls;
  run_guarded(kRanks, recording(temp), [&](StepGuard& guard, int rank) {
    guard.provide_evidence(providers(rank, &calls));
    bad_attempt(guard, rank == kBadRank);
    EXPECT_TRUE(guard.close().apply());
  });
  EXPECT_EQ(counts(calls.batch), (Counts{0, 0, 1, 0}));
  EXPECT_EQ(counts(calls.rerun), (Counts{0, 0, 1, 0}));
  const BundleManifest manifest = manifest_of(temp, kFirst);
  ASSERT_EQ(manifest.origins_size(), 1);
  EXPECT_EQ(manifest.origins(0).rank(), kBadRank);
  EXPECT_EQ(manifest.origins(0).index(), 2u);
  EXPECT_EQ(manifest.injected(0), "nan@backward");
  ASSERT_EQ(manifest.parts_size(), 2);  // rank 0's measurements, and the origin
  const EvidencePart* part = part_of(manifest, kBadRank);
  ASSERT_NE(part, nullptr);
  EXPECT_TRUE(part->is_origin());
  EXPECT_TRUE(part->reran());
  EXPECT_TRUE(part->rerun_agrees());
  EXPECT_EQ(part->last_clean(), "first");
  EXPECT_EQ(part->first_dirty(), "w");
  ASSERT_EQ(part->tensors_size(), 1);
  EXPECT_EQ(part->tensors(0).name(), "images");
  EXPECT_EQ(part->facts(0).value(), "2");
  EXPECT_FALSE(part_of(manifest, 0)->is_origin());
}

TEST(Evidence, OfManyOriginsAsManyAreAskedAsThePolicySays) {
  const TempDir temp;
  Calls calls;
  run_guarded(kRanks, recording(temp, "evidence { max_full_origins: 2 }"), [&](StepGuard& guard, int rank) {
    guard.provide_evidence(providers(rank, &calls));
    bad_attempt(guard, rank > 0);
    EXPECT_TRUE(guard.close().apply());
  });
  EXPECT_EQ(counts(calls.batch), (Counts{0, 1, 1, 0}));
  const BundleManifest manifest = manifest_of(temp, kFirst);
  EXPECT_EQ(manifest.origins_size(), 3);
  ASSERT_EQ(manifest.omitted_size(), 1);
  EXPECT_EQ(manifest.omitted(0).what(), "evidence of 1 more origin");
  EXPECT_EQ(manifest.omitted(0).why(), "max_full_origins: 2");
}

TEST(Evidence, EveryRankIsAskedForItsPartOfASum) {
  const TempDir temp;
  Calls calls;
  std::vector<float> reduced = {1.0f, kInfF};
  const std::vector<BucketSlice> layout = {{"w", 0, 2}};
  run_guarded(kRanks, recording(temp), [&](StepGuard& guard, int rank) {
    guard.provide_evidence(providers(rank, &calls));
    const Decision decision = attempt(guard, [&] { guard.observe_share(TensorView::of(reduced), layout); });
    EXPECT_EQ(decision.action, Action::kSkip);
    EXPECT_TRUE(guard.close().apply());
  });
  EXPECT_EQ(counts(calls.rerun), Counts(kRanks, 1));
  int batches = 0;
  for (const int count : counts(calls.batch)) batches += count;
  EXPECT_EQ(batches, 1);  // of the rank whose share it is in
  EXPECT_EQ(manifest_of(temp, kFirst).parts_size(), kRanks);
  EXPECT_FALSE(manifest_of(temp, kFirst).parts(0).has_replica_group());
}

// Two groups, of even and of odd ranks; what is reduced over the odd ones is not finite.
TEST(Evidence, OnlyTheRanksOfItsReplicaGroupAreAskedForTheirPartOfASum) {
  const TempDir temp;
  Calls calls;
  const std::vector<BucketSlice> layout = {{"w", 0, 2}};
  ThreadGroup(kRanks).run([&](Collective& collective) {
    GuardOptions options = recording(temp);
    options.axes = {{"dp", collective.rank() / 2}, {"tp", collective.rank() % 2}};
    const auto guard = create_guard(collective, options);
    ASSERT_NE(guard, nullptr);
    guard->provide_evidence(providers(collective.rank(), &calls));
    std::vector<float> reduced = {1.0f, collective.rank() % 2 == 1 ? kInfF : 2.0f};
    const Decision decision = attempt(*guard, [&] { guard->observe_share(TensorView::of(reduced), layout); });
    EXPECT_EQ(decision.action, Action::kSkip);
    EXPECT_TRUE(guard->close().apply());
  });
  EXPECT_EQ(counts(calls.rerun), (Counts{0, 1, 0, 1}));
  const BundleManifest manifest = manifest_of(temp, kFirst);
  EXPECT_EQ(manifest.parts_size(), 3);  // and rank 0's, with the state
  for (const EvidencePart& part : manifest.parts()) {
    EXPECT_EQ(part.replica_group(), part.rank() == 0 ? "tp=0" : "tp=1");
    EXPECT_EQ(part.replicas(), 2u);
  }
}

TEST(Evidence, AProviderThatThrowsIsOnRecordAndChangesNoDecision) {
  const TempDir temp;
  Calls calls;
  run_guarded(kRanks, recording(temp), [&](StepGuard& guard, int rank) {
    EvidenceProviders throwing = providers(rank, &calls);
    throwing.batch = [](const EvidenceSubject&, EvidenceRecorder&) { throw std::runtime_error("no batch"); };
    throwing.rerun = [](const EvidenceSubject&, EvidenceRecorder&) { throw 7; };
    guard.provide_evidence(std::move(throwing));
    bad_attempt(guard, rank == kBadRank);
    bad_attempt(guard, false, Action::kApply);
    EXPECT_TRUE(guard.close().apply());
    EXPECT_EQ(guard.updates(), 1u);
  });
  const BundleManifest manifest = manifest_of(temp, kFirst);
  ASSERT_NE(part_of(manifest, kBadRank), nullptr);
  EXPECT_EQ(part_of(manifest, kBadRank)->failure(), "no batch; exception of unknown type");
  EXPECT_FALSE(part_of(manifest, kBadRank)->rerun_agrees());
  EXPECT_EQ(part_of(manifest, kBadRank)->tensors_size(), 0);
}

TEST(Evidence, WhatExceedsTheQuotaIsLeftOutAndSaidToBe) {
  const TempDir temp;
  Calls calls;
  run_guarded(kRanks, recording(temp, "evidence { bundle_quota_bytes: 1024 }"),
              [&](StepGuard& guard, int rank) {
                guard.provide_evidence(providers(rank, &calls, 4096));
                bad_attempt(guard, rank == kBadRank);
                EXPECT_TRUE(guard.close().apply());
              });
  const BundleManifest manifest = manifest_of(temp, kFirst);
  EXPECT_TRUE(manifest.compact());
  const EvidencePart* part = part_of(manifest, kBadRank);
  ASSERT_NE(part, nullptr);
  EXPECT_EQ(part->tensors_size(), 0);
  ASSERT_EQ(part->omitted_size(), 1);
  EXPECT_EQ(part->omitted(0).what(), "images");
  EXPECT_EQ(part->omitted(0).bytes(), 4096u);
  EXPECT_EQ(part->omitted(0).why(), "quota");
  EXPECT_EQ(part->facts_size(), 1);
}

TEST(Evidence, BuffersAreAsBeforeTheAttemptForAndAfterARerun) {
  const TempDir temp;
  run_guarded(kRanks, recording(temp), [&](StepGuard& guard, int rank) {
    std::vector<float> mean = {1.0f, -0.0f};
    guard.protect(mean.data(), mean.size() * sizeof(float));
    std::vector<float> seen;
    EvidenceProviders mutating;
    mutating.batch = [&](const EvidenceSubject&, EvidenceRecorder&) { seen = mean; };
    mutating.rerun = [&](const EvidenceSubject&, EvidenceRecorder&) {
      EXPECT_EQ(mean[0], 1.0f);
      mean = {7.0f, 7.0f};
      throw std::runtime_error("half-way");
    };
    guard.provide_evidence(std::move(mutating));
    guard.begin();
    mean = {2.0f, 2.0f};
    observe_values(guard, Stage::kBackward, "w", {rank == kBadRank ? kNanF : 1.0f});
    EXPECT_EQ(guard.decide().action, Action::kSkip);
    EXPECT_EQ(mean, (std::vector<float>{1.0f, -0.0f}));
    EXPECT_TRUE(std::signbit(mean[1]));
    EXPECT_EQ(seen.empty(), rank != kBadRank);
    guard.finish();
    EXPECT_TRUE(guard.close().apply());
  });
}

TEST(Evidence, WithoutProvidersThereIsNoFolder) {
  const TempDir temp;
  run_guarded(kRanks, recording(temp), [&](StepGuard& guard, int rank) {
    bad_attempt(guard, rank == kBadRank);
    EXPECT_TRUE(guard.close().apply());
  });
  EXPECT_FALSE(real_file_system().exists(temp / "run/incidents"));
}

TEST(Evidence, ALaterIncidentIsCompactAndIsNotMadeAgain) {
  const TempDir temp;
  Calls calls;
  run_guarded(kRanks, recording(temp, "evidence { full_incidents: 0 }"), [&](StepGuard& guard, int rank) {
    guard.provide_evidence(providers(rank, &calls));
    bad_attempt(guard, rank == kBadRank);
    EXPECT_TRUE(guard.close().apply());
  });
  EXPECT_EQ(counts(calls.rerun), Counts(kRanks, 0));
  const BundleManifest manifest = manifest_of(temp, kFirst);
  EXPECT_TRUE(manifest.compact());
  ASSERT_NE(part_of(manifest, kBadRank), nullptr);
  EXPECT_FALSE(part_of(manifest, kBadRank)->reran());
}

TEST(Evidence, ACleanAttemptAllocatesNothing) {
  const TempDir temp;
  Calls calls;
  run_guarded(1, recording(temp), [&](StepGuard& guard, int rank) {
    guard.provide_evidence(providers(rank, &calls));
    std::vector<float> values(64, 1.0f);
    const auto allocations = [&] {
      const long before = g_allocations;
      guard.begin();
      guard.observe(Stage::kBackward, "w", TensorView::of(values));
      static_cast<void>(guard.decide());
      guard.finish();
      return g_allocations - before;
    };
    for (int i = 0; i < 10; ++i) allocations();
    long of_clean = 0;
    for (int i = 0; i < 100; ++i) of_clean += allocations();
    EXPECT_EQ(of_clean, 0);
    values.back() = kNanF;
    EXPECT_GT(allocations(), 0);
    EXPECT_TRUE(guard.close().apply());
  });
}

}  // namespace
}  // namespace holdfast
