#include "train/text_dataset.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <string_view>

namespace holdfast::train {
namespace {

namespace fs = std::filesystem;
using namespace std::string_literals;
using Row = std::vector<std::int64_t>;

constexpr std::int64_t kNo = kNoTarget;

std::string text(std::span<const std::uint8_t> bytes) { return {bytes.begin(), bytes.end()}; }

class LoadText : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "holdfast_text_XXXXXX").string();
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    dir_ = name;
  }
  void TearDown() override { fs::remove_all(dir_); }

  std::string write(const std::string& name, std::string_view bytes) const {
    const std::string path = dir_ + "/" + name;
    std::ofstream file(path, std::ios::binary | std::ios::trunc);
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    EXPECT_TRUE(file.good());
    return path;
  }

  static TextDataset loaded(const std::vector<std::string>& paths, std::int64_t context) {
    TextDataset dataset;
    const Status status = load_text(paths, context, &dataset);
    EXPECT_TRUE(status.ok()) << status.to_string();
    return dataset;
  }

  // The message; the refusal must be USAGE and leave the result alone.
  static std::string refusal(const std::vector<std::string>& paths, std::int64_t context = 4) {
    TextDataset dataset;
    dataset.context = 77;
    const Status status = load_text(paths, context, &dataset);
    EXPECT_EQ(status.code(), StatusCode::kUsage) << status.message();
    EXPECT_EQ(dataset.context, 77);
    EXPECT_TRUE(dataset.bytes.empty());
    return status.message();
  }

  std::string dir_;
};

TEST_F(LoadText, CutsADocumentIntoWindowsThatDoNotOverlap) {
  const TextDataset dataset = loaded({write("a", "abcdefghij")}, 4);
  ASSERT_EQ(dataset.windows, 3);
  EXPECT_EQ(text(dataset.window(0).inputs), "abcd");
  EXPECT_EQ(text(dataset.window(0).targets), "bcde");
  EXPECT_EQ(text(dataset.window(1).inputs), "efgh");
  EXPECT_EQ(text(dataset.window(1).targets), "fghi");
  EXPECT_EQ(text(dataset.window(2).inputs), "i");
  EXPECT_EQ(text(dataset.window(2).targets), "j");
}

TEST_F(LoadText, PredictsEachByteButADocumentsFirstOnce) {
  for (std::size_t length = 2; length <= 20; ++length) {
    std::string first(length, ' ');
    for (std::size_t i = 0; i < length; ++i) first[i] = static_cast<char>('!' + i);
    const std::vector<std::string> paths = {write("a", first), write("b", "xyz")};
    for (std::int64_t context = 1; context <= 9; ++context) {
      const TextDataset dataset = loaded(paths, context);
      std::string targets;
      for (std::int64_t w = 0; w < dataset.windows; ++w) {
        const TextWindow window = dataset.window(w);
        EXPECT_EQ(window.inputs.size(), window.targets.size());
        EXPECT_GE(window.inputs.size(), 1u);
        EXPECT_LE(window.inputs.size(), static_cast<std::size_t>(context));
        targets += text(window.targets);
      }
      EXPECT_EQ(targets, first.substr(1) + "yz") << "context " << context;
    }
  }
}

TEST_F(LoadText, PadsAShortWindowWithoutTargets) {
  const TextDataset dataset = loaded({write("a", "abcdefg")}, 4);
  Row tokens(4, -1);
  Row targets(4, -1);
  dataset.window(0).copy_to(tokens, targets);
  EXPECT_EQ(tokens, (Row{'a', 'b', 'c', 'd'}));
  EXPECT_EQ(targets, (Row{'b', 'c', 'd', 'e'}));
  dataset.window(1).copy_to(tokens, targets);
  EXPECT_EQ(tokens, (Row{'e', 'f', 0, 0}));
  EXPECT_EQ(targets, (Row{'f', 'g', kNo, kNo}));
}

TEST_F(LoadText, TakesBytesAbove127AsTheyAre) {
  const TextDataset dataset = loaded({write("a", "\xc3\xa9!")}, 2);
  Row tokens(2);
  Row targets(2);
  dataset.window(0).copy_to(tokens, targets);
  EXPECT_EQ(tokens, (Row{0xc3, 0xa9}));
  EXPECT_EQ(targets, (Row{0xa9, '!'}));
}

