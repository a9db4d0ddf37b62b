#include "train/idx_dataset.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <numeric>

namespace holdfast::train {
namespace {

namespace fs = std::filesystem;
using Bytes = std::vector<std::uint8_t>;

Bytes idx(std::uint32_t magic, std::initializer_list<std::uint32_t> sizes, const Bytes& data) {
  Bytes file;
  const auto put = [&file](std::uint32_t word) {
    for (int shift = 24; shift >= 0; shift -= 8) file.push_back(static_cast<std::uint8_t>(word >> shift));
  };
  put(magic);
  for (const std::uint32_t size : sizes) put(size);
  file.insert(file.end(), data.begin(), data.end());
  return file;
}

// `data` and then `zeros` bytes of 0, compressed.
Bytes gzip(const Bytes& data, std::size_t zeros = 0) {
  Bytes out(data.size() + zeros / 100 + 1000);
  z_stream stream{};
  EXPECT_EQ(deflateInit2(&stream, 9, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY), Z_OK);
  stream.next_out = out.data();
  stream.avail_out = static_cast<uInt>(out.size());
  const auto add = [&stream](const std::uint8_t* bytes, std::size_t size, int flush) {
    stream.next_in = const_cast<Bytef*>(bytes);
    stream.avail_in = static_cast<uInt>(size);
    return deflate(&stream, flush);
  };
  const Bytes padding(std::size_t{1} << 20);
  if (zeros == 0) {
    EXPECT_EQ(add(data.data(), data.size(), Z_FINISH), Z_STREAM_END);
  } else {
    EXPECT_EQ(add(data.data(), data.size(), Z_NO_FLUSH), Z_OK);
    for (std::size_t done = 0; done < zeros; done += padding.size()) {
      EXPECT_EQ(add(padding.data(), std::min(padding.size(), zeros - done), Z_NO_FLUSH), Z_OK);
    }
    EXPECT_EQ(add(nullptr, 0, Z_FINISH), Z_STREAM_END);
  }
  out.resize(stream.total_out);
  deflateEnd(&stream);
  return out;
}

// The most memory that this process has had so far, in MiB.
long peak_memory() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss / 1024;
}

constexpr std::uint32_t kImages = 0x803;
constexpr std::uint32_t kLabels = 0x801;
constexpr std::size_t kRecords = 5;
constexpr std::size_t kRecordBytes = 6;  // 2 x 3 pixels

// Five images with the pixels 1, 2, 3, ..., 30 and the labels 0, 9, 1, 8, 2, in a folder of their own.
class LoadIdx : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "holdfast_idx_XXXXXX").string();
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    dir_ = name;
    pixels_.resize(kRecords * kRecordBytes);
    std::iota(pixels_.begin(), pixels_.end(), std::uint8_t{1});
    write(images(), idx(kImages, {kRecords, 2, 3}, pixels_));
    write(labels(), idx(kLabels, {kRecords}, labels_));
  }
  void TearDown() override { fs::remove_all(dir_); }

  std::string images() const { return dir_ + "/train-images-idx3-ubyte"; }
  std::string labels() const { return dir_ + "/train-labels-idx1-ubyte"; }

  static void write(const std::string& path, const Bytes& bytes) {
    std::ofstream file(path, std::ios::binary | std::ios::trunc);
    file.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    ASSERT_TRUE(file.good());
  }

  // The images as a compressed file instead.
  void write_compressed_images(const Bytes& bytes) {
    fs::remove(images());
    write(images() + ".gz", bytes);
  }

  Bytes image_file() const { return idx(kImages, {kRecords, 2, 3}, pixels_); }

  void expect_loads() const {
    ImageDataset loaded;
    const Status status = load_idx(dir_, "train", 10, &loaded);
    ASSERT_TRUE(status.ok()) << status.to_string();
    EXPECT_EQ(loaded.count, 5);
    EXPECT_EQ(loaded.rows, 2);
    EXPECT_EQ(loaded.cols, 3);
    EXPECT_EQ(loaded.pixels, pixels_);
    EXPECT_EQ(loaded.labels, labels_);
  }

  // The message; the refusal must be USAGE and leave the result alone.
  std::string refusal(const std::string& split = "train") const {
    ImageDataset loaded;
    loaded.count = 77;
    const Status status = load_idx(dir_, split, 10, &loaded);
    EXPECT_EQ(status.code(), StatusCode::kUsage) << status.message();
    EXPECT_EQ(loaded.count, 77);
    EXPECT_TRUE(loaded.pixels.empty());
    return status.message();
  }

  std::string dir_;
  Bytes pixels_;
  Bytes labels_ = {0, 9, 1, 8, 2};
};

