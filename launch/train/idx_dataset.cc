#include "train/idx_dataset.h"

#include <sys/stat.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <span>
#include <utility>

namespace holdfast::train {
namespace {

// An IDX file: a big-endian 32-bit magic number (two zero bytes, the element type, the number of dimensions),
// one big-endian 32-bit size for each dimension, then the elements.
constexpr std::uint32_t kImagesMagic = 0x00000803;  // unsigned bytes, 3 dimensions
constexpr std::uint32_t kLabelsMagic = 0x00000801;  // unsigned bytes, 1 dimension

constexpr std::array<std::uint8_t, 2> kGzipMagic = {0x1f, 0x8b};

constexpr std::uint64_t kMaxSide = 4096;
constexpr std::uint64_t kMaxBytes = std::uint64_t{4} << 30;
constexpr std::size_t kChunk = std::size_t{1} << 18;

struct CloseFile {
  void operator()(std::FILE* file) const { std::fclose(file); }
};

// Reads a file front to back, through inflate when it begins like a gzip file.
class ByteSource {
 public:
  ByteSource() = default;
  ~ByteSource() {
    if (gzip_) inflateEnd(&stream_);
  }
  ByteSource(const ByteSource&) = delete;
  ByteSource& operator=(const ByteSource&) = delete;

  Status open(const std::string& path) {
    path_ = path;
    struct stat info {};
    if (::stat(path.c_str(), &info) != 0) return failed(std::strerror(errno));
    if (!S_ISREG(info.st_mode)) return failed("not a regular file");
    file_.reset(std::fopen(path.c_str(), "rb"));
    if (!file_) return failed(std::strerror(errno));
    if (Status status = fill(); !status.ok()) return status;
    if (input_.empty()) return failed("empty file");
    if (input_.size() >= 2 && input_[0] == kGzipMagic[0] && input_[1] == kGzipMagic[1]) {
      // 15: the largest window; 16: a gzip header and trailer, nothing else.
      if (inflateInit2(&stream_, 15 + 16) != Z_OK) return failed("zlib cannot start");
      gzip_ = true;
    }
    return Status();
  }

  // Reads until `wanted` is full or the data ends; `*got` is how much it was.
  Status read(std::span<std::uint8_t> wanted, std::size_t* got) {
    *got = 0;
    while (*got < wanted.size() && !ended_) {
      std::size_t more = 0;
      Status status =
          gzip_ ? inflate_some(wanted.subspan(*got), &more) : copy_some(wanted.subspan(*got), &more);
      *got += more;
      if (!status.ok()) return status;
    }
    return Status();
  }

  bool gzip_cut_short() const { return gzip_cut_short_; }

  Status failed(const std::string& what) const { return Status::usage(path_ + ": " + what); }

 private:
  // Makes sure that there is input, unless the file is at its end.
  Status fill() {
    if (!input_.empty()) return Status();
    const std::size_t got = std::fread(buffer_.data(), 1, buffer_.size(), file_.get());
    if (got == 0 && std::ferror(file_.get()))
      return failed(std::string("read failed: ") + std::strerror(errno));
    input_ = std::span(buffer_).first(got);
    return Status();
  }

  Status copy_some(std::span<std::uint8_t> wanted, std::size_t* got) {
    if (Status status = fill(); !status.ok()) return status;
    *got = std::min(wanted.size(), input_.size());
    std::copy_n(input_.begin(), *got, wanted.begin());
    input_ = input_.subspan(*got);
    ended_ = *got == 0;
    return Status();
  }

