#include "holdfast/coord/evidence/incident_report.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <limits>

#include "coord/evidence/sample_incident_manifest.h"
#include "holdfast/coord/storage/sha256.h"
#include "incident_contract.h"

namespace holdfast {
namespace {

using Json = nlohmann::ordered_json;

Json made(const BundleManifest& manifest) {
  Json report;
  const Status status = make_incident_report(manifest, kSampleContentId, &report);
  EXPECT_TRUE(status.ok()) << status.to_string();
  if (status.ok()) {
    const Status valid = validate_incident_report(report.dump());
    EXPECT_TRUE(valid.ok()) << valid.to_string();
  }
  return report;
}

std::string why_not(const BundleManifest& manifest) {
  Json report = 1;
  const Status status = make_incident_report(manifest, kSampleContentId, &report);
  EXPECT_EQ(status.code(), StatusCode::kInternal);
  EXPECT_TRUE(report.is_null());
  return status.message();
}

std::string golden(const std::string& name) {
  std::ifstream file(std::string(HOLDFAST_GOLDEN) + "/" + name, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST(IncidentContract, IdIsTheDigestOfItsRules) {
  EXPECT_EQ(incident_contract::kContractId,
            "training-incident-contract@sha256:" + hex(sha256(incident_contract::rules())));
}

TEST(IncidentReport, IsTheGoldenOneByteForByte) {
  const Json report = made(sample_incident_manifest());
  const std::string canonical = canonical_incident_report(report);
  EXPECT_EQ(report.dump(1) + "\n", golden("incident_report.json"));
  EXPECT_EQ(canonical + "\n", golden("incident_report.canonical"));
  EXPECT_EQ(hex(sha256(canonical)) + "\n", golden("incident_report.sha256"));
  EXPECT_EQ(report["report_content_id"], "training-incident-report@sha256:" + hex(sha256(canonical)));
}

TEST(IncidentReport, CanonicalFormKnowsNeitherOrderNorSpelling) {
  const Json one =
      Json::parse(R"({"b":[1,true,null],"a":{"value":65536.0,"x":"q\"\\\u0001é"},"report_content_id":"z"})");
  const Json other = Json::parse(R"( {"a": {"x":"q\"\\\u0001\u00e9", "value":65536}, "b" : [1,true,null]} )");
  EXPECT_EQ(
      canonical_incident_report(one),
      "{\"a\":{\"value\":f64:40f0000000000000,\"x\":\"q\\\"\\\\\\u0001\xc3\xa9\"},\"b\":[1,true,null]}");
  EXPECT_EQ(canonical_incident_report(one), canonical_incident_report(other));
}

TEST(IncidentReport, HasItsFieldsInTheContractsOrder) {
  std::string fields;
  const Json report = made(sample_incident_manifest());
  for (const auto& [name, value] : report.items()) fields += name + " ";
  EXPECT_EQ(fields,
            "contract_version contract_content_id run step evidence_id evidence_content_id decision "
            "earliest_nonfinite_stage action root_cause_claim boundary bindings stages report_content_id ");
  std::string stages;
  for (const Json& stage : report["stages"]) stages += stage["stage"].get<std::string>() + " ";
  EXPECT_EQ(stages, "input forward loss backward optimizer ");
}

struct StageCase {
  Stage stage;
  const char* earliest;
  const char* action;
  const char* statuses;  // O or N for each of the five
};

TEST(IncidentReport, ActionFollowsFromTheEarliestStageAndLaterOnesWereNotRun) {
  const StageCase cases[] = {
      {Stage::kInput, "input", "hold-and-inspect-input-data-contract", "ONNNN"},
      {Stage::kForward, "forward", "hold-and-replay-forward-activations", "OONNN"},
      {Stage::kLoss, "loss", "hold-and-inspect-objective-reduction", "OOONN"},
      {Stage::kBackward, "backward", "hold-and-inspect-gradient-path-and-loss-scaling", "OOOON"},
      {Stage::kReduction, "backward", "hold-and-inspect-gradient-path-and-loss-scaling", "OOOON"},
      {Stage::kOptimizer, "optimizer", "hold-and-inspect-optimizer-state-and-update", "OOOOO"}};
  for (const StageCase& c : cases) {
    BundleManifest manifest = sample_incident_manifest();
    set_origin(c.stage, {3, 0, 2}, &manifest);
    const Json report = made(manifest);
    EXPECT_EQ(report["earliest_nonfinite_stage"], c.earliest);
    EXPECT_EQ(report["action"], c.action);
    EXPECT_EQ(report["boundary"]["stage"], std::string(stage_name(c.stage)));
    std::string statuses;
    for (const Json& stage : report["stages"]) statuses += stage["status"] == "OBSERVED" ? 'O' : 'N';
    EXPECT_EQ(statuses, c.statuses) << c.earliest;
  }
}

