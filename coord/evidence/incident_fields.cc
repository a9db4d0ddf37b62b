// A report as JSON, and back. Order of fields is the contract's.
#include <fmt/format.h>

#include <algorithm>
#include <initializer_list>

#include "incident_contract.h"

namespace holdfast::incident_contract {
namespace {

using Json = nlohmann::ordered_json;

Json or_null(const std::optional<std::string>& text) { return text ? Json(*text) : Json(nullptr); }

Json binding_json(const Binding& binding) {
  if (!binding.recorded()) return kNotRecorded;
  return {{"identity", binding.identity}, {"digest", binding.digest}};
}

Json boundary_json(const std::optional<Boundary>& boundary) {
  if (!boundary) return nullptr;
  return {{"stage", boundary->stage},
          {"rank", boundary->rank},
          {"host", boundary->host},
          {"device", boundary->device},
          {"tensor", boundary->tensor},
          {"index", boundary->index},
          {"last_clean", or_null(boundary->last_clean)},
          {"first_dirty", or_null(boundary->first_dirty)}};
}

Json stage_json(const StageReport& stage) {
  Json json = {{"stage", stage.name},
               {"status", stage.status},
               {"owner", stage.owner},
               {"probe_source", stage.probe_source},
               {"telemetry_id", stage.telemetry_id}};
  json["tensor_set"] = {
      {"id", stage.tensor_set_id}, {"observations", stage.observations}, {"names", stage.names}};
  json["dtype"] = or_null(stage.dtype);
  json["scaled"] = stage.scaled;
  json["total"] = stage.total;
  json["finite"] = stage.finite;
  json["nonfinite"] = stage.nonfinite;
  json["nan"] = stage.nan;
  json["pos_inf"] = stage.pos_inf;
  json["neg_inf"] = stage.neg_inf;
  json["finite_abs_max"] = stage.finite_abs_max ? Json(*stage.finite_abs_max) : Json(nullptr);
  return json;
}

// What a value is, for who put another where it does not belong.
std::string_view kind_of(const Json& json) {
  switch (json.type()) {
    case Json::value_t::null: return "null";
    case Json::value_t::boolean: return "a boolean";
    case Json::value_t::string: return "a string";
    case Json::value_t::array: return "an array";
    case Json::value_t::object: return "an object";
    case Json::value_t::number_float: return "a number that is no integer";
    default: return "an integer";
  }
}

// Whether a number is the same as a double: an integer may be written for one.
bool is_exact(const Json& number) {
  if (number.is_number_float()) return true;
  if (number.is_number_unsigned()) return number.get<std::uint64_t>() <= kLargestNumber;
  return number.get<std::int64_t>() >= -static_cast<std::int64_t>(kLargestNumber);
}

// Takes one object apart. Keeps the first fault, and gives nothing after it.
class Fields {
 public:
  Fields(const Json& json, std::string where, std::initializer_list<std::string_view> names,
         std::string* fault)
      : json_(json), where_(std::move(where)), fault_(fault) {
    if (!failed()) check(names);
  }

  bool failed() const { return !fault_->empty(); }
  std::string path(std::string_view name) const {
    return where_.empty() ? std::string(name) : fmt::format("{}.{}", where_, name);
  }
  const Json& at(std::string_view name) const {
    static const Json kNull;
    return failed() ? kNull : json_.at(std::string(name));
  }

  std::string text(std::string_view name) { return text_in(at(name), path(name)); }

  std::optional<std::string> text_or_null(std::string_view name) {
    if (at(name).is_null()) return std::nullopt;
    return text(name);
  }

  std::uint64_t count(std::string_view name) {
    const Json& value = at(name);
    if (failed()) return 0;
    if (!value.is_number_integer()) {
      wrong(name, "an integer");
    } else if (!value.is_number_unsigned()) {
      fail(path(name), "is negative");
    } else if (value.get<std::uint64_t>() > kLargestNumber) {
      fail(path(name), "is above 2^53");
    } else {
      return value.get<std::uint64_t>();
    }
    return 0;
  }

  double real(std::string_view name) {
    const Json& value = at(name);
    if (failed()) return 0;
    if (!value.is_number()) {
      wrong(name, "a number");
    } else if (!is_exact(value)) {
      fail(path(name), "is an integer that a double does not hold");
    } else {
      return value.get<double>();
    }
    return 0;
  }

