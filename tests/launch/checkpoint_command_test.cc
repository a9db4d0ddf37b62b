// `holdfast checkpoint`, as a program.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "ranks/checkpoint/sample_generation.h"

namespace holdfast {
namespace {

using Json = nlohmann::json;

class CheckpointCommand : public ::testing::Test {
 protected:
  // What `holdfast checkpoint ARGUMENTS` prints, both streams, when it ends with `code`.
  std::string run(const std::string& arguments, int code) {
    const std::string command = std::string(HOLDFAST_PROGRAM) + " checkpoint " + arguments + " 2>&1";
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

  std::string path(const GenerationId& id, const std::string& name) {
    return generation_path(checkpoints_, id) + "/" + name;
  }
  void write_both() {
    first_.write(checkpoints_);
    second_.id = {2, 900};
    second_.write(checkpoints_);
  }
  void damage(const GenerationId& id) {
    const std::string file = path(id, "rank-00001.safetensors");
    std::string bytes = read_file(file);
    bytes.back() = static_cast<char>(bytes.back() ^ 1);
    write_file(file, bytes);
  }

  TempDir temp_;
  const std::string run_dir_ = temp_.path();
  const std::string checkpoints_ = checkpoints_path(run_dir_);
  SampleGeneration first_;
  SampleGeneration second_;
};

bool holds(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST_F(CheckpointCommand, ListsGenerationsAndWhatWasSetAsideOrLeft) {
  write_both();
  std::filesystem::create_directories(checkpoints_ + "/set-aside/e0001-a0000000300");
  std::filesystem::create_directory(checkpoints_ + "/set-aside/\x1b[2J");
  std::filesystem::create_directory(checkpoints_ + "/.e0002-a0000001200.partial");
  std::filesystem::remove(path(second_.id, "rank-00000.safetensors"));
  write_file(path(first_.id, "notes"), "");
  const Json found = json("list " + run_dir_, 0);
  EXPECT_EQ(found["run_dir"], run_dir_);
  ASSERT_EQ(found["generations"].size(), 2u);
  const Json& first = found["generations"][0];
  EXPECT_EQ(first["generation"], "e0001-a0000000600");
  EXPECT_EQ(first["epoch"], 1);
  EXPECT_EQ(first["attempt"], 600);
  EXPECT_EQ(first["update"], 590);
  EXPECT_EQ(first["skips"], 10);
  EXPECT_EQ(first["ranks"], 2);
  EXPECT_EQ(first["time"], "2026-11-29T16:23:27.622Z");
  EXPECT_EQ(first["complete"], true);
  EXPECT_EQ(first["faults"], Json::array());
  EXPECT_EQ(first["strangers"], Json({"notes"}));
  EXPECT_EQ(found["generations"][1]["complete"], false);
  EXPECT_EQ(found["generations"][1]["faults"].size(), 1u);
  EXPECT_EQ(found["set_aside"], Json({"\\x1b[2J", "e0001-a0000000300"}));
  EXPECT_EQ(found["partial"], Json({".e0002-a0000001200.partial"}));
  const std::string text = run("list " + run_dir_, 0);
  for (const char* part :
       {"e0001-a0000000600 ", "  590 ", "  yes\n", "  no\n", "set aside: e0001-a0000000300\n",
        "set aside: \\x1b[2J\n", "killed: .e0002-a0000001200.partial\n", "fault: cannot open",
        "not read: notes\n"}) {
    EXPECT_TRUE(holds(text, part)) << part << " in\n" << text;
  }
}

TEST_F(CheckpointCommand, ARunWithoutCheckpointsHasNoneToList) {
  run("list " + run_dir_, 64);
  std::filesystem::create_directory(checkpoints_);
  EXPECT_EQ(run("list " + run_dir_, 0), "no generations in " + checkpoints_ + "\n");
  EXPECT_EQ(json("list " + run_dir_, 0)["generations"], Json::array());
  EXPECT_TRUE(holds(run("verify " + run_dir_, 64), "no generation in "));
  std::filesystem::remove(checkpoints_);
  write_file(temp_ / "events.jsonl", "{}\n");
  EXPECT_TRUE(holds(run("list " + run_dir_, 0), "no generations"));
}

TEST_F(CheckpointCommand, VerifiesAllGenerationsOrThoseThatAreNamed) {
  write_both();
  const std::string text = run("verify " + run_dir_, 0);
  EXPECT_TRUE(holds(text, "e0001-a0000000600: clean, ")) << text;
  EXPECT_TRUE(holds(text, "2 of 2 clean\n")) << text;
  EXPECT_EQ(json("verify " + run_dir_, 0)["clean"], true);
  damage(second_.id);
  const Json found = json("verify " + run_dir_, 1);
  EXPECT_EQ(found["clean"], false);
  ASSERT_EQ(found["generations"].size(), 2u);
  EXPECT_EQ(found["generations"][0]["clean"], true);
  EXPECT_EQ(found["generations"][0]["finite"], true);
  const Json& second = found["generations"][1];
  EXPECT_EQ(second["generation"], "e0002-a0000000900");
  EXPECT_EQ(second["clean"], false);
  EXPECT_EQ(second["complete"], true);
  EXPECT_EQ(second["whole"], false);
  EXPECT_TRUE(second["finite"].is_null());
  ASSERT_EQ(second["faults"].size(), 1u);
  EXPECT_TRUE(holds(second["faults"][0], "\"loader\" is not what was written"));
  EXPECT_TRUE(holds(run("verify " + run_dir_, 1), "NOT CLEAN: complete yes, whole no, finite not known\n"));
  EXPECT_TRUE(holds(run("verify " + run_dir_ + " e0001-a0000000600", 0), "1 of 1 clean"));
  EXPECT_TRUE(holds(run("verify " + run_dir_ + " e0001-a0000000600 e0002-a0000000900", 1), "1 of 2 clean"));
}

TEST_F(CheckpointCommand, ShowsWhatAGenerationIsMadeOf) {
  write_both();
  const Json found = json("show " + run_dir_ + " e0001-a0000000600", 0);
  EXPECT_EQ(found["update"], 590);
  EXPECT_EQ(found["version"], "0.1.0");
  ASSERT_EQ(found["tensors"].size(), 6u);
  const Json& weight = found["tensors"][0];
  EXPECT_EQ(weight["name"], "conv1.weight");
  EXPECT_EQ(weight["dtype"], "F32");
  EXPECT_EQ(weight["shape"], Json({3, 1}));
  EXPECT_EQ(weight["bytes"], 12);
  EXPECT_EQ(weight["file"], "replicated.safetensors");
  EXPECT_TRUE(weight["rank"].is_null());
  EXPECT_EQ(weight["kind"], "tensor");
  EXPECT_EQ(weight["must_be_finite"], true);
  EXPECT_EQ(found["tensors"][1]["must_be_finite"], false);
  EXPECT_EQ(found["tensors"][4]["rank"], 1);
  EXPECT_EQ(found["tensors"][4]["shard_offset"], 2);
  EXPECT_EQ(found["tensors"][4]["shard_total"], 4);
  EXPECT_EQ(found["tensors"][5]["kind"], "bytes");
  const std::string text = run("show " + run_dir_ + " e0001-a0000000600", 0);
  for (const char* part : {"590 updates, 10 skips, 2 ranks", "[3,1]", "all ranks\n",
                           "all ranks, need not be finite\n", "rank 1, elements 2-3 of 4\n"}) {
    EXPECT_TRUE(holds(text, part)) << part << " in\n" << text;
  }
  write_file(path(first_.id, "manifest.pb"), "x");
  EXPECT_TRUE(
      holds(run("show " + run_dir_ + " e0001-a0000000600", 1), "manifest.pb: the manifest is damaged"));
}

TEST_F(CheckpointCommand, RefusesWhatIsNoGeneration) {
  write_both();
  for (const char* name : {"e0001-a0000000601", "../checkpoints/e0001-a0000000600", "set-aside", "''"}) {
    EXPECT_TRUE(holds(run("verify " + run_dir_ + " " + name, 64), "there is no generation")) << name;
    run("show " + run_dir_ + " " + name, 64);
  }
  run("show " + run_dir_, 64);
  run("show " + run_dir_ + " e0001-a0000000600 e0002-a0000000900", 64);
  run("verify", 64);
  run(run_dir_, 64);
  EXPECT_TRUE(holds(run("list " + run_dir_ + "/none", 64), "there is no run in "));
  EXPECT_TRUE(holds(run("verify --help", 0), "Exit codes: 0"));
}

TEST_F(CheckpointCommand, IsCompletedByTheShell) {
  FILE* pipe = popen((std::string(HOLDFAST_PROGRAM) + " completion bash").c_str(), "r");
  std::string script(1 << 16, '\0');
  script.resize(fread(script.data(), 1, script.size(), pipe));
  EXPECT_EQ(pclose(pipe), 0);
  EXPECT_TRUE(holds(script, "\"checkpoint\"*) words=\"list verify show --help\"")) << script;
  EXPECT_TRUE(holds(script, "\"checkpoint verify\"*) words=\"--help --json\"")) << script;
}

}  // namespace
}  // namespace holdfast
