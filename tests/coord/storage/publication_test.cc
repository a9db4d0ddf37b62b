#include "holdfast/coord/storage/publication.h"

#include <gtest/gtest.h>

#include "coord/temp_dir.h"

namespace holdfast {
namespace {

TEST(PublicationTest, AFolderAppearsWithEverythingInIt) {
  TempDir dir;
  FileSystem& files = real_file_system();
  const std::string partial = partial_path(dir.path(), "first");
  EXPECT_EQ(partial, dir / ".first.partial");
  ASSERT_TRUE(begin_publication(files, dir.path(), "first").ok());
  ASSERT_TRUE(begin_publication(files, dir.path(), "first").ok()) << "another process may have made it";
  ASSERT_TRUE(write_synced(files, partial + "/a", "bytes of a").ok());
  EXPECT_FALSE(files.exists(dir / "first"));
  ASSERT_TRUE(publish(files, dir.path(), "first").ok());
  EXPECT_EQ(read_file(dir / "first/a"), "bytes of a");
  EXPECT_FALSE(files.exists(partial));
}

}  // namespace
}  // namespace holdfast
