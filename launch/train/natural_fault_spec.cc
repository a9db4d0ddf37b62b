#include "train/natural_fault_spec.h"

#include <fmt/format.h>

#include <charconv>
#include <set>
#include <sstream>

namespace holdfast::train {
namespace {

constexpr std::string_view kSumOverflow = "sum-overflow";
constexpr std::string_view kSumOverflowHelp =
    "every rank has the same batch, and its gradients just fit their type: the sum does not";

Status bad(const NaturalFaultSpec& spec, const std::string& why) {
  return Status::usage("--fault " + spec.text + ": " + why);
}

template <typename Number>
bool parse_number(const std::string& text, Number* number) {
  const char* end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, *number);
  return error == std::errc() && stopped == end && !text.empty();
}

Status parse_key(const std::string& item, NaturalFaultSpec* spec) {
  const auto equals = item.find('=');
  const std::string key = item.substr(0, equals);
  const std::string value = equals == std::string::npos ? "" : item.substr(equals + 1);
  int rank = 0;
  if (key == "attempt" && parse_number(value, &spec->attempt)) return Status();
  if (key == "every" && parse_number(value, &spec->every) && spec->every > 0) return Status();
  if (key == "micro" && parse_number(value, &spec->micro) && spec->micro >= 0) return Status();
  if (key == "rank" && value == "all") {
    spec->rank.reset();
    return Status();
  }
  if (key == "rank" && parse_number(value, &rank) && rank >= 0) {
    spec->rank = rank;
    return Status();
  }
  return bad(*spec, "'" + item + "' is not attempt=A, every=K, rank=R|all or micro=M");
}

}  // namespace

bool NaturalFaultSpec::due(int of_rank, std::uint64_t at_attempt, int at_micro) const {
  const bool in_attempt = every > 0 ? at_attempt % every == every - 1 : at_attempt == attempt;
  return in_attempt && at_micro == micro && (!rank || *rank == of_rank);
}

Status parse_natural_fault_spec(const std::string& text, NaturalFaultSpec* out) {
  *out = NaturalFaultSpec();
  out->text = text;
  std::istringstream items(text);
  std::string item;
  std::getline(items, item, ',');
  NaturalFault fault{};
  if (parse_natural_fault(item, &fault)) {
    out->fault = fault;
  } else if (item != kSumOverflow) {
    return bad(*out, "there is no fault '" + item + "'");
  }
  if (out->sum_overflow() || fault == NaturalFault::kDeadUnit) out->rank.reset();
  std::set<std::string> seen;
  while (std::getline(items, item, ',')) {
    if (!seen.insert(item.substr(0, item.find('='))).second) return bad(*out, "a key is given twice");
    if (Status s = parse_key(item, out); !s.ok()) return s;
  }
  if (text.ends_with(',')) return bad(*out, "ends in a comma");
  if (seen.contains("attempt") && seen.contains("every"))
    return bad(*out, "attempt and every exclude each other");
  seen.erase("rank");
  if (out->fault == NaturalFault::kDeadUnit && !seen.empty()) {
    return bad(*out, "this fault is there from the start, in every attempt");
  }
  if ((out->sum_overflow() || fault == NaturalFault::kDeadUnit) && out->rank) {
    return bad(*out, "this fault concerns all ranks");
  }
  return Status();
}

std::string natural_fault_help() {
  std::string help;
  const auto add = [&](std::string_view name, Stage stage, std::string_view what) {
    help += fmt::format("  {:20} {:10} {}\n", name, stage_name(stage), what);
  };
  for (const NaturalFaultInfo& info : kNaturalFaults) add(info.name, info.stage, info.what);
  add(kSumOverflow, Stage::kReduction, kSumOverflowHelp);
  return help;
}

}  // namespace holdfast::train