TEST_F(LoadIdx, ReadsPlainFiles) { expect_loads(); }

TEST_F(LoadIdx, ReadsCompressedFiles) {
  write_compressed_images(gzip(image_file()));
  fs::remove(labels());
  write(labels() + ".gz", gzip(idx(kLabels, {kRecords}, labels_)));
  expect_loads();
}

TEST_F(LoadIdx, TellsCompressionByContentNotByName) {
  write(images(), gzip(image_file()));
  fs::remove(labels());
  write(labels() + ".gz", idx(kLabels, {kRecords}, labels_));
  expect_loads();
}

TEST_F(LoadIdx, ReadsAFileOfSeveralGzipMembers) {
  const Bytes file = image_file();
  for (std::size_t cut = 0; cut <= file.size(); ++cut) {
    const auto middle = file.begin() + static_cast<std::ptrdiff_t>(cut);
    Bytes members = gzip(Bytes(file.begin(), middle));
    const Bytes second = gzip(Bytes(middle, file.end()));
    members.insert(members.end(), second.begin(), second.end());
    write_compressed_images(members);
    expect_loads();
  }
}

TEST_F(LoadIdx, ReadsTheTestSplit) {
  fs::rename(images(), dir_ + "/t10k-images-idx3-ubyte");
  fs::rename(labels(), dir_ + "/t10k-labels-idx1-ubyte");
  ImageDataset loaded;
  EXPECT_TRUE(load_idx(dir_, "t10k", 10, &loaded).ok());
  EXPECT_EQ(loaded.count, 5);
  EXPECT_EQ(refusal(), dir_ + ": holds neither train-images-idx3-ubyte nor train-images-idx3-ubyte.gz");
}

TEST_F(LoadIdx, ReadsMoreThanOneBufferful) {
  pixels_.assign(3000 * 28 * 28, 0);
  for (std::size_t i = 0; i < pixels_.size(); ++i) {
    pixels_[i] = static_cast<std::uint8_t>((i * 2654435761u >> 13) | 1);
  }
  labels_.assign(3000, 3);
  write(labels(), idx(kLabels, {3000}, labels_));
  for (const bool compressed : {false, true}) {
    const Bytes file = idx(kImages, {3000, 28, 28}, pixels_);
    write(images(), compressed ? gzip(file) : file);
    ImageDataset loaded;
    const Status status = load_idx(dir_, "train", 10, &loaded);
    ASSERT_TRUE(status.ok()) << status.to_string();
    EXPECT_TRUE(loaded.pixels == pixels_);
  }
}

TEST_F(LoadIdx, RefusesAnUnknownSplit) {
  EXPECT_EQ(refusal("test"), "data set split 'test' is neither train nor t10k");
}

TEST_F(LoadIdx, RefusesAMissingFolder) {
  ImageDataset loaded;
  EXPECT_EQ(load_idx(dir_ + "/none", "train", 10, &loaded).to_string(),
            "USAGE (64): --data " + dir_ +
                "/none: No such file or directory. Debian's package dataset-fashion-mnist has the data set");
  EXPECT_EQ(load_idx(images(), "train", 10, &loaded).message(), images() + ": not a directory");
}

TEST_F(LoadIdx, RefusesMissingLabels) {
  fs::remove(labels());
  EXPECT_EQ(refusal(), dir_ + ": holds neither train-labels-idx1-ubyte nor train-labels-idx1-ubyte.gz");
}

