#include "holdfast/coord/storage/background_writer.h"

#include <gtest/gtest.h>

#include <vector>

namespace holdfast {
namespace {

TEST(BackgroundWriterTest, JobsRunInTheirOrder) {
  std::vector<int> ran;
  BackgroundWriter writer;
  for (int i = 0; i < 100; ++i) writer.submit([&ran, i] { ran.push_back(i); });
  writer.wait();
  std::vector<int> expected;
  for (int i = 0; i < 100; ++i) expected.push_back(i);
  EXPECT_EQ(ran, expected);
}

}  // namespace
}  // namespace holdfast