TEST(IncidentReport, TellsTheThreeClassesApart) {
  BundleManifest manifest = sample_incident_manifest();
  set_origin(Stage::kForward, {1, 20, 300}, &manifest);
  const Json report = made(manifest);
  const Json& stage = report["stages"][1];
  EXPECT_EQ(stage["nan"], 1);
  EXPECT_EQ(stage["pos_inf"], 20);
  EXPECT_EQ(stage["neg_inf"], 300);
  EXPECT_EQ(stage["nonfinite"], 321);
  EXPECT_EQ(stage["finite"], 40960);
  EXPECT_EQ(stage["total"], 41281);
}

TEST(IncidentReport, ReductionIsReportedAsBackwardWithTheBoundaryNamed) {
  BundleManifest manifest = sample_incident_manifest();
  set_origin(Stage::kReduction, {0, 1, 0}, &manifest);
  const Json report = made(manifest);
  const Json& stage = report["stages"][3];
  EXPECT_EQ(stage["probe_source"], "local-and-reduced-gradients");
  EXPECT_EQ(stage["total"], 20538 + 5135);
  EXPECT_EQ(stage["pos_inf"], 1);
  EXPECT_EQ(stage["dtype"], "F32");  // of fp16 and fp32
  EXPECT_EQ(report["boundary"]["stage"], "reduction");
}

TEST(IncidentReport, OptimizerMakesTheNanAndBackwardIsNotBlamed) {
  BundleManifest manifest = sample_incident_manifest();
  set_origin(Stage::kOptimizer, {1, 0, 0}, &manifest);
  Json report = made(manifest);
  EXPECT_EQ(report["stages"][3]["nonfinite"], 0);
  EXPECT_EQ(report["stages"][4]["probe_source"], "prospective-update");
  manifest.set_kind("UPDATE_FAILED");
  manifest.set_action("ROLL_BACK");
  report = made(manifest);
  EXPECT_EQ(report["stages"][4]["probe_source"], "written-update");
  EXPECT_EQ(report["decision"], "HOLD");
}

TEST(IncidentReport, HoldsWhenTheRunEndedOrWentBack) {
  BundleManifest manifest = sample_incident_manifest();
  EXPECT_EQ(made(manifest)["decision"], "CONTINUE_BOUNDED_DIAGNOSTICS");
  for (const char* action : {"ABORT", "ROLL_BACK", "STOP", ""}) {
    manifest.set_action(action);
    EXPECT_EQ(made(manifest)["decision"], "HOLD") << action;
  }
  manifest.set_action("SKIP");
  manifest.set_exit_code(86);
  EXPECT_EQ(made(manifest)["decision"], "HOLD");
}

TEST(IncidentReport, OriginIsTheRankThatSawItFirst) {
  BundleManifest manifest = sample_incident_manifest();
  EvidencePart* other = manifest.add_parts();  // another rank took part, and saw nothing
  other->set_rank(0);
  add_stage({Stage::kInput, 1, 5, {}, 1, "F32", "images"}, other);
  manifest.mutable_parts()->SwapElements(0, 1);
  const Json report = made(manifest);
  EXPECT_EQ(report["boundary"]["rank"], 2);
  EXPECT_EQ(report["boundary"]["host"], "node-1");
  EXPECT_EQ(report["boundary"]["device"], "GPU-1234");
  EXPECT_EQ(report["boundary"]["tensor"], "conv1.weight");
  EXPECT_EQ(report["boundary"]["index"], 17);
  EXPECT_EQ(report["stages"][0]["total"], 25088);
}