TEST_F(LoadText, NoWindowReachesFromOneDocumentIntoTheNext) {
  const TextDataset dataset = loaded({write("b", "12345"), write("a", "xy"), write("c", "67890!")}, 4);
  std::vector<std::string> inputs;
  for (std::int64_t w = 0; w < dataset.windows; ++w) inputs.push_back(text(dataset.window(w).inputs));
  EXPECT_EQ(inputs, (std::vector<std::string>{"1234", "x", "6789", "0"}));
}

TEST_F(LoadText, HoldsOutEveryTenthWindow) {
  std::string bytes;
  for (int i = 0; i < 24; ++i) bytes += static_cast<char>('A' + i);
  const TextDataset dataset = loaded({write("a", bytes)}, 1);  // 23 windows: A to W
  ASSERT_EQ(dataset.windows, 23);
  ASSERT_EQ(dataset.held_out_windows(), 2);
  ASSERT_EQ(dataset.training_windows(), 21);
  std::string held_out;
  for (std::int64_t i = 0; i < 2; ++i) held_out += text(dataset.held_out_window(i).inputs);
  EXPECT_EQ(held_out, "JT");
  std::string training;
  for (std::int64_t i = 0; i < 21; ++i) training += text(dataset.training_window(i).inputs);
  EXPECT_EQ(training, "ABCDEFGHIKLMNOPQRSUVW");
}

TEST_F(LoadText, TakesTheFilesOfAFolderInTheOrderOfTheirNames) {
  for (const std::string name : {"b", "B", "a10", "a9"}) write(name, name + "|");
  fs::create_directory(dir_ + "/a5");
  write("a5/not-looked-into", "");
  EXPECT_EQ(text(loaded({dir_}, 4).bytes), "B|a10|a9|b|");
}

TEST_F(LoadText, FollowsSymbolicLinksAndTakesAFileOnce) {
  const std::string original = write("original", "once");
  fs::create_symlink("original", dir_ + "/alias");
  EXPECT_EQ(text(loaded({dir_ + "/alias"}, 4).bytes), "once");
  EXPECT_EQ(loaded({original, dir_, dir_ + "/alias"}, 4).documents.size(), 1u);
}

TEST_F(LoadText, ReadsMoreThanOneBufferful) {
  std::string bytes;
  for (int i = 0; bytes.size() < (std::size_t{1} << 20); ++i)
    bytes += std::to_string(i) + " \u00e9\U0001f600\n";
  const TextDataset dataset = loaded({write("a", "ab"), write("large", bytes)}, 64);
  EXPECT_TRUE(text(dataset.bytes) == "ab" + bytes);
}

TEST_F(LoadText, RefusesToDoWithoutText) {
  EXPECT_EQ(refusal({}), "no text files were named");
  EXPECT_EQ(refusal({dir_}), dir_ + ": a folder without files");
  EXPECT_EQ(refusal({dir_ + "/none"}), dir_ + "/none: No such file or directory");
}

TEST_F(LoadText, RefusesAContextBelowOne) {
  const std::string path = write("a", "abc");
  EXPECT_EQ(refusal({path}, 0), "context: 0, must be at least 1");
  EXPECT_EQ(refusal({path}, -3), "context: -3, must be at least 1");
}

TEST_F(LoadText, RefusesWhatIsNotARegularFile) {
  const std::string fifo = dir_ + "/fifo";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);  // opening it would wait for a writer
  EXPECT_EQ(refusal({fifo}), fifo + ": not a regular file");
  EXPECT_EQ(refusal({dir_}), fifo + ": not a regular file");
  EXPECT_EQ(refusal({"/dev/zero"}), "/dev/zero: not a regular file");
}

TEST_F(LoadText, RefusesALinkToNothing) {
  fs::create_symlink("none", dir_ + "/link");
  EXPECT_EQ(refusal({dir_}), dir_ + "/link: No such file or directory");
}

