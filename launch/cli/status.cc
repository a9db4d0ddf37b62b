#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "holdfast/coord/printable.h"
#include "holdfast/coord/run_overview.h"

namespace holdfast::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kFooter = R"(
States: running   finished (0)   stopped (86)   aborted (other exit codes)   gone: no process holds the folder, and the
record has no end; it was killed, cut off, or left with exit code 84
Examples:
  holdfast status runs/long
  holdfast status runs/long --json | jq .state
Exit codes: 0 shown, whatever the state   64 there is no run in that folder that can be read)";

constexpr std::size_t kMostRanksShown = 16;

struct Arguments {
  std::string run_dir;
  bool json = false;
};

// For a terminal: whatever the file held, without control characters. "-" for null.
std::string shown(const Json& value) {
  if (value.is_string()) return printable(value.get<std::string>());
  return value.is_null() ? "-" : printable(value.dump(-1, ' ', true, Json::error_handler_t::replace));
}

std::string shown(const Json& object, const char* name) {
  const auto found = object.find(name);
  return found == object.end() ? "-" : shown(*found);
}

void print_line(const char* name, const std::string& text) {
  if (text != "-") fmt::print("  {:<14} {}\n", name, text);
}

std::string budget(const Json& budgets, const char* name) {
  return fmt::format("{} of {}", shown(budgets[name], "left"), shown(budgets[name], "limit"));
}

void print_ranks(const Json& ranks) {
  if (ranks.empty()) return;
  std::vector<const Json*> rows;
  for (const Json& rank : ranks) rows.push_back(&rank);
  // Of many, those that the others wait for.
  if (rows.size() > kMostRanksShown) {
    std::ranges::stable_sort(rows,
                             [](const Json* a, const Json* b) { return (*a)["attempt"] < (*b)["attempt"]; });
  }
  fmt::print("  {:>6} {:<20} {:>9} {:>10} {:<8} heard\n", "rank", "host", "process", "attempt", "phase");
  for (std::size_t i = 0; i < rows.size() && i < kMostRanksShown; ++i) {
    const Json& rank = *rows[i];
    const Json& ago = rank["seconds_ago"];
    fmt::print("  {:>6} {:<20} {:>9} {:>10} {:<8} {}\n", shown(rank, "rank"), shown(rank, "host"),
               shown(rank, "pid"), shown(rank, "attempt"), shown(rank, "phase"),
               ago.is_null() ? "not yet" : fmt::format("{:.1f} s before", ago.get<double>()));
  }
  if (rows.size() > kMostRanksShown) fmt::print("  and {} more ranks\n", rows.size() - kMostRanksShown);
}

void print_departure(const Json& departure) {
  if (departure.is_null()) return;
  fmt::print("  {:<14} {}, reported by rank {}\n", "departure", shown(departure, "time"),
             shown(departure, "reported_by"));
  const auto missing = departure.find("missing");
  if (missing == departure.end() || !missing->is_array()) return;
  for (const Json& rank : *missing) {
    if (!rank.is_object()) continue;
    fmt::print("    rank {} {} (host {}, process {}), attempt {}, phase {}\n", shown(rank, "rank"),
               shown(rank, "absence"), shown(rank, "host"), shown(rank, "pid"), shown(rank, "attempt"),
               shown(rank, "phase"));
  }
}

void print(const Json& run) {
  fmt::print("{}: {}{}{}\n", shown(run, "run_dir"), shown(run, "state"),
             run["exit_code"].is_null() ? "" : ", exit code " + shown(run, "exit_code"),
             run["holder"].is_null() ? "" : ", " + shown(run, "holder"));
  print_line("reason", shown(run, "reason"));
  print_line("place", fmt::format("epoch {}, attempt {}, {} updates, {} skips, {} of them calibration",
                                  shown(run, "epoch"), shown(run, "attempt"), shown(run, "update"),
                                  shown(run, "skips"), shown(run, "calibration_skips")));
  if (!run["attempts_per_second"].is_null()) {
    print_line("pace", fmt::format("{:.1f} attempts/s", run["attempts_per_second"].get<double>()));
  }
  if (run["replica_proofs"].is_number()) {
    print_line("proofs", shown(run, "replica_proofs") + " since the start in which all replicas agreed");
  }
  print_line("as of", shown(run, "as_of"));
  if (!run["budgets"].is_null()) {
    print_line("budgets left", fmt::format("{} skips in total, {} in a row", budget(run["budgets"], "total"),
                                           budget(run["budgets"], "consecutive")));
  }
  print_line("last good", shown(run, "last_known_good"));
  if (run["rollbacks"].is_number() && run["rollbacks"] > 0) print_line("rollbacks", shown(run, "rollbacks"));
  std::string alerts;
  for (const Json& rule : run["raised_alerts"]) alerts += (alerts.empty() ? "" : ", ") + shown(rule);
  print_line("alerts raised", alerts.empty() ? "none" : alerts);
  print_line("loss scale", shown(run, "loss_scale"));
  if (const Json& last = run["last_incident"]; !last.is_null()) {
    print_line("last incident", fmt::format("{} at attempt {} of epoch {}, {}: {}", shown(last, "event"),
                                            shown(last, "attempt"), shown(last, "epoch"), shown(last, "time"),
                                            shown(last, "reason")));
  }
  if (const Json& hold = run["hold"]; !hold.is_null()) {
    print_line("held", fmt::format("exit code {} at attempt {}: {}", shown(hold, "exit_code"),
                                   shown(hold, "attempt"), shown(hold, "reason")));
    print_line("", "not restarted until: holdfast ack " + shown(run, "run_dir") + " --owner WHO --note TEXT");
  }
  print_line("owner", shown(run, "owner"));
  print_line("ticket", shown(run, "ticket"));
  if (run["topology"].is_string()) {
    std::string map = run["topology"].get<std::string>();
    for (std::size_t at = 0; at < map.size();) {
      const std::size_t end = std::min(map.find('\n', at), map.size());
      fmt::print("  {}\n", printable(map.substr(at, end - at)));
      at = end + 1;
    }
  }
  print_ranks(run["ranks"]);
  print_departure(run["departure"]);
  for (const Json& problem : run["problems"]) fmt::print("  problem: {}\n", shown(problem));
}

Status status(const Arguments& arguments) {
  Json run;
  if (Status s = run_overview(arguments.run_dir, &run); !s.ok()) return s;
  if (arguments.json) {
    fmt::print("{}\n", run.dump(1, ' ', true, Json::error_handler_t::replace));
  } else {
    print(run);
  }
  return Status();
}

}  // namespace

void add_status(CLI::App* app, Outcome* outcome) {
  CLI::App* command = app->add_subcommand("status", "Show how a run is doing, live or ended, on one screen.");
  command->footer(kFooter);
  const auto arguments = std::make_shared<Arguments>();
  command->add_option("RUN_DIR", arguments->run_dir, "Folder of the run")->required();
  command->add_flag("--json", arguments->json, "For programs: one strict JSON object");
  command->callback([arguments, outcome] { outcome->status = status(*arguments); });
}

}  // namespace holdfast::cli
