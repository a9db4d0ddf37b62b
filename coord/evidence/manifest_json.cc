#include "holdfast/coord/evidence/manifest_json.h"

#include <fmt/format.h>
#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>

#include <cassert>
#include <utility>
#include <vector>

#include "holdfast/collectives/record.h"
#include "holdfast/coord/event_log.h"
#include "holdfast/coord/evidence/evidence.pb.h"

namespace holdfast {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;
using Json = nlohmann::ordered_json;

Json json_of(const Message& message);

Json stage_json(int stage) {
  const bool known = stage >= 0 && stage < kStageCount;
  return known ? Json(std::string(stage_name(static_cast<Stage>(stage)))) : Json(stage);
}

// `i` of a repeated field, -1 of another.
Json value_json(const Message& message, const FieldDescriptor* field, int i) {
  const Reflection& in = *message.GetReflection();
  const bool one = i < 0;
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32: {
      const int value = one ? in.GetInt32(message, field) : in.GetRepeatedInt32(message, field, i);
      return field->name() == "stage" ? stage_json(value) : Json(value);
    }
    case FieldDescriptor::CPPTYPE_INT64:
      return one ? in.GetInt64(message, field) : in.GetRepeatedInt64(message, field, i);
    case FieldDescriptor::CPPTYPE_UINT32:
      return one ? in.GetUInt32(message, field) : in.GetRepeatedUInt32(message, field, i);
    case FieldDescriptor::CPPTYPE_UINT64: {
      const auto value = one ? in.GetUInt64(message, field) : in.GetRepeatedUInt64(message, field, i);
      return field->type() == FieldDescriptor::TYPE_FIXED64 ? Json(fmt::format("{:016x}", value))
                                                            : Json(value);
    }
    case FieldDescriptor::CPPTYPE_ENUM:
      return (one ? in.GetEnum(message, field) : in.GetRepeatedEnum(message, field, i))->name();
    case FieldDescriptor::CPPTYPE_BOOL:
      return one ? in.GetBool(message, field) : in.GetRepeatedBool(message, field, i);
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return json_number(one ? in.GetDouble(message, field) : in.GetRepeatedDouble(message, field, i));
    case FieldDescriptor::CPPTYPE_STRING:
      return one ? in.GetString(message, field) : in.GetRepeatedString(message, field, i);
    case FieldDescriptor::CPPTYPE_MESSAGE:
      return json_of(one ? in.GetMessage(message, field) : in.GetRepeatedMessage(message, field, i));
    case FieldDescriptor::CPPTYPE_FLOAT: break;
  }
  assert(false && "evidence.proto has no fields of this kind");
  return nullptr;
}

Json json_of(const Message& message) {
  std::vector<const FieldDescriptor*> fields;
  message.GetReflection()->ListFields(message, &fields);
  Json json = Json::object();
  for (const FieldDescriptor* field : fields) {
    if (!field->is_repeated()) {
      json[field->name()] = value_json(message, field, -1);
      continue;
    }
    Json values = Json::array();
    const int size = message.GetReflection()->FieldSize(message, field);
    for (int i = 0; i < size; ++i) values.push_back(value_json(message, field, i));
    json[field->name()] = std::move(values);
  }
  return json;
}

}  // namespace

Json layers_json(const LayerAttempt& attempt) { return json_of(attempt); }

Json manifest_json(const BundleManifest& manifest, const std::string& content_id) {
  Json json = {{"content_id", content_id}};
  json.update(json_of(manifest));
  return json;
}

}  // namespace holdfast
