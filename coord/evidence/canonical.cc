#include "canonical.h"

#include <fmt/format.h>
#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>

#include <algorithm>
#include <bit>
#include <cassert>
#include <cstdint>
#include <vector>

#include "holdfast/coord/evidence/bundle.h"
#include "holdfast/coord/evidence/evidence.pb.h"
#include "holdfast/coord/storage/sha256.h"

namespace holdfast {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

// The library's hex() makes a string for each; a form has a million of them.
void append_hex(const std::string& bytes, std::string* out) {
  constexpr char kDigits[] = "0123456789abcdef";
  out->push_back('"');
  for (const char byte : bytes) {
    out->push_back(kDigits[static_cast<unsigned char>(byte) >> 4]);
    out->push_back(kDigits[static_cast<unsigned char>(byte) & 15]);
  }
  out->push_back('"');
}

void append_message(const Message& message, std::string* out);

// `i` of a repeated field, -1 of another. Each kind of value that evidence.proto has.
void append_value(const Message& message, const FieldDescriptor* field, int i, std::string* out) {
  const Reflection& in = *message.GetReflection();
  const bool one = i < 0;
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32:
      *out += std::to_string(one ? in.GetInt32(message, field) : in.GetRepeatedInt32(message, field, i));
      return;
    case FieldDescriptor::CPPTYPE_INT64:
      *out += std::to_string(one ? in.GetInt64(message, field) : in.GetRepeatedInt64(message, field, i));
      return;
    case FieldDescriptor::CPPTYPE_UINT32:
      *out += std::to_string(one ? in.GetUInt32(message, field) : in.GetRepeatedUInt32(message, field, i));
      return;
    case FieldDescriptor::CPPTYPE_UINT64:
      *out += std::to_string(one ? in.GetUInt64(message, field) : in.GetRepeatedUInt64(message, field, i));
      return;
    case FieldDescriptor::CPPTYPE_ENUM:
      *out +=
          std::to_string(one ? in.GetEnumValue(message, field) : in.GetRepeatedEnumValue(message, field, i));
      return;
    case FieldDescriptor::CPPTYPE_BOOL:
      *out += (one ? in.GetBool(message, field) : in.GetRepeatedBool(message, field, i)) ? "true" : "false";
      return;
    case FieldDescriptor::CPPTYPE_DOUBLE:
      *out += fmt::format("\"0x{:016x}\"",
                          std::bit_cast<std::uint64_t>(one ? in.GetDouble(message, field)
                                                           : in.GetRepeatedDouble(message, field, i)));
      return;
    case FieldDescriptor::CPPTYPE_STRING:
      append_hex(one ? in.GetString(message, field) : in.GetRepeatedString(message, field, i), out);
      return;
    case FieldDescriptor::CPPTYPE_MESSAGE:
      append_message(one ? in.GetMessage(message, field) : in.GetRepeatedMessage(message, field, i), out);
      return;
    case FieldDescriptor::CPPTYPE_FLOAT: break;
  }
  assert(false && "evidence.proto has no fields of this kind");
}

void append_message(const Message& message, std::string* out) {
  std::vector<const FieldDescriptor*> fields;
  message.GetReflection()->ListFields(message, &fields);
  std::ranges::sort(fields, {}, [](const FieldDescriptor* field) { return field->name(); });
  out->push_back('{');
  for (const FieldDescriptor* field : fields) {
    if (out->back() != '{') out->push_back(',');
    *out += "\"" + field->name() + "\":";
    if (!field->is_repeated()) {
      append_value(message, field, -1, out);
      continue;
    }
    const int size = message.GetReflection()->FieldSize(message, field);
    for (int i = 0; i < size; ++i) {
      out->push_back(i == 0 ? '[' : ',');
      append_value(message, field, i, out);
    }
    out->push_back(']');
  }
  out->push_back('}');
}

}  // namespace

std::string canonical_manifest(const BundleManifest& manifest) {
  std::string form;
  append_message(manifest, &form);
  return form;
}

std::string evidence_content_id(const std::string& sha256) { return kEvidenceIdPrefix + hex(sha256); }

}  // namespace holdfast
