#include "holdfast/coord/policy.h"

#include <fmt/format.h>
#include <google/protobuf/io/tokenizer.h>
#include <google/protobuf/text_format.h>
#include <google/protobuf/util/json_util.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <string_view>
#include <vector>

#include "holdfast/coord/policy.pb.h"
#include "holdfast/coord/rate_rules.h"

namespace holdfast {
namespace {

class FirstError final : public google::protobuf::io::ErrorCollector {
 public:
  void AddError(int line, google::protobuf::io::ColumnNumber column, const std::string& message) override {
    if (!text_.empty()) return;
    text_ = "line " + std::to_string(line + 1) + ", column " + std::to_string(column + 1) + ": " + message;
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

bool is_json(const std::string& text) {
  const auto first = text.find_first_not_of(" \t\r\n");
  return first != std::string::npos && text[first] == '{';
}

bool has_unknown(const google::protobuf::Message& message) {
  const auto* reflection = message.GetReflection();
  if (!reflection->GetUnknownFields(message).empty()) return true;
  std::vector<const google::protobuf::FieldDescriptor*> fields;
  reflection->ListFields(message, &fields);
  return std::ranges::any_of(fields, [&](const auto* field) {
    if (field->cpp_type() != google::protobuf::FieldDescriptor::CPPTYPE_MESSAGE) return false;
    if (!field->is_repeated()) return has_unknown(reflection->GetMessage(message, field));
    for (int i = 0; i < reflection->FieldSize(message, field); ++i) {
      if (has_unknown(reflection->GetRepeatedMessage(message, field, i))) return true;
    }
    return false;
  });
}

Status parse_json(const std::string& text, Policy* policy) {
  google::protobuf::util::JsonParseOptions options;
  options.ignore_unknown_fields = false;
  const auto parsed = google::protobuf::util::JsonStringToMessage(text, policy, options);
  if (!parsed.ok()) return Status::usage("policy (JSON): " + std::string(parsed.message()));
  // The number of an enum value that does not exist is taken for a field of a newer version.
  if (has_unknown(*policy))
    return Status::usage("policy (JSON): an enum field holds a number that names no value");
  return Status();
}

Status parse_textproto(const std::string& text, Policy* policy) {
  FirstError error;
  google::protobuf::TextFormat::Parser parser;
  parser.RecordErrorsTo(&error);
  if (parser.ParseFromString(text, policy)) return Status();
  std::string why = error.text();
  if (why.ends_with('.')) why.pop_back();
  return Status::usage("policy (textproto): " + why);
}

// Sets every unset field to its declared default, so that the effective policy can be shown and hashed.
void make_defaults_explicit(google::protobuf::Message* policy) {
  using Field = google::protobuf::FieldDescriptor;
  const auto* reflection = policy->GetReflection();
  const auto* descriptor = policy->GetDescriptor();
  for (int i = 0; i < descriptor->field_count(); ++i) {
    const Field* field = descriptor->field(i);
    if (field->is_repeated()) {
      // Only messages are repeated.
      for (int j = 0; j < reflection->FieldSize(*policy, field); ++j) {
        make_defaults_explicit(reflection->MutableRepeatedMessage(policy, field, j));
      }
      continue;
    }
    if (field->cpp_type() == Field::CPPTYPE_MESSAGE) {
      make_defaults_explicit(reflection->MutableMessage(policy, field));
      continue;
    }
    if (reflection->HasField(*policy, field)) continue;
    switch (field->cpp_type()) {
      case Field::CPPTYPE_UINT64: reflection->SetUInt64(policy, field, field->default_value_uint64()); break;
      case Field::CPPTYPE_DOUBLE: reflection->SetDouble(policy, field, field->default_value_double()); break;
      case Field::CPPTYPE_ENUM: reflection->SetEnum(policy, field, field->default_value_enum()); break;
      case Field::CPPTYPE_BOOL: reflection->SetBool(policy, field, field->default_value_bool()); break;
      case Field::CPPTYPE_STRING: reflection->SetString(policy, field, field->default_value_string()); break;
      default: GOOGLE_LOG(FATAL) << "policy field of a type without a default: " << field->full_name();
    }
  }
}

void add_rule(Policy* policy, const char* name, std::uint64_t window, std::uint64_t max_skips,
              std::uint64_t least) {
  Policy::RateRule* rule = policy->add_rate_rules();
  rule->set_name(name);
  rule->set_window_attempts(window);
  rule->set_max_skips(max_skips);
  rule->set_least_attempts(least);
}

// What a field's declaration cannot say: see Policy.rate_rules.
void set_rate_rule_defaults(Policy* policy) {
  if (policy->rate_rules().empty()) {
    add_rule(policy, "burst", 200, 3, 50);
    add_rule(policy, "creep", 10'000, 10, 1'000);
  }
  for (Policy::RateRule& rule : *policy->mutable_rate_rules()) {
    if (rule.has_least_attempts() || rule.window_attempts() >= rule.least_attempts()) continue;
    rule.set_least_attempts(rule.window_attempts());
  }
}

constexpr double kDay = 24 * 3600;

// A condition that a field must meet. The conditions are written so that NaN never meets one.
struct Rule {
  bool met;
  std::string_view field;
  double value;
  std::string_view range;
};

bool is_power_of_two(double value) {
  int exponent = 0;
  return std::isfinite(value) && value > 0 && std::frexp(value, &exponent) == 0.5;
}

Status check_ranges(const Policy& policy) {
  const double deadline = policy.attempt_deadline_seconds();
  const double floor = policy.attempt_deadline_floor_seconds();
  const auto& scale = policy.loss_scale();
  const auto& spike = policy.spike();
  const double headroom = policy.headroom_warning();
  const auto& evidence = policy.evidence();
  const auto number = [](std::uint64_t value) { return static_cast<double>(value); };
  constexpr std::string_view kScaleRange = "a power of two, smallest <= initial <= largest <= 2^24";
  const Rule rules[] = {
      {deadline >= 0 && deadline <= kDay, "attempt_deadline_seconds", deadline, "0 (automatic) to 86400"},
      {floor > 0 && floor <= kDay, "attempt_deadline_floor_seconds", floor, "more than 0, at most 86400"},
      {policy.suspect_after_incidents() > 0, "suspect_after_incidents", 0, "at least 1"},
      {is_power_of_two(scale.smallest()), "loss_scale.smallest", scale.smallest(), kScaleRange},
      {is_power_of_two(scale.initial()) && scale.initial() >= scale.smallest(), "loss_scale.initial",
       scale.initial(), kScaleRange},
      {is_power_of_two(scale.largest()) && scale.largest() >= scale.initial() && scale.largest() <= 0x1p24,
       "loss_scale.largest", scale.largest(), kScaleRange},
      {scale.growth_interval() > 0, "loss_scale.growth_interval", 0, "at least 1"},
      {scale.hysteresis() > 0, "loss_scale.hysteresis", 0, "at least 1"},
      {scale.window_attempts() > 0, "loss_scale.window_attempts", 0, "at least 1"},
      {spike.least_attempts() >= 8 && spike.least_attempts() <= spike.window_attempts(),
       "spike.least_attempts", number(spike.least_attempts()), "8 to window_attempts"},
      {spike.window_attempts() <= 100'000, "spike.window_attempts", number(spike.window_attempts()),
       "at most 100000"},
      {spike.deviations() > 0 && std::isfinite(spike.deviations()), "spike.deviations", spike.deviations(),
       "more than 0"},
      {headroom > 0 && headroom <= 1, "headroom_warning", headroom, "more than 0, at most 1"},
      {evidence.max_full_origins() > 0, "evidence.max_full_origins", 0, "at least 1"},
      {evidence.bundle_quota_bytes() <= (std::uint64_t{1} << 30), "evidence.bundle_quota_bytes",
       number(evidence.bundle_quota_bytes()), "at most 2^30"},
      {evidence.cross_examine_bytes() <= (std::uint64_t{1} << 30), "evidence.cross_examine_bytes",
       number(evidence.cross_examine_bytes()), "at most 2^30"},
      {evidence.deadline_seconds() >= 0 && evidence.deadline_seconds() <= kDay, "evidence.deadline_seconds",
       evidence.deadline_seconds(), "0 to 86400"},
      {policy.state_interval_attempts() > 0, "state_interval_attempts", 0, "at least 1"},
      {policy.max_identical_failures() >= 2, "max_identical_failures",
       number(policy.max_identical_failures()), "at least 2"},
  };
  for (const Rule& rule : rules) {
    if (rule.met) continue;
    return Status::usage(fmt::format("policy: {} is {}; it must be {}", rule.field, rule.value, rule.range));
  }
  return Status();
}

bool is_rule_name(const std::string& name) {
  return !name.empty() && name.size() <= 64 && std::ranges::all_of(name, [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '-' || c == '.';
  });
}

// Why the rule cannot be taken; "" when it can.
std::string fault_of(const Policy::RateRule& rule) {
  if (!is_rule_name(rule.name())) return "its name must be 1 to 64 letters, digits, '_', '-' or '.'";
  if (rule.name() == kCalibrationRule) return "that name belongs to the rule of loss_scale";
  if (!rule.has_window_attempts() || !rule.has_max_skips())
    return "window_attempts and max_skips must be given";
  if (rule.window_attempts() < 1 || rule.window_attempts() > 100'000) {
    return fmt::format("window_attempts is {}; it must be 1 to 100000", rule.window_attempts());
  }
  if (rule.max_skips() > kMostSkipsOfRule) {
    return fmt::format("max_skips is {}; it must be at most {}", rule.max_skips(), kMostSkipsOfRule);
  }
  if (rule.least_attempts() < 1 || rule.least_attempts() > rule.window_attempts()) {
    return fmt::format("least_attempts is {}; it must be 1 to window_attempts", rule.least_attempts());
  }
  return "";
}

Status check_rate_rules(const Policy& policy) {
  constexpr int kMostRules = 16;  // each is looked at in each attempt
  if (policy.rate_rules_size() > kMostRules) {
    return Status::usage(
        fmt::format("policy: {} rate_rules; at most {}", policy.rate_rules_size(), kMostRules));
  }
  std::set<std::string> names;
  for (const Policy::RateRule& rule : policy.rate_rules()) {
    std::string fault = fault_of(rule);
    if (fault.empty() && !names.insert(rule.name()).second) fault = "there is another of this name";
    if (!fault.empty()) return Status::usage("policy: rate_rules '" + rule.name() + "': " + fault);
  }
  return Status();
}

}  // namespace

Status parse_policy(const std::string& text, Policy* policy) {
  policy->Clear();
  if (Status s = is_json(text) ? parse_json(text, policy) : parse_textproto(text, policy); !s.ok()) return s;
  set_rate_rule_defaults(policy);
  // Before what was left out is filled in: some fields of a rule have no default.
  if (Status s = check_rate_rules(*policy); !s.ok()) return s;
  make_defaults_explicit(policy);
  return check_ranges(*policy);
}

Status read_policy_file(const std::string& path, std::string* text) {
  text->clear();
  if (path.empty()) return Status();
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored))
    return Status::usage("policy file " + path + ": is a folder");
  std::ifstream file(path, std::ios::binary);
  if (!file) return Status::usage("policy file " + path + ": " + std::strerror(errno));
  text->assign(std::istreambuf_iterator<char>(file), {});
  if (file.bad()) return Status::usage("policy file " + path + ": " + std::strerror(errno));
  return Status();
}

Status check_can_roll_back(const Policy& policy) {
  for (const Policy::RateRule& rule : policy.rate_rules()) {
    if (rule.action() != Policy::RateRule::ROLL_BACK) continue;
    return Status::usage(
        "policy: rate_rules '" + rule.name() +
        "': action ROLL_BACK needs checkpoints to go back to, and none are written; turn them on, "
        "or choose WARN or ABORT");
  }
  return Status();
}

std::string policy_text(const Policy& policy) {
  std::string text;
  google::protobuf::TextFormat::PrintToString(policy, &text);
  return text;
}

std::string policy_json(const Policy& policy) {
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  std::string text;
  // Fails for what is not UTF-8 only, which no policy holds that was parsed.
  static_cast<void>(google::protobuf::util::MessageToJsonString(policy, &text, options));
  return text;
}

std::uint64_t policy_hash(const Policy& policy) {
  const std::string text = policy_text(policy);
  return XXH3_64bits(text.data(), text.size());
}

}  // namespace holdfast