TEST(IncidentReport, OwnersOfStagesAreThePolicys) {
  const Json report = made(sample_incident_manifest());
  EXPECT_EQ(report["stages"][0]["owner"], "ana");
  EXPECT_EQ(report["stages"][1]["owner"], "ben");
  EXPECT_EQ(report["stages"][2]["owner"], "eva");
  EXPECT_EQ(report["stages"][3]["owner"], "kim");
  BundleManifest nobody = sample_incident_manifest();
  nobody.clear_owner();
  nobody.clear_stage_owner();
  nobody.set_policy("this is no policy");
  EXPECT_EQ(made(nobody)["stages"][3]["owner"], "not recorded");
}

TEST(IncidentReport, SaysWhatTheTrainerDidNotRecord) {
  BundleManifest manifest = sample_incident_manifest();
  Json report = made(manifest);
  EXPECT_EQ(report["bindings"]["model"]["identity"], "fashion-mnist-cnn");
  EXPECT_EQ(report["bindings"]["model"]["digest"], "sha256:" + hex(sha256("fashion-mnist-cnn")));
  EXPECT_EQ(report["bindings"]["precision"], "not recorded");
  EXPECT_EQ(report["bindings"]["batch"]["identity"], "rank 2: 1 facts, 0 tensors");
  manifest.clear_configuration();
  manifest.mutable_parts(0)->clear_facts();
  report = made(manifest);
  for (const char* name : {"model", "data", "batch", "objective", "optimizer", "precision"}) {
    EXPECT_EQ(report["bindings"][name], "not recorded") << name;
  }
}

TEST(IncidentReport, BatchIsBoundToItsTensors) {
  BundleManifest manifest = sample_incident_manifest();
  EvidenceTensor* tensor = manifest.mutable_parts(0)->add_tensors();
  tensor->set_role(EvidenceTensor::BATCH);
  tensor->set_name("images");
  tensor->set_digest_high(1);
  tensor->set_digest_low(2);
  const Json before = made(manifest)["bindings"]["batch"];
  EXPECT_EQ(before["identity"], "rank 2: 1 facts, 1 tensors");
  tensor->set_digest_low(3);
  EXPECT_NE(made(manifest)["bindings"]["batch"]["digest"], before["digest"]);
}

TEST(IncidentReport, StageThatNobodyProbedBeforeTheFirstDirtyOneIsOfNothing) {
  BundleManifest manifest = sample_incident_manifest();
  manifest.mutable_parts(0)->mutable_stages()->DeleteSubrange(0, 2);
  const Json report = made(manifest);
  EXPECT_EQ(report["stages"][0]["status"], "OBSERVED");
  EXPECT_EQ(report["stages"][0]["probe_source"], "none");
  EXPECT_EQ(report["stages"][0]["total"], 0);
  EXPECT_EQ(report["stages"][0]["dtype"], nullptr);
  EXPECT_EQ(report["stages"][0]["finite_abs_max"], nullptr);
}

TEST(IncidentReport, NothingNonFiniteEvidencedIsSaid) {
  BundleManifest manifest = sample_incident_manifest();
  set_origin(Stage::kReduction, {}, &manifest);
  manifest.set_kind("REQUESTED");
  manifest.clear_origins();
  manifest.clear_stage();
  const Json report = made(manifest);
  EXPECT_EQ(report["earliest_nonfinite_stage"], "none");
  EXPECT_EQ(report["action"], "no-nonfinite-evidenced-check-other-signals");
  EXPECT_EQ(report["boundary"], nullptr);
  EXPECT_EQ(report["stages"][4]["status"], "OBSERVED");
}

TEST(IncidentReport, NamesAreCappedAndHostileOnesAreHarmless) {
  BundleManifest manifest = sample_incident_manifest();
  StageTotal* stage = manifest.mutable_parts(0)->mutable_stages(1);
  stage->clear_names();
  stage->set_tensors(1000);
  for (int i = 0; i < 1000; ++i) stage->add_names("layer" + std::to_string(i) + std::string(5000, 'x'));
  manifest.mutable_origins(0)->set_tensor("../../x\x1b[2J\n\xff|`<script>");
  manifest.mutable_origins(0)->set_host(std::string(100000, '\xe9'));
  const Json report = made(manifest);
  EXPECT_EQ(report["stages"][1]["tensor_set"]["names"].size(), 16u);
  EXPECT_EQ(report["stages"][1]["tensor_set"]["observations"], 1000);
  EXPECT_EQ(report["stages"][1]["tensor_set"]["names"][0].get<std::string>().size(), 256u);
  EXPECT_EQ(report["boundary"]["tensor"], "../../x\\x1b[2J\\x0a\\xff|`<script>");
}