  Status inflate_some(std::span<std::uint8_t> wanted, std::size_t* got) {
    if (Status status = fill(); !status.ok()) return status;
    if (between_members_) {
      ended_ = input_.empty();
      if (ended_) return Status();
      if (input_[0] != kGzipMagic[0]) return failed("bytes after the end of the gzip data");
      inflateReset(&stream_);
      between_members_ = false;
    }
    stream_.next_in = input_.data();
    stream_.avail_in = static_cast<uInt>(input_.size());
    stream_.next_out = wanted.data();
    stream_.avail_out = static_cast<uInt>(wanted.size());
    const int result = inflate(&stream_, Z_NO_FLUSH);
    *got = wanted.size() - stream_.avail_out;
    input_ = input_.last(stream_.avail_in);
    if (result == Z_STREAM_END) {
      between_members_ = true;
    } else if (result == Z_BUF_ERROR && input_.empty() && *got == 0) {
      ended_ = gzip_cut_short_ = true;
    } else if (result != Z_OK) {
      return failed(std::string("gzip data is damaged: ") + (stream_.msg ? stream_.msg : zError(result)));
    }
    return Status();
  }

  std::string path_;
  std::unique_ptr<std::FILE, CloseFile> file_;
  std::vector<std::uint8_t> buffer_ = std::vector<std::uint8_t>(kChunk);
  std::span<std::uint8_t> input_;  // what is left of buffer_
  z_stream stream_{};
  bool gzip_ = false;
  bool between_members_ = false;  // a gzip member has ended; another one may follow
  bool ended_ = false;
  bool gzip_cut_short_ = false;
};

std::uint32_t big_endian(const std::uint8_t* bytes) {
  return std::uint32_t{bytes[0]} << 24 | std::uint32_t{bytes[1]} << 16 | std::uint32_t{bytes[2]} << 8 |
         bytes[3];
}

std::string hex(std::uint32_t value) {
  char text[16];
  std::snprintf(text, sizeof text, "0x%08x", value);
  return text;
}

// Fills `sizes`, as many as the file has dimensions.
Status read_header(ByteSource& source, std::uint32_t magic, std::span<std::uint64_t> sizes) {
  std::array<std::uint8_t, 16> header{};
  const auto wanted = std::span(header).first(4 + 4 * sizes.size());
  std::size_t got = 0;
  if (Status status = source.read(wanted, &got); !status.ok()) return status;
  if (got >= 4 && big_endian(header.data()) != magic) {
    return source.failed("magic number " + hex(big_endian(header.data())) + ", expected " + hex(magic) +
                         " (IDX, unsigned bytes, dimensions: " + std::to_string(sizes.size()) + ")");
  }
  if (got < wanted.size()) {
    return source.failed("header is cut short: " + std::to_string(got) + " of " +
                         std::to_string(wanted.size()) + " bytes");
  }
  for (std::size_t i = 0; i < sizes.size(); ++i) sizes[i] = big_endian(&header[4 + 4 * i]);
  return Status();
}

// The rest of the file, which must be exactly `count` records.
Status read_records(ByteSource& source, std::uint64_t count, std::uint64_t record_bytes,
                    std::vector<std::uint8_t>* out) {
  const std::string of_count = " of " + std::to_string(count) + " records";
  if (count == 0) return source.failed("no records");
  if (count * record_bytes > kMaxBytes) {
    return source.failed("header announces " + std::to_string(count) + " records of " +
                         std::to_string(record_bytes) + " bytes, over the limit of 4 GiB");
  }
  const std::size_t total = count * record_bytes;
  std::size_t have = 0;
  std::size_t got = 0;
  do {
    const std::size_t wanted = std::min(kChunk, total - have);
    out->resize(have + wanted);
    const Status status = source.read(std::span(*out).subspan(have), &got);
    have += got;
    if (!status.ok()) {
      const std::string where =
          have < total ? " (in record " + std::to_string(have / record_bytes) + of_count + ")" : "";
      return Status(status.code(), status.message() + where);
    }
  } while (got != 0 && have < total);
  if (have < total) {
    return source.failed("cut short in record " + std::to_string(have / record_bytes) + ": only " +
                         std::to_string(have / record_bytes) + of_count + " are whole");
  }
  std::uint8_t extra = 0;
  if (Status status = source.read(std::span(&extra, 1), &got); !status.ok()) return status;
  if (got != 0) return source.failed("bytes after the last" + of_count);
  if (source.gzip_cut_short()) return source.failed("gzip data is cut short after the last" + of_count);
  return Status();
}

Status load_images(const std::string& path, ImageDataset* out) {
  ByteSource source;
  std::array<std::uint64_t, 3> sizes{};
  if (Status status = source.open(path); !status.ok()) return status;
  if (Status status = read_header(source, kImagesMagic, sizes); !status.ok()) return status;
  const auto [count, rows, cols] = sizes;
  if (rows == 0 || cols == 0 || rows > kMaxSide || cols > kMaxSide) {
    return source.failed("images of " + std::to_string(rows) + " x " + std::to_string(cols) +
                         " pixels; each side must have 1 to " + std::to_string(kMaxSide));
  }
  if (Status status = read_records(source, count, rows * cols, &out->pixels); !status.ok()) return status;
  out->count = static_cast<std::int64_t>(count);
  out->rows = static_cast<std::int64_t>(rows);
  out->cols = static_cast<std::int64_t>(cols);
  for (std::uint64_t record = 0; record < count; ++record) {
    const auto image = std::span(out->pixels).subspan(record * rows * cols, rows * cols);
    if (std::all_of(image.begin(), image.end(), [](std::uint8_t pixel) { return pixel == 0; })) {
      return source.failed("record " + std::to_string(record) + " is empty: all its pixels are 0");
    }
  }
  return Status();
}

Status load_labels(const std::string& path, int class_count, ImageDataset* out) {
  ByteSource source;
  std::array<std::uint64_t, 1> sizes{};
  if (Status status = source.open(path); !status.ok()) return status;
  if (Status status = read_header(source, kLabelsMagic, sizes); !status.ok()) return status;
  if (Status status = read_records(source, sizes[0], 1, &out->labels); !status.ok()) return status;
  for (std::size_t record = 0; record < out->labels.size(); ++record) {
    if (out->labels[record] >= class_count) {
      return source.failed("record " + std::to_string(record) + ": label " +
                           std::to_string(out->labels[record]) + ", must be below " +
                           std::to_string(class_count));
    }
  }
  return Status();
}

// dir/name, or dir/name.gz where the first does not exist.
Status find_file(const std::string& dir, const std::string& name, std::string* path) {
  struct stat info {};
  for (const char* suffix : {"", ".gz"}) {
    *path = dir + "/" + name + suffix;
    // Whatever else is wrong with it comes out when it is opened.
    if (::stat(path->c_str(), &info) == 0 || errno != ENOENT) return Status();
  }
  return Status::usage(dir + ": holds neither " + name + " nor " + name + ".gz");
}

Status load(const std::string& dir, const std::string& split, int class_count, ImageDataset* out) {
  if (split != "train" && split != "t10k") {
    return Status::usage("data set split '" + split + "' is neither train nor t10k");
  }
  struct stat info {};
  if (::stat(dir.c_str(), &info) != 0) return Status::usage("--data " + dir + ": " + std::strerror(errno) +
                         ". Debian's package dataset-fashion-mnist has the data set");
  if (!S_ISDIR(info.st_mode)) return Status::usage(dir + ": not a directory");

  std::string images;
  std::string labels;
  ImageDataset loaded;
  if (Status status = find_file(dir, split + "-images-idx3-ubyte", &images); !status.ok()) return status;
  if (Status status = find_file(dir, split + "-labels-idx1-ubyte", &labels); !status.ok()) return status;
  if (Status status = load_images(images, &loaded); !status.ok()) return status;
  if (Status status = load_labels(labels, class_count, &loaded); !status.ok()) return status;
  if (loaded.labels.size() != static_cast<std::size_t>(loaded.count)) {
    return Status::usage(images + " holds " + std::to_string(loaded.count) + " images, but " + labels +
                         " holds " + std::to_string(loaded.labels.size()) + " labels");
  }
  *out = std::move(loaded);
  return Status();
}

}  // namespace

Status load_idx(const std::string& dir, const std::string& split, int class_count, ImageDataset* out) {
  try {
    return load(dir, split, class_count, out);
  } catch (const std::exception& error) {
    return Status::internal(dir + ": loading the data set failed: " + error.what());
  }
}

}  // namespace holdfast::train