TEST_F(LoadText, RefusesAFileThatItMayNotRead) {
  const std::string path = write("a", "abc");
  fs::permissions(dir_, fs::perms::owner_all | fs::perms::others_read | fs::perms::others_exec);
  fs::permissions(path, fs::perms::none);
  const bool root = ::geteuid() == 0;  // may read every file, so the test becomes someone else
  if (root && ::seteuid(65534) != 0) GTEST_SKIP() << "cannot drop root's right to read every file";
  const std::string message = refusal({path});
  ASSERT_TRUE(!root || ::seteuid(0) == 0);
  EXPECT_EQ(message, path + ": Permission denied");
}

TEST_F(LoadText, RefusesDocumentsWithNothingToPredict) {
  const std::string good = write("good", "abc");
  const std::string empty = write("empty", "");
  const std::string single = write("single", "a");
  EXPECT_EQ(refusal({good, empty}), empty + ": empty document");
  EXPECT_EQ(refusal({good, single}), single + ": document of a single byte; a byte to predict takes two");
}

TEST_F(LoadText, RefusesNul) {
  const std::string path = write("a", "abc\0def"s);
  EXPECT_EQ(refusal({path}), path + ": NUL at byte 3: not a text");
}

TEST_F(LoadText, RefusesWhatIsNotUtf8) {
  const std::initializer_list<std::pair<std::string, std::string>> cases = {
      {"\x80", "0x80"},              // a continuation byte alone
      {"\xbf", "0xbf"},              //
      {"\xc0\xaf", "0xc0"},          // overlong
      {"\xc1\xbf", "0xc1"},          //
      {"\xe0\x9f\xbf", "0xe0"},      //
      {"\xf0\x8f\xbf\xbf", "0xf0"},  //
      {"\xed\xa0\x80", "0xed"},      // surrogates
      {"\xed\xbf\xbf", "0xed"},      //
      {"\xf4\x90\x80\x80", "0xf4"},  // above U+10FFFF
      {"\xf5\x80\x80\x80", "0xf5"},  //
      {"\xff", "0xff"},              //
      {"\xc3(", "0xc3"},             // cut short, with something behind
      {"\xe2\x82(", "0xe2"},         //
      {"\xf0\x9f\x98(", "0xf0"},     //
      {"\xe2(\xac", "0xe2"},         //
      {"\xf0\x9f(\x80", "0xf0"}};    //
  for (const auto& [bytes, lead] : cases) {
    const std::string path = write("a", "ab\u00e9" + bytes + "cd");
    EXPECT_EQ(refusal({path}), path + ": not valid UTF-8 at byte 4 (" + lead + ")");
  }
}

TEST_F(LoadText, RefusesASequenceThatTheEndOfTheFileCutsShort) {
  for (const std::string whole : {"\u00e9", "\u20ac", "\U0001f600"}) {
    for (std::size_t size = 1; size < whole.size(); ++size) {
      const std::string path = write("a", "abc" + whole.substr(0, size));
      EXPECT_NE(refusal({path, write("b", whole)}).find("not valid UTF-8 at byte 3"), std::string::npos);
    }
  }
}

TEST_F(LoadText, TakesTheFirstAndTheLastOfEachLengthOfUtf8) {
  const std::string bytes =
      "\x01\x7f\u0080\u07ff\u0800\ud7ff\ue000\uffff\U00010000\U0003ffff\U00040000\U000fffff\U0010ffff";
  EXPECT_EQ(text(loaded({write("a", bytes)}, 4).bytes), bytes);
}

TEST_F(LoadText, RefusesMoreThanItsLimit) {
  const std::string path = write("a", "");
  ASSERT_EQ(::truncate(path.c_str(), (off_t{1} << 30) + 1), 0);  // a hole, which takes no room
  EXPECT_EQ(refusal({path}), path + ": over the limit of 1 GiB for all documents together");
  const std::string first = write("first", "ab");
  ASSERT_EQ(::truncate(path.c_str(), (off_t{1} << 30) - 1), 0);
  EXPECT_EQ(refusal({first, path}), path + ": over the limit of 1 GiB for all documents together");
}

}  // namespace
}  // namespace holdfast::train
