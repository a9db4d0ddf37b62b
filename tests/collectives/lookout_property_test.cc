// Random jobs against the plain statement of who is to be called what.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <tuple>

#include "collectives/lookout_world.h"

namespace holdfast {
namespace {

using Move = Lookout::Move;

enum class Fate { kWaits, kSlow, kStuck, kSilent, kDied, kLeft, kPaused };

struct Job {
  std::vector<Fate> fates;
  std::vector<Answer> answers;
  int observer = 0;  // rank 0, or the deputy
};

// One rank at least waits at the front. Mostly, few things are wrong at once.
Job random_job(std::mt19937& random) {
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  Job job;
  const int ranks = 2 + below(9);
  job.observer = below(3) == 0 ? 1 : 0;
  const bool all_at_one_place = below(4) == 0;
  const int trouble = 1 + below(8);
  for (int r = 0; r < ranks; ++r) {
    Fate fate = all_at_one_place || below(8) >= trouble ? Fate::kWaits : static_cast<Fate>(below(7));
    const bool observes = r == job.observer;
    if (observes && (fate == Fate::kSilent || fate == Fate::kDied || fate == Fate::kLeft))
      fate = Fate::kWaits;
    job.fates.push_back(fate);
  }
  const auto front_rank = static_cast<std::size_t>(below(ranks));
  if (job.fates[front_rank] != Fate::kPaused && static_cast<int>(front_rank) == job.observer) {
    job.fates[front_rank] = Fate::kWaits;
  }
  const Place front{1 + random() % 3, random() % 1000, static_cast<std::uint32_t>(random() % 40 + 1),
                    Phase::kDecide};
  const bool patience_is_over = below(3) == 0;
  for (const Fate fate : job.fates) {
    Answer answer{front, fate == Fate::kPaused, 0};
    if (fate == Fate::kSlow || fate == Fate::kStuck || (fate == Fate::kPaused && below(2) == 0)) {
      switch (below(front.attempt == 0 ? 1 : 2)) {
        case 0: answer.place.step = static_cast<std::uint32_t>(below(static_cast<int>(front.step))); break;
        default: answer.place.attempt -= 1 + random() % front.attempt; break;
      }
    }
    if (fate == Fate::kWaits) {
      answer.deadlines_missed = static_cast<std::uint32_t>(patience_is_over ? 10 + below(5) : below(12));
    }
    if (fate == Fate::kStuck) answer.deadlines_missed = static_cast<std::uint32_t>(1 + below(20));
    job.answers.push_back(answer);
  }
  return job;
}

struct Expected {
  Move end = Move::kNothing;
  std::string missing;
  std::vector<int> survivors;
};

Expected oracle(const Job& job) {
  const auto any = [&](Fate fate) { return std::ranges::count(job.fates, fate) > 0; };
  const bool death = any(Fate::kDied);
  const bool absent = death || any(Fate::kSilent) || any(Fate::kLeft);  // whom the others may wait for
  const bool answers =
      job.fates[0] != Fate::kSilent && job.fates[0] != Fate::kDied && job.fates[0] != Fate::kLeft;
  Expected expected;
  if (job.observer != 0 && answers) return expected;  // rank 0 speaks

  // Only among those who answer is somebody in front.
  std::tuple<std::uint64_t, std::uint64_t, std::uint32_t> front;
  std::uint32_t least_missed = ~0u;
  const auto here = [&](std::size_t r) {
    return job.fates[r] != Fate::kSilent && job.fates[r] != Fate::kDied && job.fates[r] != Fate::kLeft;
  };
  const auto place = [&](std::size_t r) {
    const Place& p = job.answers[r].place;
    return std::tuple(p.epoch, p.attempt, p.step);
  };
  for (std::size_t r = 0; r < job.fates.size(); ++r) {
    if (!here(r)) continue;
    front = std::max(front, place(r));
    least_missed = std::min(least_missed, job.answers[r].deadlines_missed);
  }
  auto rear = front;  // of those who are overdue
  for (std::size_t r = 0; r < job.fates.size(); ++r) {
    if (here(r) && job.answers[r].deadlines_missed > 0) rear = std::min(rear, place(r));
  }
  std::vector<std::pair<std::size_t, const char*>> missing;
  bool all_in_front = true;
  for (std::size_t r = 0; r < job.fates.size(); ++r) {
    const char* how = nullptr;
    if (job.fates[r] == Fate::kDied) {
      how = "died";
    } else if (job.fates[r] == Fate::kSilent) {
      how = death ? "" : "silent";
    } else if (job.fates[r] == Fate::kLeft) {
      how = death ? "" : "left";
    } else if (place(r) != front) {
      all_in_front = false;
      if (!absent && job.answers[r].deadlines_missed > 0 && place(r) == rear) how = "stuck";
    }
    if (how == nullptr) {
      expected.survivors.push_back(static_cast<int>(r));
    } else if (*how != '\0') {
      missing.emplace_back(r, how);
    }
  }
  if (!death && any(Fate::kPaused)) return {};
  bool overdue = false;  // who has left is missed by those who wait
  for (std::size_t r = 0; r < job.fates.size(); ++r) {
    if (here(r) && job.answers[r].deadlines_missed > 0) overdue = true;
  }
  const bool missed = std::ranges::any_of(
      missing, [&](const auto& entry) { return overdue || std::string(entry.second) != "left"; });
  if (missed || (all_in_front && least_missed >= Lookout::kPatience)) {
    expected.end = Move::kLeave;
    for (const auto& [r, how] : missing) {
      expected.missing += (expected.missing.empty() ? "" : ", ") + std::to_string(r) + " " + how;
    }
    return expected;
  }
  return {all_in_front && least_missed > 0 ? Move::kWarn : Move::kNothing, "", {}};
}

TEST(LookoutProperty, RandomJobsAreToldAsAPlainOracleTellsThem) {
  std::mt19937 random(20240607);
  int ends[4] = {};
  for (int round = 0; round < 20'000; ++round) {
    const Job job = random_job(random);
    // The deputy, rank 0 alive but silent, and another dead: see LookoutDeputy.
    if (job.observer != 0 && job.fates[0] == Fate::kSilent && std::ranges::count(job.fates, Fate::kDied) > 0)
      continue;

    const int ranks = static_cast<int>(job.fates.size());
    LookoutWorld world(ranks, job.observer, job.observer == 0 ? -1 : 0);
    std::vector<int> order;
    for (int r = 0; r < ranks; ++r) order.push_back(r);
    std::ranges::shuffle(order, random);
    for (const int r : order) {
      const Fate fate = job.fates[static_cast<std::size_t>(r)];
      world.rank(r) = job.answers[static_cast<std::size_t>(r)];
      if (fate == Fate::kSilent || fate == Fate::kDied || fate == Fate::kLeft) world.silence(r);
      if (fate == Fate::kDied) world.lookout().closed(r);
      if (fate == Fate::kLeft) world.lookout().goodbye(r);
      if (fate == Fate::kLeft && random() % 2 == 0) world.lookout().closed(r);
    }
    Move end = Move::kNothing;
    for (const Move move : world.inquire()) {
      if (move != Move::kAsk) end = move;
    }

    const Expected expected = oracle(job);
    std::string text =
        "round " + std::to_string(round) + ", observer " + std::to_string(job.observer) + ", fates";
    for (const Fate fate : job.fates) text += " " + std::to_string(static_cast<int>(fate));
    ASSERT_EQ(static_cast<int>(end), static_cast<int>(expected.end)) << text;
    ++ends[static_cast<int>(end)];
    if (end != Move::kLeave) continue;
    ASSERT_EQ(missing_text(world.lookout().departure()), expected.missing) << text;
    ASSERT_EQ(survivors_of(world.lookout().departure()), expected.survivors) << text;
    ASSERT_EQ(world.lookout().departure().reported_by, job.observer);
  }
  // The jobs were of all kinds.
  for (const Move end : {Move::kNothing, Move::kWarn, Move::kLeave})
    EXPECT_GT(ends[static_cast<int>(end)], 500);
}

}  // namespace
}  // namespace holdfast