  bool boolean(std::string_view name) {
    const Json& value = at(name);
    if (!failed() && !value.is_boolean()) wrong(name, "a boolean");
    return !failed() && value.get<bool>();
  }

  std::vector<std::string> texts(std::string_view name, std::size_t most) {
    const Json& value = at(name);
    std::vector<std::string> all;
    if (failed()) return all;
    if (!value.is_array()) {
      wrong(name, "an array");
    } else if (value.size() > most) {
      fail(path(name), fmt::format("has more than {} entries", most));
    }
    for (std::size_t i = 0; !failed() && i < value.size(); ++i) {
      all.push_back(text_in(value[i], fmt::format("{}[{}]", path(name), i)));
    }
    return all;
  }

  void fail(const std::string& field, std::string_view how) {
    if (!failed()) *fault_ = fmt::format("{} {}", field.empty() ? "the report" : field, how);
  }
  void wrong(std::string_view name, std::string_view belongs) {
    fail(path(name), fmt::format("is {} where {} belongs", kind_of(at(name)), belongs));
  }

 private:
  void check(std::initializer_list<std::string_view> names) {
    if (!json_.is_object()) return fail(where_, fmt::format("is {} where an object belongs", kind_of(json_)));
    for (const auto& [name, value] : json_.items()) {
      if (std::ranges::find(names, name) == names.end()) return fail(path(text_of(name)), "is unknown");
    }
    for (const std::string_view name : names) {
      if (!json_.contains(std::string(name))) return fail(path(name), "is missing");
    }
  }

  std::string text_in(const Json& value, const std::string& field) {
    if (failed()) return "";
    if (!value.is_string()) {
      fail(field, fmt::format("is {} where a string belongs", kind_of(value)));
      return "";
    }
    const auto& text = value.get_ref<const std::string&>();
    if (text.empty()) fail(field, "is empty");
    // An evidence id is the longest: a run, a separator and the name of a folder.
    if (text.size() > 2 * kLongestText) fail(field, fmt::format("is longer than {} bytes", kLongestText));
    const bool joined = field == "evidence_id";
    if (!joined && text.size() > kLongestText) {
      fail(field, fmt::format("is longer than {} bytes", kLongestText));
    }
    if (!joined && !is_text(text)) fail(field, "holds control characters");
    return text;
  }

