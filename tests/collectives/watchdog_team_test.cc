// The watchdogs of a job in one process: they start, let training run, and stop. What ends a process is
// tested on processes, see watchdog_jobs.py.
#include <dirent.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <atomic>
#include <fstream>
#include <functional>
#include <set>
#include <sstream>
#include <thread>

#include "collectives/side_channel_peers.h"
#include "holdfast/collectives/thread_collective.h"
#include "holdfast/collectives/watchdog.h"

namespace holdfast {
namespace {

using std::chrono::milliseconds;

// Nobody is overdue before the test is over.
Watchdog::Options patient() {
  Watchdog::Options options;
  options.tick = milliseconds(5);
  options.deadline = std::chrono::hours(1);
  return options;
}

std::vector<std::string> entries(const std::string& folder) {
  std::vector<std::string> names;
  DIR* open = opendir(folder.c_str());
  if (open == nullptr) return names;
  while (const dirent* entry = readdir(open)) {
    if (entry->d_name[0] != '.') names.emplace_back(entry->d_name);
  }
  closedir(open);
  return names;
}
std::size_t open_files() { return entries("/proc/self/fd").size(); }
std::size_t threads() { return entries("/proc/self/task").size(); }

// A tool that watches this program's threads may start one of its own beside the first.
std::size_t threads_before_the_first() {
  std::thread([] {}).join();
  for (std::size_t before = 0; before != threads(); std::this_thread::sleep_for(milliseconds(50))) {
    before = threads();
  }
  return threads();
}

// A thread that was joined may still be listed for a moment.
bool threads_are(std::size_t expected) {
  for (int i = 0; i < 2000 && threads() != expected; ++i) std::this_thread::sleep_for(milliseconds(5));
  return threads() == expected;
}

// The TCP ports that this process listens on.
std::vector<unsigned short> listening_ports() {
  std::set<std::string> own;
  for (const std::string& name : entries("/proc/self/fd")) {
    char target[64] = "";
    const ssize_t n = readlink(("/proc/self/fd/" + name).c_str(), target, sizeof(target) - 1);
    const std::string text(target, n > 0 ? static_cast<std::size_t>(n) : 0);
    if (text.starts_with("socket:[")) own.insert(text.substr(8, text.size() - 9));
  }
  std::vector<unsigned short> ports;
  std::ifstream table("/proc/self/net/tcp");
  std::string line;
  std::getline(table, line);
  while (std::getline(table, line)) {
    std::istringstream fields(line);
    std::string slot, local, remote, state, queues, timer, retransmits, uid, timeout, inode;
    fields >> slot >> local >> remote >> state >> queues >> timer >> retransmits >> uid >> timeout >> inode;
    if (state == "0A" && own.contains(inode)) {
      ports.push_back(static_cast<unsigned short>(std::stoi(local.substr(local.find(':') + 1), nullptr, 16)));
    }
  }
  return ports;
}

void train(ProgressBoard& board, std::uint64_t attempts) {
  for (std::uint64_t attempt = 0; attempt < attempts; ++attempt) {
    for (const Phase phase :
         {Phase::kBegin, Phase::kObserve, Phase::kDecide, Phase::kUpdate, Phase::kOutside}) {
      board.enter(1, attempt, phase);
    }
    std::this_thread::sleep_for(milliseconds(1));
  }
}

class WatchdogTeam : public testing::TestWithParam<int> {};

// Rank 0 is told once a second, and tells each rank's own place.
TEST(WatchdogReports, RankZeroHearsWhereEachRankIs) {
  std::atomic<int> complete{0};  // reports in which each rank is where it stands
  std::atomic<int> elsewhere{0};
  ThreadGroup(3).run([&](Collective& collective) {
    Watchdog::Options options = patient();
    options.heard = [&, rank = collective.rank()](const std::vector<RankReport>& reports) {
      if (rank != 0) ++elsewhere;
      bool all = static_cast<int>(reports.size()) == collective.size();
      for (std::size_t r = 0; r < reports.size(); ++r) {
        EXPECT_EQ(reports[r].who.rank, static_cast<int>(r));
        all = all && reports[r].place && reports[r].place->attempt == 7 + r && reports[r].seconds_ago < 30;
      }
      if (all) ++complete;
    };
    std::unique_ptr<Watchdog> watchdog;
    const Status status = Watchdog::create(collective, options, &watchdog);
    ASSERT_TRUE(status.ok()) << status.to_string();
    watchdog->board().enter(1, 7 + static_cast<std::uint64_t>(collective.rank()), Phase::kObserve);
    for (int i = 0; i < 2000 && complete == 0; ++i) std::this_thread::sleep_for(milliseconds(5));
  });
  EXPECT_GT(complete, 0);
  EXPECT_EQ(elsewhere, 0);
}

TEST_P(WatchdogTeam, StartsAndStopsAgainAndAgainAndLeavesNothingBehind) {
  const std::size_t threads_before = threads_before_the_first();
  const std::size_t files_before = open_files();
  for (int round = 0; round < 12; ++round) {
    std::atomic<int> started{0};
    ThreadGroup(GetParam()).run([&](Collective& collective) {
      std::unique_ptr<Watchdog> watchdog;
      const Status status = Watchdog::create(collective, patient(), &watchdog);
      EXPECT_TRUE(status.ok()) << status.to_string();
      if (!watchdog) return;
      ++started;
      train(watchdog->board(), round % 3 == 0 ? 0 : 5);
    });
    EXPECT_EQ(started, GetParam());
  }
  EXPECT_TRUE(threads_are(threads_before)) << threads();
  EXPECT_EQ(open_files(), files_before);
}

TEST_P(WatchdogTeam, NothingIsListenedOnWhileItWatches) {
  std::atomic<std::size_t> ports{99};
  ThreadGroup(GetParam()).run([&](Collective& collective) {
    std::unique_ptr<Watchdog> watchdog;
    EXPECT_TRUE(Watchdog::create(collective, patient(), &watchdog).ok());
    if (collective.rank() == 0) ports = listening_ports().size();
    Record barrier;
    EXPECT_TRUE(collective.reduce(barrier).ok());
  });
  EXPECT_EQ(ports, 0u);
}

// The end of a run: who is done says goodbye and is no death.
TEST_P(WatchdogTeam, WatchdogsThatEndAtDifferentTimesEndNothingElse) {
  for (const bool ascending : {true, false}) {
    std::atomic<int> finished{0};
    ThreadGroup(GetParam()).run([&](Collective& collective) {
      std::unique_ptr<Watchdog> watchdog;
      EXPECT_TRUE(Watchdog::create(collective, patient(), &watchdog).ok());
      if (!watchdog) return;
      const int turn = ascending ? collective.rank() : collective.size() - 1 - collective.rank();
      // Long enough apart for a death to be noticed and acted upon.
      for (int i = 0; i < turn; ++i) std::this_thread::sleep_for(milliseconds(500));
      train(watchdog->board(), 3);
      watchdog.reset();
      ++finished;
    });
    EXPECT_EQ(finished, GetParam());
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, WatchdogTeam, testing::Values(2, 3, 4, 8),
                         [](const auto& param) { return std::to_string(param.param); });

TEST(WatchdogTeam, OneRankNeedsNoSideChannel) {
  const std::size_t files_before = open_files();
  ThreadGroup(1).run([&](Collective& collective) {
    std::unique_ptr<Watchdog> watchdog;
    EXPECT_TRUE(Watchdog::create(collective, patient(), &watchdog).ok());
    EXPECT_TRUE(listening_ports().empty());
    train(watchdog->board(), 3);
  });
  EXPECT_EQ(open_files(), files_before);
}

TEST(WatchdogTeam, WithoutASideChannelNoSocketIsOpened) {
  std::atomic<int> sockets{0};
  ThreadGroup(4).run([&](Collective& collective) {
    Watchdog::Options options = patient();
    options.side_channel = false;
    std::unique_ptr<Watchdog> watchdog;
    EXPECT_TRUE(Watchdog::create(collective, options, &watchdog).ok());
    train(watchdog->board(), 3);
    Record barrier;
    EXPECT_TRUE(collective.reduce(barrier).ok());
    if (collective.rank() != 0) return;
    for (const std::string& name : entries("/proc/self/fd")) {
      struct stat file {};
      if (stat(("/proc/self/fd/" + name).c_str(), &file) == 0 && S_ISSOCK(file.st_mode)) ++sockets;
    }
  });
  EXPECT_EQ(sockets, 0);
}

// The board is written while the watchdog reads, answers and reports.
TEST(WatchdogTeam, TrainingAndWatchingGoOnSideBySide) {
  ThreadGroup(4).run([](Collective& collective) {
    Watchdog::Options options = patient();
    options.tick = milliseconds(1);
    std::unique_ptr<Watchdog> watchdog;
    EXPECT_TRUE(Watchdog::create(collective, options, &watchdog).ok());
    for (int i = 0; i < 20; ++i) {
      train(watchdog->board(), 50);
      watchdog->board().pause();
      watchdog->board().resume();
    }
  });
}

// Lets a test step in when a rank of the team has been told something: the token first, then where to
// connect.
class TellingCollective final : public Collective {
 public:
  TellingCollective(Collective& inner, std::function<void(int number, Bytes& told)> on_told)
      : inner_(inner), on_told_(std::move(on_told)) {}
  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  Status reduce(Record& record) override { return inner_.reduce(record); }
  using Collective::gather;
  Status gather(const Bytes& mine, std::vector<Bytes>* all, int most_per_node) override {
    return inner_.gather(mine, all, most_per_node);
  }
  Status broadcast(Bytes* bytes) override {
    Status status = inner_.broadcast(bytes);
    on_told_(number_++, *bytes);
    return status;
  }

 private:
  Collective& inner_;
  const std::function<void(int, Bytes&)> on_told_;
  int number_ = 0;
};

TEST(WatchdogTeam, ARankThatCannotJoinIsAUsageErrorOnEveryRankAndLeavesNothingBehind) {
  const std::size_t threads_before = threads_before_the_first();
  const std::size_t files_before = open_files();
  std::vector<Status> statuses(4);
  ThreadGroup(4, std::chrono::minutes(2)).run([&](Collective& collective) {
    TellingCollective with_other_token(collective, [&](int number, Bytes& told) {
      if (number == 0 && collective.rank() == 2) told.front() = static_cast<char>(told.front() ^ 1);
    });
    std::unique_ptr<Watchdog> watchdog;
    statuses[static_cast<std::size_t>(collective.rank())] =
        Watchdog::create(with_other_token, patient(), &watchdog);
    EXPECT_EQ(watchdog, nullptr);
  });
  for (const Status& status : statuses) {
    EXPECT_EQ(status.code(), StatusCode::kUsage);
    EXPECT_NE(status.message().find("side channel could not be connected"), std::string::npos)
        << status.message();
    EXPECT_NE(status.message().find("side_channel: false"), std::string::npos) << status.message();
  }
  EXPECT_TRUE(threads_are(threads_before)) << threads();
  EXPECT_EQ(open_files(), files_before);
}

// Somebody on the host who throws things at every port he sees, from before the first rank joins to the end.
class Attacker {
 public:
  Attacker() : thread_([this] { attack(); }) {}
  ~Attacker() {
    stop_ = true;
    thread_.join();
  }
  int connections() const { return connections_; }

 private:
  void attack() {
    std::vector<std::unique_ptr<RawPeer>> held;
    for (int i = 0; !stop_; ++i) {
      for (const unsigned short port : listening_ports()) {
        auto peer = std::make_unique<RawPeer>(port);
        if (!peer->connected()) continue;
        ++connections_;
        switch (i % 5) {
          case 0: peer->send(ByteWriter().u32(0).take()); break;
          case 1: peer->send(ByteWriter().u32(0xffffffffu).raw(std::string(1000, 'x')).take()); break;
          case 2: peer->send(frame(FrameType::kHello, std::string(200, 'h'))); break;
          case 3: peer->send(frame(FrameType::kLeave, "go")); break;
          default: break;  // half open
        }
        held.push_back(std::move(peer));
        if (held.size() > 200) held.erase(held.begin(), held.begin() + 100);
      }
      std::this_thread::yield();
    }
  }
  std::atomic<bool> stop_{false};
  std::atomic<int> connections_{0};
  std::thread thread_;
};

TEST(WatchdogTeam, ComesUpAndWatchesUnderAttack) {
  Attacker attacker;
  for (int round = 0; round < 5; ++round) {
    ThreadGroup(4, std::chrono::minutes(2)).run([&](Collective& collective) {
      TellingCollective with_a_late_rank(collective, [&](int number, Bytes&) {
        if (number == 1 && collective.rank() == 3) std::this_thread::sleep_for(milliseconds(300));
      });
      std::unique_ptr<Watchdog> watchdog;
      const Status status = Watchdog::create(with_a_late_rank, patient(), &watchdog);
      EXPECT_TRUE(status.ok()) << status.to_string();
      if (watchdog) train(watchdog->board(), 20);
    });
  }
  EXPECT_GT(attacker.connections(), 20);
}

}  // namespace
}  // namespace holdfast
