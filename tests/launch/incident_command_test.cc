// `holdfast incident`, as a program.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "coord/evidence/sample_bundle.h"

namespace holdfast {
namespace {

using Json = nlohmann::json;

const std::string kName = "e0001-a0000001842";

bool holds(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

class IncidentCommand : public ::testing::Test {
 protected:
  // What `holdfast incident ARGUMENTS` prints, both streams, when it ends with `code`.
  std::string run(const std::string& arguments, int code) {
    const std::string command = std::string(HOLDFAST_PROGRAM) + " incident " + arguments + " 2>&1";
    FILE* pipe = popen(command.c_str(), "r");
    std::string output;
    char part[4096];
    while (const std::size_t n = fread(part, 1, sizeof part, pipe)) output.append(part, n);
    const int status = pclose(pipe);
    EXPECT_TRUE(WIFEXITED(status));
    EXPECT_EQ(WEXITSTATUS(status), code) << command << "\n" << output;
    return output;
  }
  Json json(const std::string& arguments, int code) { return Json::parse(run(arguments + " --json", code)); }

  void write_two() {
    BundleManifest hostile = sample_about(1843);
    for (IncidentOrigin& origin : *hostile.mutable_origins()) origin.set_tensor("\x1b[2J../../x");
    hostile.set_reason("\x1b[2J");
    hostile.set_kind("\x1b[2J");
    EvidencePart part = sample_part(7);
    part.set_first_dirty("\x1b[2J");
    part.mutable_tensors(0)->set_name("\x1b[2J");
    auto store = open_store(incidents_);
    first_ = submit_and_wait(*store, sample_about(), sample_parts());
    EXPECT_TRUE(submit_and_wait(*store, hostile, {part}).published);
  }
  void damage() {
    const std::string file = bundle_ + "/rank-00007.safetensors";
    std::string bytes = read_file(file);
    bytes.back() = static_cast<char>(bytes.back() ^ 1);
    write_file(file, bytes);
  }

  TempDir temp_;
  const std::string run_dir_ = temp_.path();
  const std::string incidents_ = incidents_path(run_dir_);
  const std::string bundle_ = incidents_ + "/" + kName;
  BundleOutcome first_;
};

TEST_F(IncidentCommand, ListsIncidents) {
  write_two();
  std::filesystem::create_directory(incidents_ + "/e0002-a0000000001");
  const Json found = json("list " + run_dir_, 0);
  ASSERT_EQ(found["incidents"].size(), 3u);
  const Json& first = found["incidents"][0];
  EXPECT_EQ(first["incident"], kName);
  EXPECT_EQ(first["readable"], true);
  EXPECT_EQ(first["time"], "2026-11-29T16:23:27.622Z");
  EXPECT_EQ(first["stage"], "forward");
  EXPECT_EQ(first["action"], "SKIP");
  EXPECT_EQ(first["compact"], false);
  EXPECT_EQ(first["content_id"], first_.content_id);
  EXPECT_EQ(first["origins"][1], Json({{"rank", 7}, {"host", "node-3"}, {"tensor", "fc"}, {"index", 1}}));
  EXPECT_EQ(found["incidents"][2]["readable"], false);
  const std::string text = run("list " + run_dir_, 0);
  EXPECT_TRUE(holds(text, "rank 2 in fc[1], and 1 more")) << text;
  EXPECT_TRUE(holds(text, "\\x1b[2J../../x")) << text;
  EXPECT_TRUE(holds(text, "e0002-a0000000001    cannot be read: ")) << text;
  EXPECT_FALSE(holds(text, "\x1b"));
}

TEST_F(IncidentCommand, ShowsABundleWithNamesEscaped) {
  write_two();
  const Json found = json("show " + bundle_, 0);
  EXPECT_EQ(found["content_id"], first_.content_id);
  EXPECT_EQ(found["parts"][1]["rank"], 7);
  const std::string text = run("show " + bundle_, 0);
  EXPECT_TRUE(holds(text, "NON_FINITE at forward: 2 NaN, 2 +Inf, 0 -Inf; loss 0.5\n")) << text;
  EXPECT_TRUE(holds(text, "origin: rank 7 (node-3) in fc[1]\n")) << text;
  EXPECT_TRUE(holds(text, "BATCH  input")) << text;
  const std::string hostile = run("show " + incidents_ + "/e0001-a0000001843", 0);
  EXPECT_TRUE(holds(hostile, "\\x1b[2J")) << hostile;
  EXPECT_FALSE(holds(hostile, "\x1b"));
}

TEST_F(IncidentCommand, ShowsWhatAnotherDeviceFound) {
  BundleManifest about = sample_about();
  CrossExamination* of = about.mutable_cross_examination();
  of->set_outcome(CrossExamination::SUSPECT_DEVICE);
  of->set_origin(7);
  of->set_origin_device("node-3/\x1b[2J");
  of->set_origin_found(true);
  of->set_examiner(1);
  of->set_examiner_device("node-0/GPU-1");
  of->set_examiner_found(false);
  of->set_where(CrossExamination::OTHER_HOST);
  auto store = open_store(incidents_);
  EXPECT_TRUE(submit_and_wait(*store, about, sample_parts()).published);
  EXPECT_EQ(json("show " + bundle_, 0)["cross_examination"]["outcome"], "SUSPECT_DEVICE");
  EXPECT_TRUE(holds(run("show " + bundle_, 0),
                    "cross-examination: SUSPECT_DEVICE\n"
                    "  origin: rank 7 (node-3/\\x1b[2J): found\n"
                    "  examiner: rank 1 (node-0/GPU-1), OTHER_HOST: not found\n"))
      << run("show " + bundle_, 0);
}

TEST_F(IncidentCommand, VerifiesOneBundleOrAllOfARun) {
  write_two();
  EXPECT_EQ(json("verify " + run_dir_, 0)["clean"], true);
  EXPECT_TRUE(holds(run("verify " + run_dir_, 0), "2 of 2 clean\n"));
  damage();
  const Json found = json("verify " + run_dir_, 1);
  EXPECT_EQ(found["clean"], false);
  EXPECT_EQ(found["bundles"][0]["clean"], false);
  EXPECT_EQ(found["bundles"][0]["faults"].size(), 1u);
  EXPECT_EQ(found["bundles"][1]["clean"], true);
  const std::string text = run("verify " + bundle_, 1);
  EXPECT_TRUE(holds(text, kName + ": NOT CLEAN\n  fault: ")) << text;
  EXPECT_TRUE(holds(text, "\"targets\" is not what was written\n0 of 1 clean\n")) << text;
  run("verify " + incidents_ + "/e0001-a0000001843/", 0);
  EXPECT_TRUE(holds(run("show " + bundle_, 0), "BATCH  input"));  // what it says is whole still
}

TEST_F(IncidentCommand, ABundleThatCannotBeReadIsNotCleanAndNotShown) {
  write_two();
  write_file(bundle_ + "/manifest.pb", "");
  EXPECT_TRUE(holds(run("verify " + bundle_, 1), "the manifest is damaged: it is none"));
  EXPECT_TRUE(holds(run("show " + bundle_, 1), "the manifest is damaged: it is none"));
  std::filesystem::remove(bundle_ + "/manifest.pb");
  EXPECT_TRUE(holds(run("verify " + bundle_, 1), "No such file"));
}

TEST_F(IncidentCommand, ARunWithoutIncidentsIsFineAndNoRunIsUsage) {
  write_file(temp_ / "events.jsonl", "{}\n");
  EXPECT_EQ(run("list " + run_dir_, 0), "no incidents in " + incidents_ + "\n");
  EXPECT_EQ(json("list " + run_dir_, 0)["incidents"], Json::array());
  EXPECT_EQ(run("verify " + run_dir_, 0), "0 of 0 clean\n");
  EXPECT_TRUE(holds(run("list " + run_dir_ + "/none", 64), "there is no run in"));
  EXPECT_TRUE(holds(run("verify " + run_dir_ + "/none", 64), "there is no run in"));
  EXPECT_TRUE(holds(run("show " + run_dir_, 64), "there is no bundle in"));
}

TEST_F(IncidentCommand, ValidatesTheReportOfABundle) {
  write_two();
  run("validate " + bundle_ + "/report.json", 0);
  run("validate " + bundle_ + "/manifest.json", 1);
}

}  // namespace
}  // namespace holdfast