  const Json& json_;
  const std::string where_;
  std::string* const fault_;
};

Binding read_binding(Fields* parent, std::string_view name, const std::string& where, std::string* fault) {
  const Json& json = parent->at(name);
  if (parent->failed()) return {};
  if (json.is_string()) {
    if (json.get_ref<const std::string&>() != kNotRecorded) {
      parent->fail(where, "is a string other than \"not recorded\"");
    }
    return {};
  }
  Fields fields(json, where, {"identity", "digest"}, fault);
  return {fields.text("identity"), fields.text("digest")};
}

std::optional<Boundary> read_boundary(const Json& json, std::string* fault) {
  if (json.is_null()) return std::nullopt;
  Fields fields(json, "boundary",
                {"stage", "rank", "host", "device", "tensor", "index", "last_clean", "first_dirty"}, fault);
  return Boundary{.stage = fields.text("stage"),
                  .rank = fields.count("rank"),
                  .host = fields.text("host"),
                  .device = fields.text("device"),
                  .tensor = fields.text("tensor"),
                  .index = fields.count("index"),
                  .last_clean = fields.text_or_null("last_clean"),
                  .first_dirty = fields.text_or_null("first_dirty")};
}

StageReport read_stage(const Json& json, const std::string& where, std::string* fault) {
  Fields fields(json, where,
                {"stage", "status", "owner", "probe_source", "telemetry_id", "tensor_set", "dtype", "scaled",
                 "total", "finite", "nonfinite", "nan", "pos_inf", "neg_inf", "finite_abs_max"},
                fault);
  StageReport stage;
  stage.name = fields.text("stage");
  stage.status = fields.text("status");
  stage.owner = fields.text("owner");
  stage.probe_source = fields.text("probe_source");
  stage.telemetry_id = fields.text("telemetry_id");
  Fields set(fields.at("tensor_set"), where + ".tensor_set", {"id", "observations", "names"}, fault);
  stage.tensor_set_id = set.text("id");
  stage.observations = set.count("observations");
  stage.names = set.texts("names", kMostNames);
  stage.dtype = fields.text_or_null("dtype");
  stage.scaled = fields.boolean("scaled");
  stage.total = fields.count("total");
  stage.finite = fields.count("finite");
  stage.nonfinite = fields.count("nonfinite");
  stage.nan = fields.count("nan");
  stage.pos_inf = fields.count("pos_inf");
  stage.neg_inf = fields.count("neg_inf");
  if (!fields.at("finite_abs_max").is_null()) stage.finite_abs_max = fields.real("finite_abs_max");
  return stage;
}

}  // namespace

Json to_json(const Report& report) {
  Json json = {{"contract_version", report.contract_version}, {"contract_content_id", report.contract_id}};
  json["run"] = report.run;
  json["step"] = {{"epoch", report.epoch}, {"attempt", report.attempt}, {"update", report.update}};
  json["evidence_id"] = report.evidence_id;
  json["evidence_content_id"] = report.evidence_content_id;
  json["decision"] = report.decision;
  json["earliest_nonfinite_stage"] = report.earliest;
  json["action"] = report.action;
  json["root_cause_claim"] = report.root_cause_claim;
  json["boundary"] = boundary_json(report.boundary);
  Json bindings = Json::object();
  for (std::size_t i = 0; i < kBindings.size(); ++i) {
    bindings[std::string(kBindings[i])] = binding_json(report.bindings[i]);
  }
  bindings["loss_scale"] = {{"identity", report.loss_scale_identity}, {"value", report.loss_scale}};
  bindings["probe_sources"] = binding_json(report.probe_sources);
  json["bindings"] = std::move(bindings);
  json["stages"] = Json::array();
  for (const StageReport& stage : report.stages) json["stages"].push_back(stage_json(stage));
  if (!report.report_id.empty()) json["report_content_id"] = report.report_id;
  return json;
}

std::string from_json(const Json& json, Report* report) {
  *report = {};
  std::string fault;
  Fields fields(json, "",
                {"contract_version", "contract_content_id", "run", "step", "evidence_id",
                 "evidence_content_id", "decision", "earliest_nonfinite_stage", "action", "root_cause_claim",
                 "boundary", "bindings", "stages", "report_content_id"},
                &fault);
  report->contract_version = fields.text("contract_version");
  report->contract_id = fields.text("contract_content_id");
  report->run = fields.text("run");
  Fields step(fields.at("step"), "step", {"epoch", "attempt", "update"}, &fault);
  report->epoch = step.count("epoch");
  report->attempt = step.count("attempt");
  report->update = step.count("update");
  report->evidence_id = fields.text("evidence_id");
  report->evidence_content_id = fields.text("evidence_content_id");
  report->decision = fields.text("decision");
  report->earliest = fields.text("earliest_nonfinite_stage");
  report->action = fields.text("action");
  report->root_cause_claim = fields.text("root_cause_claim");
  report->boundary = read_boundary(fields.at("boundary"), &fault);
  Fields bindings(
      fields.at("bindings"), "bindings",
      {"model", "data", "batch", "objective", "optimizer", "precision", "loss_scale", "probe_sources"},
      &fault);
  for (std::size_t i = 0; i < kBindings.size(); ++i) {
    report->bindings[i] = read_binding(&bindings, kBindings[i], bindings.path(kBindings[i]), &fault);
  }
  Fields scale(bindings.at("loss_scale"), "bindings.loss_scale", {"identity", "value"}, &fault);
  report->loss_scale_identity = scale.text("identity");
  report->loss_scale = scale.real("value");
  report->probe_sources = read_binding(&bindings, "probe_sources", "bindings.probe_sources", &fault);
  const Json& stages = fields.at("stages");
  if (!fields.failed() && !stages.is_array()) fields.wrong("stages", "an array");
  if (!fields.failed() && stages.size() != kStages) {
    fields.fail("stages", fmt::format("has {} entries where {} belong", stages.size(), kStages));
  }
  for (std::size_t i = 0; !fields.failed() && i < stages.size(); ++i) {
    report->stages.push_back(read_stage(stages[i], fmt::format("stages[{}]", i), &fault));
  }
  report->report_id = fields.text("report_content_id");
  return fault;
}

}  // namespace holdfast::incident_contract