TEST_F(LoadIdx, RefusesWhatIsNotARegularFile) {
  fs::remove(images());
  fs::create_directory(images());
  EXPECT_EQ(refusal(), images() + ": not a regular file");
  fs::remove(images());
  ASSERT_EQ(::mkfifo(images().c_str(), 0600), 0);  // opening it would wait for a writer
  EXPECT_EQ(refusal(), images() + ": not a regular file");
}

TEST_F(LoadIdx, RefusesAFileThatItMayNotRead) {
  fs::permissions(dir_, fs::perms::owner_all | fs::perms::others_read | fs::perms::others_exec);
  fs::permissions(images(), fs::perms::none);
  const bool root = ::geteuid() == 0;  // may read every file, so the test becomes someone else
  if (root && ::seteuid(65534) != 0) GTEST_SKIP() << "cannot drop root's right to read every file";
  const std::string message = refusal();
  ASSERT_TRUE(!root || ::seteuid(0) == 0);
  EXPECT_EQ(message, images() + ": Permission denied");
}

TEST_F(LoadIdx, RefusesAnEmptyFile) {
  write(images(), {});
  EXPECT_EQ(refusal(), images() + ": empty file");
}

TEST_F(LoadIdx, RefusesAWrongMagicNumber) {
  write(images(), idx(kLabels, {kRecords}, labels_));
  EXPECT_EQ(refusal(), images() +
                           ": magic number 0x00000801, expected 0x00000803 (IDX, unsigned bytes, "
                           "dimensions: 3)");
  write(images(), idx(0x00000d03, {kRecords, 2, 3}, pixels_));  // fp32 elements
  EXPECT_EQ(refusal(), images() +
                           ": magic number 0x00000d03, expected 0x00000803 (IDX, unsigned bytes, "
                           "dimensions: 3)");
  write(images(), image_file());
  write(labels(), image_file());
  EXPECT_EQ(refusal(), labels() +
                           ": magic number 0x00000803, expected 0x00000801 (IDX, unsigned bytes, "
                           "dimensions: 1)");
}

TEST_F(LoadIdx, RefusesWrongDimensions) {
  const std::string range = " pixels; each side must have 1 to 4096";
  write(images(), idx(kImages, {kRecords, 0, 3}, {}));
  EXPECT_EQ(refusal(), images() + ": images of 0 x 3" + range);
  write(images(), idx(kImages, {kRecords, 2, 0}, {}));
  EXPECT_EQ(refusal(), images() + ": images of 2 x 0" + range);
  write(images(), idx(kImages, {kRecords, 4097, 3}, {}));
  EXPECT_EQ(refusal(), images() + ": images of 4097 x 3" + range);
  write(images(), idx(kImages, {kRecords, 2, 0xffffffff}, {}));
  EXPECT_EQ(refusal(), images() + ": images of 2 x 4294967295" + range);
}

TEST_F(LoadIdx, RefusesAFileWithoutRecords) {
  write(images(), idx(kImages, {0, 2, 3}, {}));
  EXPECT_EQ(refusal(), images() + ": no records");
  write(images(), image_file());
  write(labels(), idx(kLabels, {0}, {}));
  EXPECT_EQ(refusal(), labels() + ": no records");
}

TEST_F(LoadIdx, RefusesMoreThanItsLimit) {
  write(images(), idx(kImages, {0xffffffff, 4096, 4096}, pixels_));
  EXPECT_EQ(refusal(),
            images() + ": header announces 4294967295 records of 16777216 bytes, over the limit of 4 GiB");
  write(images(), idx(kImages, {257, 4096, 4096}, pixels_));
  EXPECT_EQ(refusal(),
            images() + ": header announces 257 records of 16777216 bytes, over the limit of 4 GiB");
}

TEST_F(LoadIdx, TakesNoMemoryForRecordsThatAreNotThere) {
  const Bytes file = idx(kImages, {256, 4096, 4096}, pixels_);  // announces exactly 4 GiB
  const long before = peak_memory();
  for (const bool compressed : {false, true}) {
    write(images(), compressed ? gzip(file) : file);
    EXPECT_EQ(refusal(), images() + ": cut short in record 0: only 0 of 256 records are whole");
  }
  EXPECT_LT(peak_memory() - before, 64);
}

