#include "holdfast/coord/policy.h"

#include <google/protobuf/io/tokenizer.h>
#include <google/protobuf/text_format.h>
#include <google/protobuf/util/json_util.h>
#include <xxhash.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>

#include "holdfast/coord/policy.pb.h"

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

Status parse_json(const std::string& text, Policy* policy) {
  google::protobuf::util::JsonParseOptions options;
  options.ignore_unknown_fields = false;
  const auto parsed = google::protobuf::util::JsonStringToMessage(text, policy, options);
  if (parsed.ok()) return Status();
  return Status::usage("policy (JSON): " + std::string(parsed.message()));
}

Status parse_textproto(const std::string& text, Policy* policy) {
  FirstError error;
  google::protobuf::TextFormat::Parser parser;
  parser.RecordErrorsTo(&error);
  if (parser.ParseFromString(text, policy)) return Status();
  return Status::usage("policy (textproto): " + error.text());
}

// Sets every unset field to its declared default, so that the effective policy can be shown and hashed.
void make_defaults_explicit(Policy* policy) {
  const auto* reflection = policy->GetReflection();
  const auto* descriptor = policy->GetDescriptor();
  for (int i = 0; i < descriptor->field_count(); ++i) {
    const auto* field = descriptor->field(i);
    if (field->is_repeated() || reflection->HasField(*policy, field)) continue;
    using Field = google::protobuf::FieldDescriptor;
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

constexpr double kDay = 24 * 3600;

Status out_of_range(const char* field, double value, const char* range) {
  return Status::usage(std::string("policy: ") + field + " is " + std::to_string(value) + "; it must be " + range +
                       " and at most 86400");
}

// The conditions are written so that NaN is refused too.
Status check_ranges(const Policy& policy) {
  const double deadline = policy.attempt_deadline_seconds();
  if (!(deadline >= 0 && deadline <= kDay)) {
    return out_of_range("attempt_deadline_seconds", deadline, "at least 0 (automatic)");
  }
  const double floor = policy.attempt_deadline_floor_seconds();
  if (!(floor > 0 && floor <= kDay)) return out_of_range("attempt_deadline_floor_seconds", floor, "more than 0");
  if (policy.suspect_after_incidents() == 0) {
    return Status::usage("policy: suspect_after_incidents is 0; it must be at least 1");
  }
  return Status();
}

}  // namespace

Status parse_policy(const std::string& text, Policy* policy) {
  policy->Clear();
  if (Status s = is_json(text) ? parse_json(text, policy) : parse_textproto(text, policy); !s.ok()) return s;
  make_defaults_explicit(policy);
  return check_ranges(*policy);
}

Status read_policy_file(const std::string& path, std::string* text) {
  text->clear();
  if (path.empty()) return Status();
  std::ifstream file(path, std::ios::binary);
  std::ostringstream content;
  if (file) content << file.rdbuf();
  if (!file || (content.fail() && file.peek() != std::ifstream::traits_type::eof())) {
    return Status::usage("policy file " + path + ": " + std::strerror(errno));
  }
  *text = content.str();
  return Status();
}

std::string policy_text(const Policy& policy) {
  std::string text;
  google::protobuf::TextFormat::PrintToString(policy, &text);
  return text;
}

std::uint64_t policy_hash(const Policy& policy) {
  const std::string text = policy_text(policy);
  return XXH3_64bits(text.data(), text.size());
}

}  // namespace holdfast
