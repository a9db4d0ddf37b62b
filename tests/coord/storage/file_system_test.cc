#include "holdfast/coord/storage/file_system.h"

#include <gtest/gtest.h>

#include "coord/temp_dir.h"

namespace holdfast {
namespace {

TEST(FileSystemTest, WhatIsWrittenIsRead) {
  TempDir dir;
  FileSystem& files = real_file_system();
  std::unique_ptr<WritableFile> out;
  ASSERT_TRUE(files.create_file(dir / "a", &out).ok());
  ASSERT_TRUE(out->append("one ").ok());
  ASSERT_TRUE(out->append("two").ok());
  ASSERT_TRUE(out->sync().ok());
  ASSERT_TRUE(out->close().ok());
  std::string bytes;
  ASSERT_TRUE(read_file(files, dir / "a", 7, &bytes).ok());
  EXPECT_EQ(bytes, "one two");
}

}  // namespace
}  // namespace holdfast