TEST(IncidentReport, WhatIsOutsideOfTheContractHasNone) {
  BundleManifest manifest = sample_incident_manifest();
  manifest.set_kind("DIVERGED");
  EXPECT_EQ(why_not(manifest),
            "no incident report: DIVERGED without a non-finite value is outside of training-incident-v1");
  manifest.set_kind("ERROR");
  EXPECT_EQ(made(manifest)["earliest_nonfinite_stage"], "backward");  // an exception, and non-finite values
  manifest.clear_nan();
  manifest.clear_pos_inf();
  EXPECT_EQ(why_not(manifest),
            "no incident report: ERROR without a non-finite value is outside of training-incident-v1");
}

struct LackCase {
  void (*change)(BundleManifest*);
  const char* why;
};

TEST(IncidentReport, ManifestThatDoesNotHoldWhatTheContractAsksForIsRefusedByName) {
  const LackCase cases[] = {
      {[](BundleManifest* m) { m->clear_run(); }, "the run has no id that can be shown"},
      {[](BundleManifest* m) { m->set_run("a\nb"); }, "the run has no id that can be shown"},
      {[](BundleManifest* m) { m->clear_parts(); }, "no origin sent what it measured"},
      {[](BundleManifest* m) { m->clear_stage(); }, "non-finite values of no stage"},
      {[](BundleManifest* m) { m->set_stage(0); },
       "earliest_nonfinite_stage is not \"backward\", which the counts say"},
      {[](BundleManifest* m) { m->mutable_parts(0)->mutable_stages(3)->set_elements(1); },
       "rank 2 counts more non-finite values than values at backward"},
      {[](BundleManifest* m) { m->mutable_parts(0)->mutable_stages(3)->set_nan(~std::uint64_t{0}); },
       "rank 2 counts more non-finite values than values at backward"},
      {[](BundleManifest* m) { m->mutable_parts(0)->mutable_stages(1)->set_elements(~std::uint64_t{0}); },
       "stages[1].total is above 2^53"},
      {[](BundleManifest* m) { m->mutable_parts(0)->mutable_stages(1)->clear_dtype(); },
       "stages[1].dtype is null without tensor_set.observations being 0, or the reverse"},
      {[](BundleManifest* m) {
         m->mutable_parts(0)->mutable_stages(1)->set_abs_max(std::numeric_limits<double>::infinity());
       },
       "stages[1].finite_abs_max is above the largest value of dtype"},
      {[](BundleManifest* m) { m->set_loss_scale(3); },
       "bindings.loss_scale.value is no finite power of two"},
      {[](BundleManifest* m) { m->set_loss_scale(std::nan("")); },
       "bindings.loss_scale.value is no finite power of two"},
      {[](BundleManifest* m) {
         m->mutable_origins(0)->set_rank(-1);
         m->mutable_parts(0)->set_rank(-1);
       },
       "boundary.rank is above 2^53"},
      {[](BundleManifest* m) { m->mutable_origins(0)->set_stage(77); }, "boundary.stage is empty"},
  };
  for (const LackCase& c : cases) {
    BundleManifest manifest = sample_incident_manifest();
    c.change(&manifest);
    EXPECT_EQ(why_not(manifest), std::string("no incident report: ") + c.why);
  }
}

TEST(IncidentReport, EvidenceThatHasNoContentIdIsRefused) {
  Json report;
  EXPECT_EQ(make_incident_report(sample_incident_manifest(), "sha256:aa", &report).message(),
            "no incident report: evidence_content_id is not \"training-incident-evidence@sha256:\" and 64 "
            "hexadecimal digits");
}

}  // namespace
}  // namespace holdfast
