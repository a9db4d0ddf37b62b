#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "cli/commands.h"
#include "holdfast/coord/printable.h"
#include "holdfast/coord/run_folder.h"
#include "holdfast/coord/state.h"
#include "holdfast/coord/state.pb.h"
#include "holdfast/coord/stop_request.h"

namespace holdfast::cli {
namespace {

constexpr const char* kFooter = R"(
Rank 0 looks for the request once a second, and all ranks stop together at the end of the attempt they are in, without
its update; the job ends with exit code 86. Works from any host that sees the folder. The run can be resumed.
Examples:
  holdfast stop runs/long                 # waits a minute for the run to end
  holdfast stop runs/long --timeout 0     # asks, and does not wait
Exit codes: 0 the run has ended   1 asked, and it goes on still (--timeout), or another run holds the folder now
            64 no live run holds that folder, or one is just starting   80 the request could not be written)";

struct Arguments {
  std::string run_dir;
  double timeout = 60;  // seconds
};

std::string who_asks() {
  char host[256] = "?";
  gethostname(host, sizeof(host) - 1);
  return "uid=" + std::to_string(getuid()) + " host=" + host + " pid=" + std::to_string(getpid());
}

// A run that has just locked the folder has not put its name there yet, and an earlier holder's may still be
// there: only a name that stays is asked.
Status find_holder(const std::string& run_dir, std::string* holder) {
  constexpr std::chrono::milliseconds kMoment{250};
  constexpr int kMostLooks = 12;
  std::optional<std::string> seen = RunFolder::live_holder(run_dir);
  for (int i = 0; seen && i < kMostLooks; ++i) {
    std::this_thread::sleep_for(kMoment);
    const std::optional<std::string> now = RunFolder::live_holder(run_dir);
    if (now && now == seen && !now->empty()) {
      *holder = *now;
      return Status();
    }
    seen = now;
  }
  if (!seen) return Status::usage("no live run holds " + run_dir);
  return Status::usage("a run is just starting in " + run_dir + " and was not asked to stop; try again");
}

std::string describe_end(const std::string& run_dir, const std::string& holder) {
  RunState state;
  if (!read_state(run_dir, &state).ok()) return "the run has ended; its memory cannot be read";
  // Another's: this one's start was refused, such as for want of an acknowledgement.
  if (state.holder() != holder) return "the run has ended, and " + run_dir + " holds no record of its end";
  const std::string place =
      " (attempt " + std::to_string(state.attempt()) + ", " + std::to_string(state.update()) + " updates)";
  if (state.running() || state.endings_size() == 0 || !state.endings().rbegin()->has_exit_code()) {
    return "the run is gone: it was killed, or a rank was missing" + place;
  }
  const Ending& end = *state.endings().rbegin();
  const bool stopped = end.exit_code() == static_cast<int>(StatusCode::kStoppedByOperator);
  return (stopped ? "stopped: exit code " : "the run ended by itself: exit code ") +
         std::to_string(end.exit_code()) + place;
}

Outcome stop(const Arguments& arguments) {
  const std::string& run_dir = arguments.run_dir;
  if (!(arguments.timeout >= 0)) return {Status::usage("--timeout takes a number of seconds")};
  std::string asked;
  if (Status s = find_holder(run_dir, &asked); !s.ok()) return {s};
  if (Status s = write_stop_request(run_dir, {asked, who_asks()}); !s.ok()) return {s};
  std::printf("asked the run to stop: %s\n", printable(asked).c_str());
  std::fflush(stdout);
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(arguments.timeout);
  std::optional<std::string> holder;
  while ((holder = RunFolder::live_holder(run_dir)) == asked) {
    if (std::chrono::steady_clock::now() >= until) {
      std::printf("it has not ended yet: see holdfast status %s\n", run_dir.c_str());
      return {Status(), true};
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  if (holder) {
    std::printf("that run has ended, and another holds the folder (%s): to stop it, ask again\n",
                holder->empty() ? "just starting" : printable(*holder).c_str());
    return {Status(), true};
  }
  std::printf("%s\n", describe_end(run_dir, asked).c_str());
  return {};
}

}  // namespace

void add_stop(CLI::App* app, Outcome* outcome) {
  CLI::App* command =
      app->add_subcommand("stop", "Ask a live run to stop in order, at the end of an attempt.");
  command->footer(kFooter);
  const auto arguments = std::make_shared<Arguments>();
  command->add_option("RUN_DIR", arguments->run_dir, "Folder of the run")->required();
  command->add_option("--timeout", arguments->timeout, "Seconds to wait for its end")
      ->check(CLI::Range(0.0, 86400.0))
      ->capture_default_str();
  command->callback([arguments, outcome] { *outcome = stop(*arguments); });
}

}  // namespace holdfast::cli
