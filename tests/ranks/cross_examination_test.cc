// The first origin's attempt is made again by another rank, too: what comes of it, and that nothing hangs or
// is decided by it.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstring>
#include <stdexcept>

#include "coord/events.h"
#include "holdfast/coord/evidence/bundle.h"
#include "holdfast/coord/evidence/evidence.pb.h"
#include "holdfast/replay.h"
#include "ranks/guarded_ranks.h"

namespace holdfast {
namespace {

constexpr int kRanks = 4;
constexpr int kBadRank = 2;
constexpr char kFirst[] = "e0001-a0000000000";
constexpr std::size_t kBatch = 6;  // floats

using Cross = CrossExamination;

// Where the fault is still there when the attempt is made again.
struct Fault {
  bool on_origin = false;
  bool on_examiner = false;
};

// What the ranks did.
struct Log {
  std::array<std::atomic<int>, kRanks> reran{};
  std::array<std::atomic<int>, kRanks> examined{};
  RecordedAttempt attempt;  // that the examiner was given; read once all ranks are done
};

std::vector<int> counts(const std::array<std::atomic<int>, kRanks>& calls) {
  return {calls.begin(), calls.end()};
}

void see_subject(const EvidenceSubject& subject, bool bad, EvidenceRecorder& to) {
  std::vector<float> values(64, 1.0f);
  to.layer(Stage::kForward, EvidenceRecorder::Kind::kActivation, "first", TensorView::of(values), 0, false);
  if (bad) values.at(static_cast<std::size_t>(subject.index)) = kNanF;
  to.layer(subject.stage, EvidenceRecorder::Kind::kOther, subject.tensor, TensorView::of(values), -1, false);
}

EvidenceProviders providers(int rank, const Fault& fault, Log* log) {
  EvidenceProviders all;
  const auto at = static_cast<std::size_t>(rank);
  all.configuration = {{"workload", "threads"}};
  all.batch = [=](const EvidenceSubject&, EvidenceRecorder& to) {
    const std::vector<float> values(kBatch, static_cast<float>(rank) + 0.5f);
    const std::array<std::int64_t, 2> shape = {2, 3};
    TensorView view = TensorView::of(values);
    view.shape = shape;
    to.batch("images", view, 0);
    to.fact("rng_key.0", "17");
  };
  all.rerun = [=](const EvidenceSubject& subject, EvidenceRecorder& to) {
    ++log->reran[at];
    see_subject(subject, fault.on_origin, to);
  };
  all.rerun_recorded = [=](const RecordedAttempt& attempt, EvidenceRecorder& to) {
    ++log->examined[at];
    log->attempt = attempt;
    see_subject(attempt.subject, fault.on_examiner, to);
  };
  return all;
}

using Change = std::function<void(int rank, EvidenceProviders*)>;

class CrossExaminations : public testing::Test {
 protected:
  // One attempt in which `bad` have a NaN, and a clean one: it was skipped, and training goes on.
  void run(const Fault& fault, const Change& change = {}, const std::string& policy = "", int ranks = kRanks,
           const std::vector<int>& bad = {kBadRank}, Stage stage = Stage::kBackward) {
    ThreadGroup(ranks).run([&](Collective& collective) {
      GuardOptions options = guard_options(std::string(kSkipAnything) + " " + policy, temp_ / "run");
      options.axes = axes_.empty() ? std::map<std::string, int>()
                                   : axes_.at(static_cast<std::size_t>(collective.rank()));
      const auto guard = create_guard(collective, options);
      if (!guard) return;
      EvidenceProviders mine = providers(collective.rank(), fault, &log_);
      if (change) change(collective.rank(), &mine);
      guard->provide_evidence(std::move(mine));
      const bool is_bad = std::ranges::count(bad, collective.rank()) != 0;
      for (const bool now : {is_bad, false}) {
        const Decision decision = attempt(*guard, [&] {
          observe_values(*guard, stage, "w", {1.0f, 2.0f, now ? kNanF : 3.0f});
        });
        decisions_.add(collective.rank(), decision);
      }
      EXPECT_TRUE(guard->close().apply());
      EXPECT_EQ(guard->updates(), 1u);
    });
  }

