#include <gtest/gtest.h>

#include <cmath>

#include "coord/evidence/sample_incident_manifest.h"
#include "holdfast/coord/evidence/incident_report.h"
#include "markdown_text.h"

namespace holdfast {
namespace {

const std::string kPath = "runs/long/incidents/e0001-a0000001842";

std::string markdown(const BundleManifest& manifest, const std::string& path = kPath) {
  return incident_report_markdown(manifest, kSampleContentId, path);
}

bool holds(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t found = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

TEST(IncidentMarkdown, SaysWhatHappenedWhereWhatWasDoneAndByWhom) {
  const std::string text = markdown(sample_incident_manifest());
  for (const char* part :
       {"# Incident e0001-a0000001842 of run `run-5f3a`\n",
        "**2 non-finite values** (1 NaN, 1 +Inf, 0 -Inf) at stage `backward`, first seen on rank 2 (host "
        "`node-1`, "
        "device `GPU-1234`), in tensor `conv1.weight` at flat index 17. All ranks skipped the attempt",
        "**Boundary** on rank 2: last clean `conv2.weight` → first dirty `conv1.weight`.",
        "| epoch, attempt, update | 1, 1842, 1840 |", "| loss of the first origin | 0.46875 |",
        "- owner of the run: `ana`\n- owner of stage `backward`: `kim`\n- ticket: `RUN-142`\n",
        "proves no cause", "- precision: not recorded by the trainer\n",
        "holdfast incident verify runs/long/incidents/e0001-a0000001842 ",
        "guarded_train --replay runs/long/incidents/e0001-a0000001842  ",
        "guarded_train --replay runs/long/incidents/e0001-a0000001842 --shrink ",
        "guarded_train --replay runs/long/incidents/e0001-a0000001842 --one-factor ",
        "report.json, by the contract training-incident-v1: `CONTINUE_BOUNDED_DIAGNOSTICS`, "
        "`hold-and-inspect-gradient-path-and-loss-scaling`."}) {
    EXPECT_TRUE(holds(text, part)) << part << "\n" << text;
  }
  EXPECT_FALSE(holds(text, "holdfast ack"));
}

TEST(IncidentMarkdown, NamesTheCommandThatAHeldRunNeeds) {
  BundleManifest manifest = sample_incident_manifest();
  manifest.set_action("ABORT");
  for (const int code : {81, 82, 83, 85}) {
    manifest.set_exit_code(code);
    EXPECT_TRUE(holds(markdown(manifest), "holdfast ack runs/long --owner WHO --note WHY")) << code;
  }
  EXPECT_TRUE(holds(markdown(manifest), "exit code 85 (NO_CLEAN_GENERATION)"));
  manifest.set_exit_code(80);
  EXPECT_FALSE(holds(markdown(manifest), "holdfast ack"));
}

TEST(IncidentMarkdown, ShowsAtMostTwentyLayersAroundTheBoundary) {
  BundleManifest manifest = sample_incident_manifest();
  for (int i = 0; i < 100; ++i) {
    TensorProbe* probe = manifest.mutable_parts(0)->add_layers();
    probe->set_tensor("layer" + std::to_string(i));
    probe->set_stage(static_cast<int>(Stage::kBackward));
    probe->set_elements(64);
    probe->set_nan(i >= 60 ? 1 : 0);
    if (i >= 60) probe->set_first_bad(5);
    probe->set_abs_max(1.5);
    probe->set_dtype("F32");
  }
  const std::string text = markdown(manifest);
  EXPECT_TRUE(holds(text, "rows 51 to 70 of 100"));
  EXPECT_EQ(count(text, "| `layer"), 20u);
  EXPECT_TRUE(holds(text, "| `layer59` | `backward` | all | 64 | 0 NaN, 0 +Inf, 0 -Inf | - | 1.5 |"));
  EXPECT_TRUE(holds(text, "| `layer60` | `backward` | all | 64 | 1 NaN, 0 +Inf, 0 -Inf | 5 | 1.5 |"));
}

TEST(IncidentMarkdown, TellsThreeClassesOfLossApart) {
  BundleManifest manifest = sample_incident_manifest();
  manifest.set_loss(std::nan(""));
  EXPECT_TRUE(holds(markdown(manifest), "| loss of the first origin | NaN |"));
  manifest.set_loss(HUGE_VAL);
  EXPECT_TRUE(holds(markdown(manifest), "| loss of the first origin | +Inf |"));
  manifest.set_loss(-HUGE_VAL);
  EXPECT_TRUE(holds(markdown(manifest), "| loss of the first origin | -Inf |"));
}

TEST(IncidentMarkdown, IncidentsOutsideOfTheContractHaveOneToo) {
  BundleManifest manifest;
  EXPECT_TRUE(holds(markdown(manifest),
                    "There is no report.json: `no incident report: an incident without a non-finite value is "
                    "outside of training-incident-v1`."));
  manifest.set_kind("ERROR");
  manifest.set_error("index out of range");
  manifest.set_action("ABORT");
  manifest.set_exit_code(80);
  EXPECT_TRUE(
      holds(markdown(manifest), "**An exception**, without a non-finite value: `index out of range`"));
  manifest.set_kind("DIVERGED");
  manifest.set_reason("replicas differ: rank 1");
  EXPECT_TRUE(holds(markdown(manifest), "**The replicas differ**: `replicas differ: rank 1`"));
}

TEST(IncidentMarkdown, SaysWhatWasLeftOutAndWhatFailed) {
  BundleManifest manifest = sample_incident_manifest();
  manifest.set_compact(true);
  EvidencePart* part = manifest.mutable_parts(0);
  part->set_rerun_agrees(false);
  part->set_failure("the provider threw");
  Omitted* omitted = part->add_omitted();
  omitted->set_what("images");
  omitted->set_bytes(77);
  omitted->set_why("quota");
  const std::string text = markdown(manifest);
  EXPECT_TRUE(holds(text, "rank 2 left out `images` (77 bytes): `quota`"));
  EXPECT_TRUE(holds(text, "rank 2 failed to tell: `the provider threw`"));
  EXPECT_TRUE(holds(text, "did not find the same"));
  EXPECT_TRUE(holds(text, "this bundle is compact"));
}

CrossExamination* examined(CrossExamination::Outcome outcome, BundleManifest* manifest) {
  CrossExamination* of = manifest->mutable_cross_examination();
  of->set_outcome(outcome);
  of->set_origin(2);
  of->set_origin_host("node-1");
  of->set_origin_device("GPU-1234");
  of->set_examiner(5);
  of->set_examiner_host("node-2");
  of->set_examiner_device("GPU-5678");
  of->set_where(CrossExamination::OTHER_HOST);
  return of;
}

TEST(IncidentMarkdown, SaysWhatAnotherDeviceFound) {
  BundleManifest manifest = sample_incident_manifest();
  EXPECT_FALSE(holds(markdown(manifest), "On another device"));
  const std::pair<CrossExamination::Outcome, const char*> wanted[] = {
      {CrossExamination::DATA_OR_MODEL, "`DATA_OR_MODEL`"},
      {CrossExamination::DATA_OR_MODEL,
       "Both found the same value again at the same place: the data or the model"},
      {CrossExamination::SUSPECT_DEVICE, "Only rank 2 found it again: the device of rank 2 is suspect."},
      {CrossExamination::TRANSIENT, "Neither found it again: it was transient"},
      {CrossExamination::INCONCLUSIVE, "Only rank 5 found it, and not the rank that had it"},
  };
  for (const auto& [outcome, words] : wanted) {
    examined(outcome, &manifest);
    const std::string text = markdown(manifest);
    EXPECT_TRUE(holds(text, words)) << text;
    EXPECT_TRUE(
        holds(text,
              "the attempt of rank 2 (host `node-1`, device `GPU-1234`) was made again by itself and, "
              "from the same batch and random numbers, by rank 5 (host `node-2`, device `GPU-5678`), on "
              "another host."))
        << text;
    EXPECT_TRUE(holds(text, "This is evidence, and no proof of a cause.")) << text;
  }
  examined(CrossExamination::NOT_EXAMINED, &manifest)->set_why("it has no GPU");
  const std::string text = markdown(manifest);
  EXPECT_TRUE(
      holds(text,
            "`NOT_EXAMINED`: no other rank could tell whether the attempt of rank 2 fails there, too: "
            "`it has no GPU`."))
      << text;
}

// A name anywhere, and it must neither end a table's cell, a code span or a line, nor reach a terminal or a
// browser.
TEST(IncidentMarkdown, HostileNamesActOnNothing) {
  const std::string hostile =
      "../../x\x1b[2J\n# x\r\n|`</code><script>alert(1)</script>&amp;\xff\xe2\x80\xae" +
      std::string(5000, 'y');
  BundleManifest manifest = sample_incident_manifest();
  const std::string clean = markdown(manifest);
  for (std::string* field :
       {manifest.mutable_time(), manifest.mutable_run(), manifest.mutable_kind(), manifest.mutable_action(),
        manifest.mutable_reason(), manifest.mutable_owner(), manifest.mutable_ticket(),
        manifest.mutable_stage_owner(), manifest.mutable_generation(), manifest.mutable_error(),
        manifest.add_injected()}) {
    *field = hostile;
  }
  for (Named& named : *manifest.mutable_configuration()) {
    named.set_name(hostile);
    named.set_value(hostile);
  }
  IncidentOrigin* origin = manifest.mutable_origins(0);
  for (std::string* field : {origin->mutable_host(), origin->mutable_device(), origin->mutable_tensor()})
    *field = hostile;
  EvidencePart* part = manifest.mutable_parts(0);
  for (std::string* field :
       {part->mutable_last_clean(), part->mutable_first_dirty(), part->mutable_failure(),
        part->add_layers()->mutable_tensor(), part->mutable_stages(0)->mutable_dtype()}) {
    *field = hostile;
  }
  part->mutable_layers(0)->set_dtype(hostile);
  CrossExamination* of = examined(CrossExamination::SUSPECT_DEVICE, &manifest);
  for (std::string* field : {of->mutable_origin_host(), of->mutable_origin_device(),
                             of->mutable_examiner_host(), of->mutable_examiner_device()})
    *field = hostile;
  const std::string text = markdown(manifest, "runs/" + hostile);
  EXPECT_FALSE(holds(text, "<"));
  EXPECT_FALSE(holds(text, "&"));
  EXPECT_FALSE(holds(text, "\n# x"));
  EXPECT_EQ(count(text, "\n# "), 0u);
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    EXPECT_TRUE(byte == '\n' || byte >= 0x20) << static_cast<int>(byte);
    EXPECT_NE(byte, 0xff);
  }
  EXPECT_FALSE(holds(text, "\xe2\x80\xae"));
  EXPECT_EQ(count(text, "`") % 2, 0u);
  EXPECT_LT(text.size(), clean.size() + 50000);
  EXPECT_TRUE(holds(text, "holdfast incident verify PATH "));
}

TEST(MarkdownText, CodeSpanShowsWhatCouldAct) {
  EXPECT_EQ(code_span(""), "(none)");
  EXPECT_EQ(code_span("conv1.weight"), "`conv1.weight`");
  EXPECT_EQ(code_span("a`b|c<d>&"), "`a\\x60b\\x7cc\\x3cd\\x3e\\x26`");
  EXPECT_EQ(code_span("\x1b[2J\n"), "`\\x1b[2J\\x0a`");
  EXPECT_EQ(code_span(" a "), "`\\x20a\\x20`");
  EXPECT_EQ(code_span(" "), "`\\x20`");
  EXPECT_EQ(code_span("\xff\xfe"), "`\\xff\\xfe`");
  EXPECT_EQ(code_span("gr\xc3\xbc\xc3\x9f"), "`gr\xc3\xbc\xc3\x9f`");
  EXPECT_EQ(code_span("a\xe2\x80\xae"
                      "b"),
            "`a\\xe2\\x80\\xaeb`");
  EXPECT_EQ(code_span("a\xc2\x9b"
                      "b"),
            "`a\\x9bb`");
  EXPECT_EQ(code_span(std::string(300, 'x'), 10), "`xxxxxxxxxx` (cut, 300 bytes)");
  EXPECT_EQ(code_span("aaaaaaaaa\xc3\xbcz", 10), "`aaaaaaaaa` (cut, 12 bytes)");
}

TEST(MarkdownText, PathsAreOneWordOfAShell) {
  const auto word = [](const std::string& path) {
    std::string quoted;
    return shell_word(path, &quoted) ? quoted : "refused";
  };
  EXPECT_EQ(word("runs/a-1/x_y"), "runs/a-1/x_y");
  EXPECT_EQ(word("my runs/$(x)"), "'my runs/$(x)'");
  EXPECT_EQ(word("it's"), "'it'\\''s'");
  EXPECT_EQ(word("-rf"), "./-rf");
  EXPECT_EQ(word("a\nb"), "refused");
  EXPECT_EQ(word("a`b"), "refused");
  EXPECT_EQ(word(""), "refused");
}

}  // namespace
}  // namespace holdfast
