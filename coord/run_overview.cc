#include "holdfast/coord/run_overview.h"

#include <filesystem>
#include <optional>
#include <string_view>
#include <vector>

#include "durable_file.h"
#include "holdfast/coord/generation_id.h"
#include "holdfast/coord/policy.h"
#include "holdfast/coord/policy.pb.h"
#include "holdfast/coord/run_folder.h"
#include "holdfast/coord/state.h"
#include "holdfast/coord/state.pb.h"

namespace holdfast {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::size_t kMostTail = 64 << 20;
constexpr std::size_t kMostStatus = 1 << 20;

// Files are hostile until checked: a field that is missing or of another type is null.
Json field(const Json& json, const char* name, bool (Json::*is)() const noexcept) {
  const auto found = json.find(name);
  return found != json.end() && ((*found).*is)() ? *found : Json(nullptr);
}
Json text_of(const Json& json, const char* name) { return field(json, name, &Json::is_string); }
Json count_of(const Json& json, const char* name) { return field(json, name, &Json::is_number_unsigned); }
Json number_of(const Json& json, const char* name) { return field(json, name, &Json::is_number); }

Json parse(std::string_view text) {
  Json json = Json::parse(text, nullptr, false);
  return json.is_object() ? json : Json(nullptr);
}

class Overview {
 public:
  explicit Overview(const std::string& run_dir) : run_dir_(run_dir) {}

  Status make(Json* out) {
    if (!RunFolder::holds_record(run_dir_)) return Status::usage("there is no run in " + run_dir_);
    const std::optional<std::string> holder = RunFolder::live_holder(run_dir_);
    RunState state;
    const Status read = read_state(run_dir_, &state);
    const bool has_state = read.ok();
    if (!has_state) problems_.push_back(read.message());
    look_at_events();
    if (!has_state && start_.is_null() && incident_.is_null()) return nothing_readable();

    Json& json = *out = {{"run_dir", run_dir_}};
    json["holder"] = holder ? Json(*holder) : Json(nullptr);
    put_state(state, has_state, holder.has_value(), &json);
    put_budgets(state, has_state, &json);
    json["last_incident"] = incident_;
    json["topology"] = start_.is_null() ? Json(nullptr) : text_of(start_, "topology");
    put_live(holder, state, &json);
    json["departure"] = json["state"] == "gone" ? last_departure(state.holder()) : Json(nullptr);
    json["problems"] = problems_;
    return Status();
  }

 private:
  Status nothing_readable() const {
    std::string text;
    for (const std::string& problem : problems_) text += (text.empty() ? "" : "; ") + problem;
    return Status::usage(text);
  }

  // The last start, and the last attempt that was not clean.
  void look_at_events() {
    std::string bytes;
    const std::string path = run_dir_ + "/events.jsonl";
    if (const auto fault = read_tail(path, kMostTail, &bytes)) {
      problems_.push_back("cannot read " + path + ": " + *fault);
    }
    each_line_from_the_end(bytes, [this](std::string_view line) {
      const bool start = is_event(line, "run_started");
      const bool incident =
          is_event(line, "attempt_skipped") || is_event(line, "aborted") || is_event(line, "stopped");
      if (start && start_.is_null()) start_ = parse(line);
      if (incident && incident_.is_null()) incident_ = parse(line);
      return start_.is_null() || incident_.is_null();
    });
    if (start_.is_null() && !bytes.empty()) problems_.push_back("no start of a run can be read in " + path);
  }

  static bool is_event(std::string_view line, const std::string& name) {
    return line.starts_with("{\"event\":\"" + name + "\"");
  }

  template <typename Look>
  static void each_line_from_the_end(std::string_view bytes, Look&& look) {
    while (!bytes.empty()) {
      if (bytes.back() == '\n') bytes.remove_suffix(1);
      const std::size_t before = bytes.rfind('\n');
      const std::size_t begin = before == std::string_view::npos ? 0 : before + 1;
      if (!look(bytes.substr(begin))) return;
      bytes = bytes.substr(0, begin);
    }
  }

  void put_state(const RunState& state, bool has_state, bool live, Json* json) {
    const Ending* end = state.endings_size() > 0 && !state.running() ? &*state.endings().rbegin() : nullptr;
    const char* word = live ? "running" : "gone";
    if (!live && end != nullptr && end->has_exit_code()) {
      word = end->exit_code() == 0 ? "finished" : end->exit_code() == 86 ? "stopped" : "aborted";
    }
    (*json)["state"] = word;
    const bool ended = end != nullptr && end->has_exit_code();
    (*json)["exit_code"] = ended ? Json(end->exit_code()) : Json(nullptr);
    (*json)["reason"] = ended && !end->reason().empty() ? Json(end->reason()) : Json(nullptr);
    const auto known = [&](std::uint64_t value) { return has_state ? Json(value) : Json(nullptr); };
    (*json)["epoch"] = known(state.epoch());
    (*json)["attempt"] = known(state.attempt());
    (*json)["update"] = known(state.update());
    (*json)["skips"] = known(state.skips());
    (*json)["calibration_skips"] = known(state.calibration_total());
    (*json)["incidents"] = known(state.incidents());
    (*json)["loss_scale"] = state.has_loss_scale() ? Json(state.loss_scale().scale()) : Json(nullptr);
    (*json)["raised_alerts"] = Json::array();
    for (const std::string& rule : state.raised_alerts()) (*json)["raised_alerts"].push_back(rule);
    const GenerationId good{state.generation().epoch(), state.generation().attempt()};
    (*json)["last_known_good"] = state.has_generation() ? Json(good.name()) : Json(nullptr);
    (*json)["rollbacks"] = known(state.rollbacks());
    (*json)["hold"] = nullptr;
    if (state.has_hold()) {
      const Hold& hold = state.hold();
      (*json)["hold"] = {{"epoch", hold.epoch()},
                         {"attempt", hold.attempt()},
                         {"exit_code", hold.exit_code()},
                         {"reason", hold.reason()},
                         {"identical_failures", hold.identical_failures()}};
    }
  }