  BundleManifest manifest() const {
    std::unique_ptr<Bundle> bundle;
    const Status opened =
        Bundle::open(real_file_system(), temp_ / (std::string("run/incidents/") + kFirst), &bundle);
    EXPECT_TRUE(opened.ok()) << opened.to_string();
    if (!bundle) return {};
    EXPECT_EQ(bundle->verify(), std::vector<std::string>());
    return bundle->manifest();
  }

  // Also that the decision is what it would be without.
  Cross outcome(int ranks = kRanks) const {
    for (int r = 0; r < ranks; ++r) {
      EXPECT_EQ(decisions_.of(r).size(), 2u);
      if (decisions_.of(r).size() != 2) continue;
      EXPECT_EQ(decisions_.of(r)[0].action, Action::kSkip);
      EXPECT_EQ(decisions_.of(r)[1].action, Action::kApply);
    }
    const BundleManifest all = manifest();
    EXPECT_TRUE(all.has_cross_examination());
    return all.cross_examination();
  }

  void expect_not_examined(const std::string& why) {
    const Cross of = outcome();
    EXPECT_EQ(of.outcome(), Cross::NOT_EXAMINED);
    EXPECT_EQ(of.why(), why);
    EXPECT_FALSE(of.has_origin_found());
    EXPECT_FALSE(of.has_examiner_found());
  }