TEST_F(LoadIdx, InflatesNoFurtherThanTheHeaderAnnounces) {
  write(images(), gzip(image_file(), std::size_t{128} << 20));
  const long before = peak_memory();
  EXPECT_EQ(refusal(), images() + ": bytes after the last of 5 records");
  EXPECT_LT(peak_memory() - before, 64);
}

TEST_F(LoadIdx, RefusesAPlainFileCutShortAnywhere) {
  const Bytes whole = image_file();
  for (std::size_t size = 1; size < whole.size(); ++size) {
    write(images(), Bytes(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size)));
    if (size < 16) {
      EXPECT_EQ(refusal(), images() + ": header is cut short: " + std::to_string(size) + " of 16 bytes");
    } else {
      const std::string records = std::to_string((size - 16) / kRecordBytes);
      EXPECT_EQ(refusal(), images() + ": cut short in record " + records + ": only " + records +
                               " of 5 records are whole");
    }
  }
}

TEST_F(LoadIdx, RefusesLabelsCutShort) {
  const Bytes whole = idx(kLabels, {kRecords}, labels_);
  write(labels(), Bytes(whole.begin(), whole.end() - 2));
  EXPECT_EQ(refusal(), labels() + ": cut short in record 3: only 3 of 5 records are whole");
}

TEST_F(LoadIdx, RefusesBytesAfterTheLastRecord) {
  Bytes longer = image_file();
  longer.push_back(0);
  write(images(), longer);
  EXPECT_EQ(refusal(), images() + ": bytes after the last of 5 records");
  write_compressed_images(gzip(longer));
  EXPECT_EQ(refusal(), images() + ".gz: bytes after the last of 5 records");
}

TEST_F(LoadIdx, RefusesACompressedFileCutShortAnywhere) {
  const Bytes whole = gzip(image_file());
  for (std::size_t size = 1; size < whole.size(); ++size) {
    write_compressed_images(Bytes(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size)));
    EXPECT_NE(refusal().find(".gz: "), std::string::npos);
    EXPECT_NE(refusal().find("cut short"), std::string::npos) << size << ": " << refusal();
  }
  write_compressed_images(Bytes(whole.begin(), whole.end() - 8));  // without its trailer
  EXPECT_EQ(refusal(), images() + ".gz: gzip data is cut short after the last of 5 records");
}

TEST_F(LoadIdx, CountsTheWholeRecordsOfACompressedFileCutShort) {
  pixels_.assign(4000 * kRecordBytes, 0);
  for (std::size_t i = 0; i < pixels_.size(); ++i) {
    pixels_[i] = static_cast<std::uint8_t>((i * 2654435761u >> 13) | 1);
  }
  const Bytes file = idx(kImages, {4000, 2, 3}, pixels_);
  const Bytes whole = gzip(file);
  const std::size_t half = whole.size() / 2;
  write_compressed_images(Bytes(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(half)));

  // What zlib itself gets out of the half.
  z_stream stream{};
  Bytes out(file.size());
  ASSERT_EQ(inflateInit2(&stream, 15 + 16), Z_OK);
  stream.next_in = const_cast<Bytef*>(whole.data());
  stream.avail_in = static_cast<uInt>(half);
  stream.next_out = out.data();
  stream.avail_out = static_cast<uInt>(out.size());
  inflate(&stream, Z_SYNC_FLUSH);
  const std::string records = std::to_string((stream.total_out - 16) / kRecordBytes);
  inflateEnd(&stream);

  EXPECT_NE(records, "0");
  EXPECT_EQ(refusal(), images() + ".gz: cut short in record " + records + ": only " + records +
                           " of 4000 records are whole");
}