  // What is left by the policy of the last start.
  void put_budgets(const RunState& state, bool has_state, Json* json) {
    (*json)["budgets"] = (*json)["owner"] = (*json)["ticket"] = nullptr;
    Policy policy;
    const Json text = start_.is_null() ? Json(nullptr) : text_of(start_, "policy");
    if (text.is_null()) return;
    if (const Status s = parse_policy(text.get<std::string>(), &policy); !s.ok()) {
      problems_.push_back("the policy of the last start cannot be read: " + s.message());
      return;
    }
    if (!policy.owner().empty()) (*json)["owner"] = policy.owner();
    if (!policy.ticket().empty()) (*json)["ticket"] = policy.ticket();
    if (!has_state) return;
    const auto budget = [](std::uint64_t used, std::uint64_t limit) -> Json {
      return {{"left", used < limit ? limit - used : 0}, {"limit", limit}};
    };
    (*json)["budgets"] = {{"total", budget(state.total_skips(), policy.max_total_skips())},
                          {"consecutive", budget(state.consecutive_skips(), policy.max_consecutive_skips())}};
  }

  // What a run that lives says of itself, and the last words of one that is gone.
  void put_live(const std::optional<std::string>& holder, const RunState& state, Json* json) {
    (*json)["as_of"] = (*json)["attempts_per_second"] = (*json)["replica_proofs"] = nullptr;
    (*json)["ranks"] = Json::array();
    const bool gone = (*json)["state"] == "gone";
    if (!holder && !gone) return;
    std::string bytes;
    const std::string path = run_dir_ + "/status.json";
    if (const auto fault = read_whole(path, kMostStatus, &bytes)) {
      problems_.push_back("cannot read " + path + ": " + *fault);
      return;
    }
    const Json live = parse(bytes);
    if (live.is_null()) {
      problems_.push_back(path + " is damaged");
      return;
    }
    // Left by an earlier run, when the one that lives has just begun.
    if (text_of(live, "holder") != Json(holder ? *holder : state.holder())) return;
    (*json)["as_of"] = text_of(live, "time");
    for (const char* name : {"epoch", "attempt", "update", "skips"}) {
      if (const Json value = count_of(live, name); !value.is_null()) (*json)[name] = value;
    }
    (*json)["attempts_per_second"] = number_of(live, "attempts_per_second");
    (*json)["replica_proofs"] = count_of(live, "replica_proofs");
    if (const Json scale = number_of(live, "loss_scale"); !scale.is_null()) (*json)["loss_scale"] = scale;
    const auto ranks = live.find("ranks");
    if (ranks == live.end() || !ranks->is_array()) return;
    for (const Json& rank : *ranks) {
      if (!rank.is_object()) continue;
      (*json)["ranks"].push_back({{"rank", count_of(rank, "rank")},
                                  {"host", text_of(rank, "host")},
                                  {"pid", count_of(rank, "pid")},
                                  {"attempt", count_of(rank, "attempt")},
                                  {"phase", text_of(rank, "phase")},
                                  {"seconds_ago", number_of(rank, "seconds_ago")}});
    }
  }

  // Of this run, that is: others may have written there later.
  Json last_departure(const std::string& holder) {
    std::string bytes;
    const std::string path = run_dir_ + "/departures.jsonl";
    std::error_code none;
    if (!std::filesystem::exists(path, none)) return nullptr;
    if (const auto fault = read_tail(path, kMostTail, &bytes)) {
      problems_.push_back("cannot read " + path + ": " + *fault);
    }
    Json last(nullptr);
    each_line_from_the_end(bytes, [&](std::string_view line) {
      if (Json departure = parse(line); is_of_this_run(departure, holder)) last = std::move(departure);
      return last.is_null();
    });
    return last;
  }

  // An earlier run is in an earlier epoch than this one's first, whenever it wrote: it may have been cut off
  // for long, and clocks differ.
  bool is_of_this_run(const Json& departure, const std::string& holder) const {
    if (departure.is_null() || start_.is_null()) return false;
    const Json epoch = count_of(departure, "epoch");
    const Json first = count_of(start_, "epoch");
    if (!first.is_number() || (epoch.is_number() && epoch < first)) return false;
    for (const char* list : {"missing", "survivors"}) {
      for (const Json& rank : field(departure, list, &Json::is_array)) {
        if (holder.empty() || !rank.is_object() || count_of(rank, "rank") != Json(0u)) continue;
        const Json host = text_of(rank, "host");
        const Json pid = count_of(rank, "pid");
        return host.is_string() && pid.is_number() &&
               is_holder(holder, host.get<std::string>(), pid.get<std::int64_t>());
      }
    }
    return epoch.is_number();  // without rank 0 or the run's memory, all there is to go by
  }

  const std::string run_dir_;
  std::vector<std::string> problems_;
  Json start_;     // null: not found
  Json incident_;  // null: none
};

}  // namespace

Status run_overview(const std::string& run_dir, Json* overview) { return Overview(run_dir).make(overview); }

}  // namespace holdfast
