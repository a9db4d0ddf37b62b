// What validate_incident_report() refuses, each by its own message.
#include <gtest/gtest.h>

#include <functional>
#include <set>

#include "coord/evidence/sample_incident_manifest.h"
#include "holdfast/coord/evidence/incident_registry.h"
#include "holdfast/coord/evidence/incident_report.h"
#include "incident_contract.h"

namespace holdfast {
namespace {

using Json = nlohmann::ordered_json;

Json good() {
  Json report;
  EXPECT_TRUE(make_incident_report(sample_incident_manifest(), kSampleContentId, &report).ok());
  return report;
}

void seal(Json* report) { (*report)["report_content_id"] = incident_contract::report_id(*report); }

// Why it is refused; "" when it is not.
std::string refusal(const std::string& text) {
  const Status status = validate_incident_report(text);
  if (status.ok()) return "";
  EXPECT_EQ(status.code(), StatusCode::kUsage);
  const std::string prefix = "incident report refused: ";
  EXPECT_TRUE(status.message().starts_with(prefix)) << status.message();
  return status.message().substr(prefix.size());
}

struct Case {
  const char* why;
  std::function<void(Json&)> change;
};

// What a forger would do: the content id is made to fit.
const Case kCases[] = {
    // fields
    {"run is missing", [](Json& r) { r.erase("run"); }},
    {"step.update is missing", [](Json& r) { r["step"].erase("update"); }},
    {"stages[4].scaled is missing", [](Json& r) { r["stages"][4].erase("scaled"); }},
    {"note is unknown", [](Json& r) { r["note"] = 1; }},
    {"stages[0].tensor_set.more is unknown", [](Json& r) { r["stages"][0]["tensor_set"]["more"] = 1; }},
    {"a\\x0ab is unknown", [](Json& r) { r["a\nb"] = 1; }},
    {"step is an array where an object belongs", [](Json& r) { r["step"] = Json::array(); }},
    {"boundary is a string where an object belongs", [](Json& r) { r["boundary"] = "x"; }},
    {"stages is an object where an array belongs", [](Json& r) { r["stages"] = Json::object(); }},
    {"stages has 4 entries where 5 belong", [](Json& r) { r["stages"].erase(4); }},
    {"run is null where a string belongs", [](Json& r) { r["run"] = nullptr; }},
    {"run is empty", [](Json& r) { r["run"] = ""; }},
    {"run is longer than 256 bytes", [](Json& r) { r["run"] = std::string(257, 'x'); }},
    {"run holds control characters", [](Json& r) { r["run"] = "a\x1b[2J"; }},
    {"bindings.model is a string other than \"not recorded\"", [](Json& r) { r["bindings"]["model"] = "x"; }},
    {"stages[1].tensor_set.names has more than 16 entries",
     [](Json& r) {
       for (int i = 0; i < 16; ++i) r["stages"][1]["tensor_set"]["names"].push_back("x");
     }},
    // kinds of numbers
    {"stages[1].total is a boolean where an integer belongs",
     [](Json& r) { r["stages"][1]["total"] = true; }},
    {"step.attempt is a boolean where an integer belongs", [](Json& r) { r["step"]["attempt"] = false; }},
    {"stages[1].total is a number that is no integer where an integer belongs",
     [](Json& r) { r["stages"][1]["total"] = 40960.0; }},
    {"stages[1].nan is a string where an integer belongs", [](Json& r) { r["stages"][1]["nan"] = "NaN"; }},
    {"stages[1].finite is negative", [](Json& r) { r["stages"][1]["finite"] = -1; }},
    {"step.attempt is above 2^53", [](Json& r) { r["step"]["attempt"] = (std::uint64_t{1} << 53) + 1; }},
    {"stages[1].finite_abs_max is a string where a number belongs",
     [](Json& r) { r["stages"][1]["finite_abs_max"] = "Infinity"; }},
    {"stages[1].finite_abs_max is a boolean where a number belongs",
     [](Json& r) { r["stages"][1]["finite_abs_max"] = true; }},
    {"bindings.loss_scale.value is a boolean where a number belongs",
     [](Json& r) { r["bindings"]["loss_scale"]["value"] = true; }},
    {"bindings.loss_scale.value is null where a number belongs",
     [](Json& r) { r["bindings"]["loss_scale"]["value"] = nullptr; }},
    {"stages[1].finite_abs_max is an integer that a double does not hold",
     [](Json& r) { r["stages"][1]["finite_abs_max"] = (std::uint64_t{1} << 53) + 1; }},
    {"stages[1].scaled is an integer where a boolean belongs", [](Json& r) { r["stages"][1]["scaled"] = 1; }},
    // words and ids
    {"contract_version is not \"training-incident-v1\"",
     [](Json& r) { r["contract_version"] = "training-incident-v2"; }},
    {"contract_content_id is that of another contract", [](Json& r) { r["contract_content_id"] = "x"; }},
    {"evidence_id is not that of this run and step", [](Json& r) { r["evidence_id"] = "run-5f3a/e1-a1842"; }},
    {"evidence_id is not that of this run and step", [](Json& r) { r["step"]["attempt"] = 1843; }},
    {"evidence_id is not that of this run and step", [](Json& r) { r["run"] = "run-other"; }},
    {"evidence_content_id is not \"training-incident-evidence@sha256:\" and 64 hexadecimal digits",
     [](Json& r) { r["evidence_content_id"] = "training-incident-evidence@sha256:" + std::string(64, 'A'); }},
    {"decision is neither \"HOLD\" nor \"CONTINUE_BOUNDED_DIAGNOSTICS\"",
     [](Json& r) { r["decision"] = "CONTINUE"; }},
    {"root_cause_claim is not \"NONE_SYMPTOM_LOCATION_IS_NOT_CAUSALITY\"",
     [](Json& r) { r["root_cause_claim"] = "the batch"; }},
    {"bindings.model.digest is not \"sha256:\" and 64 hexadecimal digits",
     [](Json& r) { r["bindings"]["model"]["digest"] = "sha256:12"; }},
    {"bindings.probe_sources is not recorded",
     [](Json& r) { r["bindings"]["probe_sources"] = "not recorded"; }},
    {"bindings.probe_sources.digest is not that of the stages",
     [](Json& r) { r["bindings"]["probe_sources"]["digest"] = "sha256:" + std::string(64, '0'); }},
    // loss scales
    {"bindings.loss_scale.value is no finite power of two",
     [](Json& r) { r["bindings"]["loss_scale"]["value"] = 65535.0; }},
    {"bindings.loss_scale.value is no finite power of two",
     [](Json& r) { r["bindings"]["loss_scale"]["value"] = 0.0; }},
    {"bindings.loss_scale.value is no finite power of two",
     [](Json& r) { r["bindings"]["loss_scale"]["value"] = -2.0; }},
    {"bindings.loss_scale.value is not within 2^-24 and 2^24",
     [](Json& r) { r["bindings"]["loss_scale"]["value"] = 0x1p25; }},
    {"bindings.loss_scale.value is not within 2^-24 and 2^24",
     [](Json& r) { r["bindings"]["loss_scale"]["value"] = 0x1p-25; }},
    // one stage
    {"stages[0].stage is not \"input\"", [](Json& r) { std::swap(r["stages"][0], r["stages"][1]); }},
    {"stages[1].status is neither \"OBSERVED\" nor \"NOT_RUN\"",
     [](Json& r) { r["stages"][1]["status"] = "SKIPPED"; }},
    {"stages[1].probe_source is none of this stage's",
     [](Json& r) { r["stages"][1]["probe_source"] = "local-gradients"; }},
    {"stages[1].probe_source is \"none\" without tensor_set.observations being 0, or the reverse",
     [](Json& r) { r["stages"][1]["probe_source"] = "none"; }},
    {"stages[1].total is not finite + nonfinite", [](Json& r) { r["stages"][1]["total"] = 40961; }},
    {"stages[3].total is not finite + nonfinite", [](Json& r) { r["stages"][3]["nonfinite"] = 1; }},
    {"stages[3].nonfinite is not nan + pos_inf + neg_inf", [](Json& r) { r["stages"][3]["nan"] = 2; }},
    {"stages[1].counts more work than a stage may have, 2^44 - 1",
     [](Json& r) { r["stages"][1]["total"] = std::uint64_t{1} << 44; }},
    {"stages[1].tensor_set.observations is more work than a stage may have, 2^20",
     [](Json& r) { r["stages"][1]["tensor_set"]["observations"] = (1 << 20) + 1; }},
    {"stages[1].total counts values of no tensor",
     [](Json& r) { r["stages"][1]["tensor_set"]["observations"] = 0; }},
    {"stages[4].status is NOT_RUN, and something was measured",
     [](Json& r) { r["stages"][4]["tensor_set"]["observations"] = 1; }},
    {"stages[1].tensor_set.names has more names than observations",
     [](Json& r) {
       r["stages"][1]["tensor_set"]["names"] = {"a", "b", "c", "d", "e"};
     }},
    {"stages[1].tensor_set.names has a name twice",
     [](Json& r) {
       r["stages"][1]["tensor_set"]["names"] = {"a", "a"};
     }},
    {"stages[1].tensor_set.names is not sorted",
     [](Json& r) {
       r["stages"][1]["tensor_set"]["names"] = {"b", "a"};
     }},
    {"stages[1].dtype is null without tensor_set.observations being 0, or the reverse",
     [](Json& r) { r["stages"][1]["dtype"] = nullptr; }},
    {"stages[1].dtype is unknown", [](Json& r) { r["stages"][1]["dtype"] = "F33"; }},
    {"stages[3].nonfinite counts values that dtype has not",
     [](Json& r) { r["stages"][3]["dtype"] = "I32"; }},
    {"stages[1].finite_abs_max is null without finite being 0, or the reverse",
     [](Json& r) { r["stages"][1]["finite_abs_max"] = nullptr; }},
    {"stages[1].finite_abs_max is negative", [](Json& r) { r["stages"][1]["finite_abs_max"] = -0.0; }},
    {"stages[3].finite_abs_max is above the largest value of dtype",
     [](Json& r) { r["stages"][3]["finite_abs_max"] = 65505.0; }},
    {"stages[1].finite_abs_max is above the largest value of dtype",
     [](Json& r) { r["stages"][1]["finite_abs_max"] = 3.41e38; }},
    {"stages[3].finite_abs_max is below the resolution of dtype",
     [](Json& r) { r["stages"][3]["finite_abs_max"] = 0x1p-25; }},
    {"stages[1].finite_abs_max is below the resolution of dtype",
     [](Json& r) { r["stages"][1]["finite_abs_max"] = 1e-46; }},
    {"stages[4].scaled is true of nothing", [](Json& r) { r["stages"][4]["scaled"] = true; }},
    {"stages[4].finite_abs_max is one of nothing", [](Json& r) { r["stages"][4]["finite_abs_max"] = 1.0; }},
    // all stages
    {"stages[4].status is NOT_RUN with nothing non-finite before",
     [](Json& r) {
       Json& stage = r["stages"][3];
       stage["total"] = stage["finite"];
       stage["nonfinite"] = stage["nan"] = stage["pos_inf"] = 0;
     }},
    {"stages[3].status is OBSERVED after a stage that was not run",
     [](Json& r) {
       Json not_run = r["stages"][4];
       not_run["stage"] = "loss";
       r["stages"][2] = not_run;
       r["stages"][1]["nan"] = r["stages"][1]["nonfinite"] = 1;
       r["stages"][1]["total"] = 40961;
     }},
    {"stages[2].telemetry_id is that of stages[0], too",
     [](Json& r) { r["stages"][2]["telemetry_id"] = r["stages"][0]["telemetry_id"]; }},
    {"stages[2].tensor_set.id is that of stages[0], too",
     [](Json& r) { r["stages"][2]["tensor_set"]["id"] = r["stages"][0]["tensor_set"]["id"]; }},
    {"stages count more work than a report may have, 2^45",
     [](Json& r) {
       for (int i = 0; i < 3; ++i) {
         r["stages"][i]["total"] = (std::uint64_t{1} << 44) - 1;
         r["stages"][i]["finite"] = (std::uint64_t{1} << 44) - 1;
       }
     }},
    {"earliest_nonfinite_stage is not \"backward\", which the counts say",
     [](Json& r) { r["earliest_nonfinite_stage"] = "loss"; }},
    {"earliest_nonfinite_stage is not \"forward\", which the counts say",
     [](Json& r) {
       r["stages"][1]["nan"] = r["stages"][1]["nonfinite"] = 1;
       r["stages"][1]["total"] = 40961;
     }},
    {"action is not \"hold-and-inspect-gradient-path-and-loss-scaling\", which belongs to that stage",
     [](Json& r) { r["action"] = "hold-and-inspect-objective-reduction"; }},
    {"boundary is null without earliest_nonfinite_stage being \"none\", or the reverse",
     [](Json& r) { r["boundary"] = nullptr; }},
    {"boundary.stage is not within earliest_nonfinite_stage",
     [](Json& r) { r["boundary"]["stage"] = "loss"; }},
    {"boundary.stage is not within earliest_nonfinite_stage", [](Json& r) { r["boundary"]["stage"] = "x"; }},
    {"boundary.rank is above 2^20 - 1", [](Json& r) { r["boundary"]["rank"] = 1 << 20; }},
    {"stages[1].tensor_set.id is not that of its tensors",
     [](Json& r) { r["stages"][1]["tensor_set"]["names"] = {"other"}; }},
    {"stages[1].telemetry_id is not that of its measurement",
     [](Json& r) { r["stages"][1]["total"] = r["stages"][1]["finite"] = 40961; }},
};

TEST(IncidentValidation, RefusesEachFaultByItsOwnMessage) {
  for (const Case& c : kCases) {
    Json report = good();
    c.change(report);
    seal(&report);
    EXPECT_EQ(refusal(report.dump()), c.why);
  }
}

TEST(IncidentValidation, TakesAGoodReportHoweverItIsWrittenDown) {
  const Json report = good();
  EXPECT_EQ(refusal(report.dump()), "");
  EXPECT_EQ(refusal(report.dump(4)), "");
  EXPECT_EQ(refusal(nlohmann::json(report).dump()), "");  // sorted keys
  Json integer = report;
  integer["bindings"]["loss_scale"]["value"] = 65536;  // as a writer does that knows one kind of number
  EXPECT_EQ(refusal(integer.dump()), "");
}

TEST(IncidentValidation, RefusesWhatIsNotStrictJson) {
  const std::string text = good().dump();
  const auto with = [&](const std::string& from, const std::string& to) {
    const auto at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    return text.substr(0, at) + to + text.substr(at + from.size());
  };
  const std::string number = "\"finite_abs_max\":31.5";
  ASSERT_NE(text.find(number), std::string::npos);
  for (const char* literal : {"NaN", "Infinity", "-Infinity"}) {
    EXPECT_EQ(refusal(with(number, std::string("\"finite_abs_max\":") + literal)),
              "it has NaN or Infinity for a number, which JSON has not");
  }
  EXPECT_EQ(refusal(with(number, "\"finite_abs_max\":1e999")), "it has a number beyond what a double holds");
  EXPECT_EQ(refusal(with("{\"contract_version\"", "{\"run\":\"x\",\"contract_version\"")),
            "it has the key \"run\" twice");
  EXPECT_EQ(refusal(with("\"nan\":0", "\"nan\":0,\"nan\":0")), "it has the key \"nan\" twice");
  EXPECT_EQ(refusal(with("\"epoch\":1", "\"epoch\":01")).substr(0, 26), "it is not JSON in UTF-8, a");
  EXPECT_EQ(refusal(with("run-5f3a", "run-\xff")).substr(0, 26), "it is not JSON in UTF-8, a");
  EXPECT_EQ(refusal(with("\"run\"", "/* */\"run\"")).substr(0, 26), "it is not JSON in UTF-8, a");
  EXPECT_EQ(refusal(text + "x").substr(0, 26), "it is not JSON in UTF-8, a");
  EXPECT_EQ(refusal("").substr(0, 26), "it is not JSON in UTF-8, a");
  EXPECT_EQ(refusal(text + std::string(1, '\0')), "it holds a NUL");
  EXPECT_EQ(refusal("\xef\xbb\xbf" + text), "it begins with a byte order mark");
  EXPECT_EQ(refusal(text + std::string(128 << 10, ' ')), "it is larger than 131072 bytes");
  EXPECT_EQ(refusal(std::string(100000, '[')), "it is deeper than 5 levels");
  std::string many = "[0";
  for (int i = 0; i < 1000; ++i) many += ",0";
  EXPECT_EQ(refusal(many + "]"), "it has more than 1000 keys and values");
  EXPECT_EQ(refusal("[]"), "the report is an array where an object belongs");
}

// Every value at every depth, as a pointer into the report.
void collect(const Json& json, const Json::json_pointer& at, std::vector<Json::json_pointer>* out) {
  if (!json.is_structured()) {
    out->push_back(at);
  } else if (json.is_object()) {
    for (const auto& [name, value] : json.items()) collect(value, at / name, out);
  } else {
    for (std::size_t i = 0; i < json.size(); ++i) collect(json[i], at / i, out);
  }
}

TEST(IncidentValidation, RefusesEverySingleChangeOfTheReport) {
  const Json report = good();
  std::vector<Json::json_pointer> places;
  collect(report, Json::json_pointer(), &places);
  EXPECT_GT(places.size(), 100u);
  for (const auto& place : places) {
    const Json& was = report.at(place);
    std::vector<Json> others = {nullptr, true, "x", 1, 2.5, Json::array(), Json::object()};
    if (was.is_number_integer()) others.emplace_back(was.get<std::uint64_t>() + 1);
    if (was.is_number_float()) others.emplace_back(was.get<double>() * 2);
    if (was.is_boolean()) others.emplace_back(!was.get<bool>());
    if (was.is_string()) {
      std::string text = was;
      text.back() = text.back() == 'a' ? 'b' : 'a';
      others.emplace_back(text);
    }
    for (const Json& other : others) {
      if (other == was && other.type() == was.type()) continue;
      Json changed = report;
      changed[place] = other;
      if (canonical_incident_report(changed) == canonical_incident_report(report) &&
          changed["report_content_id"] == report["report_content_id"]) {
        continue;  // the same number, written as an integer
      }
      EXPECT_NE(refusal(changed.dump()), "") << place << " " << other;
    }
  }
}

TEST(IncidentValidation, RefusesEveryChangedByteOfTheTextOrReadsTheSame) {
  const Json report = good();
  const std::string text = report.dump();
  for (std::size_t i = 0; i < text.size(); ++i) {
    std::string changed = text;
    changed[i] = static_cast<char>(changed[i] ^ 1);
    if (validate_incident_report(changed).ok()) {
      EXPECT_EQ(canonical_incident_report(Json::parse(changed)), canonical_incident_report(report)) << i;
    }
    if (i % 16 == 0) {
      EXPECT_FALSE(validate_incident_report(text.substr(0, i)).ok()) << i;
    }
  }
}

TEST(IncidentValidation, AChangedFieldChangesTheId) {
  Json report = good();
  report["boundary"]["host"] = "node-2";
  EXPECT_EQ(refusal(report.dump()), "report_content_id is not that of the report: it was changed");
}

TEST(IncidentValidation, AReportAtAllLimitsIsTaken) {
  const std::string longest = "\"" + std::string(incident_contract::kLongestText - 17, '\\');
  BundleManifest manifest = sample_incident_manifest();
  set_origin(Stage::kOptimizer, {1, 0, 0}, &manifest);
  manifest.set_run(std::string(incident_contract::kLongestText, '"'));
  manifest.clear_configuration();
  for (const std::string_view name : incident_contract::kBindings) {
    add_configuration(std::string(name).c_str(), longest, &manifest);
  }
  for (StageTotal& stage : *manifest.mutable_parts(0)->mutable_stages()) {
    stage.clear_names();
    stage.set_tensors(1000);
    for (int i = 0; i < 16; ++i) stage.add_names(longest + std::to_string(i));
  }
  Json report;
  const Status status = make_incident_report(manifest, kSampleContentId, &report);
  ASSERT_TRUE(status.ok()) << status.to_string();
  EXPECT_EQ(refusal(report.dump(2)), "");
}

TEST(IncidentRegistry, RefusesAnEvidenceIdThatComesAgainWithAnotherContent) {
  IncidentRegistry registry;
  ValidatedIncident incident;
  const Json report = good();
  ASSERT_TRUE(registry.admit(report.dump(), &incident).ok());
  EXPECT_EQ(incident.evidence_id(), "run-5f3a/e0001-a0000001842");
  ASSERT_TRUE(registry.admit(report.dump(), &incident).ok());  // the same is no news

  Json other = report;
  other["evidence_content_id"] = "training-incident-evidence@sha256:" + std::string(64, 'b');
  seal(&other);
  EXPECT_EQ(registry.admit(other.dump(), &incident).message(),
            "incident report refused: evidence_id is known, with another evidence_content_id");
  const Json* used = nullptr;
  EXPECT_FALSE(incident.use(&used).ok());

  other = report;
  other["decision"] = "HOLD";
  seal(&other);
  EXPECT_EQ(registry.admit(other.dump(), &incident).message(),
            "incident report refused: evidence_id is known, with another report_content_id");
  EXPECT_FALSE(registry.admit("{}", &incident).ok());
}

TEST(IncidentRegistry, KeepsABoundedNumberInMind) {
  IncidentRegistry registry(1);
  ValidatedIncident incident;
  ASSERT_TRUE(registry.admit(good().dump(), &incident).ok());
  BundleManifest manifest = sample_incident_manifest();
  manifest.set_attempt(1843);
  Json report;
  ASSERT_TRUE(make_incident_report(manifest, kSampleContentId, &report).ok());
  EXPECT_EQ(registry.admit(report.dump(), &incident).message(),
            "incident report refused: 1 incidents are known already, and no more are kept in mind");
}

TEST(ValidatedIncident, IsCheckedAgainWhenItIsUsed) {
  ValidatedIncident incident;
  const Json* report = nullptr;
  EXPECT_EQ(incident.use(&report).message(), "incident report refused: none was validated");
  ASSERT_TRUE(ValidatedIncident::validate(good().dump(), &incident).ok());
  ASSERT_TRUE(incident.use(&report).ok());
  EXPECT_EQ((*report)["report_content_id"], incident.report_content_id());
  const_cast<Json&>(*report)["boundary"]["rank"] = 1;  // NOLINT: what a stray write would do
  EXPECT_EQ(incident.use(&report).message(),
            "incident report refused: it was changed after it was validated");
  EXPECT_EQ(report, nullptr);
}

}  // namespace
}  // namespace holdfast
