#include "layer_log.h"

#include <gtest/gtest.h>

#include <fstream>
#include <iterator>

#include "coord/temp_dir.h"
#include "holdfast/coord/evidence/evidence.pb.h"

namespace holdfast {
namespace {

LayerAttempt at(std::uint64_t attempt) {
  LayerAttempt layers;
  layers.set_attempt(attempt);
  return layers;
}

std::string text_of(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST(LayerLog, GrowsToItsLimitAndIsClosed) {
  const TempDir temp;
  const std::string path = temp / "layers.jsonl";
  const std::string line = "{\"attempt\":1}\n";
  LayerLog log;
  ASSERT_TRUE(log.open(path, 3 * line.size() - 1).ok());
  EXPECT_TRUE(log.append(at(1)).ok());
  EXPECT_TRUE(log.append(at(1)).ok());
  const Status full = log.append(at(1));
  EXPECT_FALSE(full.ok());
  EXPECT_NE(full.message().find("as large as it may be"), std::string::npos);
  EXPECT_TRUE(log.closed());
  EXPECT_FALSE(log.append(at(1)).ok());
  EXPECT_EQ(text_of(path), line + line);
}

TEST(LayerLog, GoesOnBehindTheLastWholeLineAndCountsWhatIsThere) {
  const TempDir temp;
  const std::string path = temp / "layers.jsonl";
  const std::string line = "{\"attempt\":1}\n";
  std::ofstream(path) << line << "{\"att";
  LayerLog log;
  ASSERT_TRUE(log.open(path, 2 * line.size()).ok());
  EXPECT_TRUE(log.append(at(1)).ok());
  EXPECT_FALSE(log.append(at(1)).ok());
  EXPECT_EQ(text_of(path), line + line);
}

TEST(LayerLog, SaysThatItCannotBeOpened) {
  const TempDir temp;
  LayerLog log;
  EXPECT_FALSE(log.open(temp / "none/layers.jsonl", 100).ok());
  EXPECT_TRUE(log.closed());
}

}  // namespace
}  // namespace holdfast