TEST_F(LoadIdx, RefusesEveryFlippedBitOfCompressedDataOrReadsTheSame) {
  const Bytes whole = gzip(image_file());
  int refused = 0;
  for (std::size_t bit = 0; bit < whole.size() * 8; ++bit) {
    Bytes flipped = whole;
    flipped[bit / 8] = static_cast<std::uint8_t>(flipped[bit / 8] ^ (1u << bit % 8));
    write_compressed_images(flipped);
    ImageDataset loaded;
    const Status status = load_idx(dir_, "train", 10, &loaded);
    if (status.ok()) {
      // No data: the header's time, extra flags and system, and what fills up the last byte before the
      // trailer.
      const std::size_t byte = bit / 8;
      EXPECT_TRUE((byte >= 3 && byte < 10) || byte == whole.size() - 9) << "byte " << byte;
      EXPECT_EQ(loaded.pixels, pixels_);
    } else {
      EXPECT_EQ(status.code(), StatusCode::kUsage);
      EXPECT_NE(status.message().find(images() + ".gz: "), std::string::npos) << status.message();
      ++refused;
    }
  }
  EXPECT_GE(refused, static_cast<int>(whole.size() - 11) * 8);
}

TEST_F(LoadIdx, SaysThatTheChecksumIsWrong) {
  Bytes damaged = gzip(image_file());
  damaged[damaged.size() - 8] ^= 1;  // CRC-32
  write_compressed_images(damaged);
  EXPECT_EQ(refusal(), images() + ".gz: gzip data is damaged: incorrect data check");
  damaged = gzip(image_file());
  damaged[damaged.size() - 1] ^= 1;  // size
  write_compressed_images(damaged);
  EXPECT_EQ(refusal(), images() + ".gz: gzip data is damaged: incorrect length check");
}

TEST_F(LoadIdx, RefusesBytesAfterTheGzipData) {
  Bytes longer = gzip(image_file());
  longer.push_back(0);
  write_compressed_images(longer);
  EXPECT_EQ(refusal(), images() + ".gz: bytes after the end of the gzip data");
  longer.back() = 0x1f;  // like the beginning of another member
  write_compressed_images(longer);
  EXPECT_EQ(refusal(), images() + ".gz: gzip data is cut short after the last of 5 records");
}

TEST_F(LoadIdx, RefusesCountsThatDiffer) {
  write(labels(), idx(kLabels, {4}, {0, 9, 1, 8}));
  EXPECT_EQ(refusal(), images() + " holds 5 images, but " + labels() + " holds 4 labels");
}

TEST_F(LoadIdx, RefusesALabelThatIsNoClass) {
  labels_[3] = 10;
  write(labels(), idx(kLabels, {kRecords}, labels_));
  EXPECT_EQ(refusal(), labels() + ": record 3: label 10, must be below 10");
}

TEST_F(LoadIdx, RefusesAnEmptyRecord) {
  std::fill(pixels_.end() - kRecordBytes, pixels_.end(), std::uint8_t{0});
  write(images(), image_file());
  EXPECT_EQ(refusal(), images() + ": record 4 is empty: all its pixels are 0");
  pixels_.back() = 1;
  write(images(), image_file());
  expect_loads();
}

TEST(LoadIdxOfFashionMnist, ReadsBothSplits) {
  const std::string dir = "/usr/share/datasets/fashion-mnist";
  if (!fs::exists(dir)) GTEST_SKIP() << dir << " is not installed";
  for (const auto& [split, count] : {std::pair<std::string, int>{"train", 60000}, {"t10k", 10000}}) {
    ImageDataset loaded;
    const Status status = load_idx(dir, split, 10, &loaded);
    ASSERT_TRUE(status.ok()) << status.to_string();
    EXPECT_EQ(loaded.count, count);
    EXPECT_EQ(loaded.rows, 28);
    EXPECT_EQ(loaded.cols, 28);
    ASSERT_EQ(loaded.pixels.size(), static_cast<std::size_t>(count) * 28 * 28);
    std::array<int, 10> of_class{};
    for (const std::uint8_t label : loaded.labels) ++of_class[label];
    for (const int images : of_class) EXPECT_EQ(images, count / 10);
  }
}

}  // namespace
}  // namespace holdfast::train