  const TempDir temp_;
  std::vector<std::map<std::string, int>> axes_;  // by rank
  Log log_;
  Decisions decisions_{kRanks};
};

TEST_F(CrossExaminations, BothFindItAgain) {
  run({.on_origin = true, .on_examiner = true});
  const Cross of = outcome();
  EXPECT_EQ(of.outcome(), Cross::DATA_OR_MODEL);
  EXPECT_FALSE(of.has_why());
  EXPECT_EQ(of.origin(), kBadRank);
  EXPECT_EQ(of.examiner(), 0);
  EXPECT_TRUE(of.origin_found());
  EXPECT_TRUE(of.examiner_found());
  EXPECT_EQ(of.where(), Cross::SAME_HOST);
  EXPECT_EQ(of.last_clean(), "first");
  EXPECT_EQ(of.first_dirty(), "w");
  EXPECT_EQ(of.layers_size(), 2);
  EXPECT_EQ(counts(log_.reran), (std::vector<int>{0, 0, 1, 0}));
  EXPECT_EQ(counts(log_.examined), (std::vector<int>{1, 0, 0, 0}));
}

TEST_F(CrossExaminations, OnlyTheOriginFindsItAgain) {
  run({.on_origin = true, .on_examiner = false});
  const Cross of = outcome();
  EXPECT_EQ(of.outcome(), Cross::SUSPECT_DEVICE);
  EXPECT_TRUE(of.origin_found());
  EXPECT_FALSE(of.examiner_found());
  EXPECT_EQ(of.last_clean(), "w");
  EXPECT_FALSE(of.has_first_dirty());
}

TEST_F(CrossExaminations, NeitherFindsItAgain) {
  run({.on_origin = false, .on_examiner = false});
  EXPECT_EQ(outcome().outcome(), Cross::TRANSIENT);
}

TEST_F(CrossExaminations, OnlyTheExaminerFindsIt) {
  run({.on_origin = false, .on_examiner = true});
  EXPECT_EQ(outcome().outcome(), Cross::INCONCLUSIVE);
}

TEST_F(CrossExaminations, TheExaminerHasWhatTheOriginRecorded) {
  run({.on_origin = true, .on_examiner = true});
  const RecordedAttempt& attempt = log_.attempt;
  EXPECT_EQ(attempt.rank, kBadRank);
  EXPECT_EQ(attempt.ranks, 4u);
  EXPECT_EQ(attempt.subject.stage, Stage::kBackward);
  EXPECT_EQ(attempt.subject.tensor, "w");
  EXPECT_EQ(attempt.subject.index, 2);
  EXPECT_EQ(attempt.configuration, (std::map<std::string, std::string>{{"workload", "threads"}}));
  ASSERT_NE(attempt.fact("rng_key.0"), nullptr);
  EXPECT_EQ(*attempt.fact("rng_key.0"), "17");
  ASSERT_EQ(attempt.batch.size(), 1u);
  EXPECT_EQ(attempt.batch[0].name, "images");
  EXPECT_EQ(attempt.batch[0].dtype, DType::kFloat32);
  EXPECT_EQ(attempt.batch[0].shape, (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(attempt.batch[0].micro_batch, 0);
  std::array<float, kBatch> values{};
  ASSERT_EQ(attempt.batch[0].bytes.size(), sizeof values);
  std::memcpy(values.data(), attempt.batch[0].bytes.data(), sizeof values);
  for (const float value : values) EXPECT_EQ(value, 2.5f);
}

// It was sent ahead of the rest, and is in the bundle once.
TEST_F(CrossExaminations, TheOriginsBatchIsStillInTheBundle) {
  for (const int bad : {0, kBadRank}) {
    const TempDir temp;
    const GuardOptions options = guard_options(kSkipAnything, temp / "run");
    run_guarded(kRanks, options, [&](StepGuard& guard, int rank) {
      guard.provide_evidence(providers(rank, {true, true}, &log_));
      attempt(guard, [&] { observe_values(guard, Stage::kLoss, "l", {rank == bad ? kNanF : 0.0f}); });
      EXPECT_TRUE(guard.close().apply());
    });
    std::unique_ptr<Bundle> bundle;
    ASSERT_TRUE(
        Bundle::open(real_file_system(), temp / (std::string("run/incidents/") + kFirst), &bundle).ok());
    EXPECT_EQ(bundle->verify(), std::vector<std::string>());
    EXPECT_EQ(bundle->manifest().cross_examination().outcome(), Cross::DATA_OR_MODEL);
    EXPECT_EQ(bundle->manifest().cross_examination().examiner(), bad == 0 ? 1 : 0);
    int tensors = 0;
    for (const EvidencePart& part : bundle->manifest().parts()) {
      tensors += part.tensors_size();
      if (part.rank() != bad) continue;
      ASSERT_EQ(part.tensors_size(), 1) << bad;
      EXPECT_EQ(part.tensors(0).name(), "images");
      Bytes bytes;
      ASSERT_TRUE(bundle->read(part.tensors(0), &bytes).ok());
      float first = 0;
      std::memcpy(&first, bytes.data(), sizeof first);
      EXPECT_EQ(first, static_cast<float>(bad) + 0.5f);
    }
    EXPECT_EQ(tensors, 1);
  }
}

TEST_F(CrossExaminations, ItIsOnRecord) {
  run({.on_origin = true, .on_examiner = false});
  const auto events = events_named(temp_ / "run", "evidence_cross_examined");
  ASSERT_EQ(events.size(), 1u);
  const Json& event = events[0];
  EXPECT_EQ(event["bundle"], kFirst);
  EXPECT_EQ(event["attempt"], 0);
  EXPECT_EQ(event["outcome"], "SUSPECT_DEVICE");
  EXPECT_EQ(event["origin"]["rank"], kBadRank);
  EXPECT_EQ(event["origin"]["found_again"], true);
  EXPECT_EQ(event["origin"]["hardware_suspect"], false);
  EXPECT_EQ(event["examiner"]["rank"], 0);
  EXPECT_EQ(event["examiner"]["where"], "SAME_HOST");
  EXPECT_EQ(event["examiner"]["found_again"], false);
  EXPECT_FALSE(event.contains("reason"));
}

TEST_F(CrossExaminations, AnExaminerThatThrowsIsOnRecord) {
  run({.on_origin = true}, [](int, EvidenceProviders* p) {
    p->rerun_recorded = [](const RecordedAttempt&, EvidenceRecorder&) { throw std::runtime_error("no GPU"); };
  });
  expect_not_examined("rank 0 could not make the attempt again: no GPU");
}

TEST_F(CrossExaminations, WhatAnExaminerFoundBeforeItThrewCounts) {
  run({.on_origin = true}, [](int, EvidenceProviders* p) {
    p->rerun_recorded = [](const RecordedAttempt& attempt, EvidenceRecorder& to) {
      see_subject(attempt.subject, true, to);
      throw 7;
    };
  });
  EXPECT_EQ(outcome().outcome(), Cross::DATA_OR_MODEL);
}

TEST_F(CrossExaminations, AnOriginThatThrowsIsNotExamined) {
  run({.on_examiner = true}, [](int, EvidenceProviders* p) {
    p->rerun = [](const EvidenceSubject&, EvidenceRecorder&) { throw std::runtime_error("out of memory"); };
  });
  expect_not_examined("rank 2 could not make the attempt again: out of memory");
}

TEST_F(CrossExaminations, WithoutABatchThereIsNone) {
  run({true, true}, [](int, EvidenceProviders* p) { p->batch = nullptr; });
  expect_not_examined("rank 0 could not make the attempt again: its batch is not known");
  EXPECT_EQ(counts(log_.examined), std::vector<int>(kRanks, 0));
}

TEST_F(CrossExaminations, ABatchThatCannotBeToldIsNotExamined) {
  run({true, true}, [](int, EvidenceProviders* p) {
    p->batch = [](const EvidenceSubject&, EvidenceRecorder&) { throw std::runtime_error("closed"); };
  });
  // The origin found it again all the same.
  expect_not_examined("rank 0 could not make the attempt again: its batch is not known: closed");
  EXPECT_EQ(counts(log_.reran), (std::vector<int>{0, 0, 1, 0}));
}

TEST_F(CrossExaminations, ABatchBeyondTheBundlesQuotaIsNotExamined) {
  run({true, true}, {}, "evidence { bundle_quota_bytes: 46 }");  // half of it is for the state
  expect_not_examined(
      "rank 0 could not make the attempt again: its batch is not whole: images is left out, for quota");
}

TEST_F(CrossExaminations, ABatchThatIsTooLargeToBeSentRoundIsKeptAndNotExamined) {
  run({true, true}, {}, "evidence { cross_examine_bytes: 23 }");
  expect_not_examined("rank 0 could not make the attempt again: its batch has 24 bytes, and may have 23");
  const BundleManifest all = manifest();
  for (const EvidencePart& part : all.parts())
    EXPECT_EQ(part.tensors_size(), part.is_origin() ? 1 : 0);
}

TEST_F(CrossExaminations, ABatchThatJustFitsIsExamined) {
  run({true, true}, {}, "evidence { cross_examine_bytes: 24 }");
  EXPECT_EQ(outcome().outcome(), Cross::DATA_OR_MODEL);
}

TEST_F(CrossExaminations, ARankThatCannotSaysSo) {
  run({true, true},
      [](int rank, EvidenceProviders* p) {
        if (rank == 1) p->rerun_recorded = nullptr;
      },
      "", kRanks, {0});
  expect_not_examined("rank 1 could not make the attempt again: its trainer has not said how");
}

TEST_F(CrossExaminations, WithoutAProviderNobodyIsAsked) {
  run({true, true}, [](int, EvidenceProviders* p) { p->rerun_recorded = nullptr; });
  expect_not_examined("the trainer has not said how another rank's attempt is made again");
  EXPECT_TRUE(events_named(temp_ / "run", "evidence_cross_examined").empty());
}

TEST_F(CrossExaminations, ThePolicyCanForbidIt) {
  run({true, true}, {}, "evidence { cross_examine: false }");
  EXPECT_FALSE(manifest().has_cross_examination());
  EXPECT_EQ(counts(log_.examined), std::vector<int>(kRanks, 0));
}

TEST_F(CrossExaminations, ACompactIncidentIsNotExamined) {
  run({true, true}, {}, "evidence { full_incidents: 0 }");
  EXPECT_FALSE(manifest().has_cross_examination());
  EXPECT_EQ(counts(log_.examined), std::vector<int>(kRanks, 0));
}

TEST_F(CrossExaminations, OneRankAloneIsNotExamined) {
  run({true, true}, {}, "", 1, {0});
  const Cross of = outcome(1);
  EXPECT_EQ(of.outcome(), Cross::NOT_EXAMINED);
  EXPECT_EQ(of.why(), "there is no other rank with the same parameters");
}

TEST_F(CrossExaminations, ASumIsNotExamined) {
  run({true, true}, {}, "", kRanks, {kBadRank}, Stage::kReduction);
  EXPECT_FALSE(manifest().has_cross_examination());
  EXPECT_EQ(counts(log_.examined), std::vector<int>(kRanks, 0));
}

TEST_F(CrossExaminations, OfSeveralOriginsTheFirstIsExaminedByOneThatIsNone) {
  run({true, true}, {}, "", kRanks, {0, 1, 3});
  const Cross of = outcome();
  EXPECT_EQ(of.origin(), 0);
  EXPECT_EQ(of.examiner(), 2);
  EXPECT_EQ(counts(log_.reran), (std::vector<int>{1, 1, 0, 1}));
  EXPECT_EQ(counts(log_.examined), (std::vector<int>{0, 0, 1, 0}));
}

// It makes its own attempt again, and then the other.
TEST_F(CrossExaminations, WhenAllAreOriginsOneOfThemExamines) {
  run({true, true}, {}, "", kRanks, {0, 1, 2, 3});
  const Cross of = outcome();
  EXPECT_EQ(of.outcome(), Cross::DATA_OR_MODEL);
  EXPECT_EQ(of.origin(), 0);
  EXPECT_EQ(of.examiner(), 1);
  EXPECT_EQ(counts(log_.reran), std::vector<int>(kRanks, 1));
  EXPECT_EQ(counts(log_.examined), (std::vector<int>{0, 1, 0, 0}));
}

TEST_F(CrossExaminations, TheExaminerHasTheSameParameters) {
  axes_ = {{{"dp", 0}, {"tp", 0}}, {{"dp", 0}, {"tp", 1}}, {{"dp", 1}, {"tp", 0}}, {{"dp", 1}, {"tp", 1}}};
  run({true, true}, {}, "", kRanks, {3});
  EXPECT_EQ(outcome().examiner(), 1);
}

TEST_F(CrossExaminations, BuffersAreAsBeforeOnTheExaminer) {
  run_guarded(kRanks, guard_options(kSkipAnything, temp_ / "run"), [&](StepGuard& guard, int rank) {
    std::vector<float> mean = {1.0f};
    guard.protect(mean.data(), sizeof(float));
    EvidenceProviders mine = providers(rank, {true, true}, &log_);
    mine.rerun_recorded = [&](const RecordedAttempt&, EvidenceRecorder&) {
      EXPECT_EQ(mean[0], 1.0f);
      mean = {7.0f};
      throw std::runtime_error("half-way");
    };
    guard.provide_evidence(std::move(mine));
    guard.begin();
    mean = {2.0f};
    observe_values(guard, Stage::kBackward, "w", {rank == kBadRank ? kNanF : 1.0f});
    EXPECT_EQ(guard.decide().action, Action::kSkip);
    EXPECT_EQ(mean[0], 1.0f);
    guard.finish();
    EXPECT_TRUE(guard.close().apply());
  });
}

// Three incidents on one device make it a suspect, unless another device shows that it is not to blame.
TEST_F(CrossExaminations, WhatAnotherDeviceFindsTooIsNoReasonToSuspectTheFirst) {
  for (const bool data : {false, true}) {
    const TempDir temp;
    const GuardOptions options =
        guard_options(std::string(kSkipAnything) + " suspect_after_incidents: 2", temp / "run");
    run_guarded(kRanks, options, [&](StepGuard& guard, int rank) {
      guard.provide_evidence(providers(rank, {true, data}, &log_));
      for (int i = 0; i < 2; ++i)
        attempt(guard, [&] { observe_values(guard, Stage::kLoss, "l", {rank == kBadRank ? kNanF : 0.0f}); });
      EXPECT_TRUE(guard.close().apply());
    });
    const auto events = events_named(temp / "run", "evidence_cross_examined");
    ASSERT_EQ(events.size(), 2u);
    EXPECT_EQ(events[0]["origin"]["hardware_suspect"], false);
    EXPECT_EQ(events[1]["origin"]["hardware_suspect"], !data);
    EXPECT_EQ(events_named(temp / "run", "attempt_skipped")[1]["origins"][0]["hardware_suspect"], !data);
  }
}

}  // namespace
}  // namespace holdfast
