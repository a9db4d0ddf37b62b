#include "train/text_dataset.h"

#include <sys/stat.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <memory>
#include <set>
#include <utility>

namespace holdfast::train {
namespace {

namespace fs = std::filesystem;
using Text = std::span<const std::uint8_t>;

constexpr std::size_t kMaxBytes = std::size_t{1} << 30;
constexpr std::size_t kChunk = std::size_t{1} << 16;

struct CloseFile {
  void operator()(std::FILE* file) const { std::fclose(file); }
};

Status refused(const std::string& path, const std::string& what) { return Status::usage(path + ": " + what); }

Status too_large(const std::string& path) {
  return refused(path, "over the limit of 1 GiB for all documents together");
}

// Bytes of the well-formed UTF-8 sequence at the front of `text`, which is not empty; 0 when there is none.
// The Unicode Standard, table 3-7: all continuation bytes are 80..BF, but the first one after some lead bytes
// has a smaller range, which leaves out overlong forms, surrogates and what is above U+10FFFF.
std::size_t sequence_length(Text text) {
  const std::uint8_t lead = text[0];
  if (lead < 0x80) return 1;
  if (lead < 0xc2 || lead > 0xf4) return 0;
  const std::size_t length = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
  if (text.size() < length) return 0;
  std::uint8_t low = 0x80;
  std::uint8_t high = 0xbf;
  if (lead == 0xe0) low = 0xa0;
  if (lead == 0xed) high = 0x9f;
  if (lead == 0xf0) low = 0x90;
  if (lead == 0xf4) high = 0x8f;
  if (text[1] < low || text[1] > high) return 0;
  for (std::size_t i = 2; i < length; ++i) {
    if (text[i] < 0x80 || text[i] > 0xbf) return 0;
  }
  return length;
}

Status check_text(const std::string& path, Text text) {
  if (text.empty()) return refused(path, "empty document");
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t length = sequence_length(text.subspan(at));
    if (text[at] == 0) return refused(path, "NUL at byte " + std::to_string(at) + ": not a text");
    if (length == 0) {
      char byte[8];
      std::snprintf(byte, sizeof byte, "0x%02x", unsigned{text[at]});
      return refused(path, "not valid UTF-8 at byte " + std::to_string(at) + " (" + byte + ")");
    }
    at += length;
  }
  if (text.size() < 2) return refused(path, "document of a single byte; a byte to predict takes two");
  return Status();
}

class Loader {
 public:
  explicit Loader(std::int64_t context) { loaded_.context = context; }

  Status add(const std::string& path) {
    std::error_code error;
    return fs::is_directory(path, error) ? add_folder(path) : add_file(path);
  }

  TextDataset&& finish() { return std::move(loaded_); }

 private:
  Status add_folder(const std::string& path) {
    std::vector<std::string> files;
    std::error_code error;
    for (fs::directory_iterator entry(path, error); !error && entry != fs::directory_iterator();
         entry.increment(error)) {
      std::error_code unknown;  // comes out when it is opened as a file
      if (!entry->is_directory(unknown)) files.push_back(entry->path().string());
    }
    if (error) return refused(path, error.message());
    if (files.empty()) return refused(path, "a folder without files");
    std::sort(files.begin(), files.end());
    for (const std::string& file : files) {
      if (Status status = add_file(file); !status.ok()) return status;
    }
    return Status();
  }

  Status add_file(const std::string& path) {
    struct stat info {};
    if (::stat(path.c_str(), &info) != 0) return refused(path, std::strerror(errno));
    if (!S_ISREG(info.st_mode)) return refused(path, "not a regular file");
    if (!seen_.emplace(info.st_dev, info.st_ino).second) return Status();
    if (static_cast<std::size_t>(info.st_size) > kMaxBytes - loaded_.bytes.size()) return too_large(path);
    const std::size_t begin = loaded_.bytes.size();
    if (Status status = read(path); !status.ok()) return status;
    const Text text = Text(loaded_.bytes).subspan(begin);
    if (Status status = check_text(path, text); !status.ok()) return status;
    loaded_.documents.push_back({static_cast<std::int64_t>(begin), loaded_.windows});
    const auto targets = static_cast<std::int64_t>(text.size()) - 1;
    loaded_.windows += (targets - 1) / loaded_.context + 1;
    return Status();
  }

  // Adds the file's bytes.
  Status read(const std::string& path) {
    const std::unique_ptr<std::FILE, CloseFile> file(std::fopen(path.c_str(), "rb"));
    if (!file) return refused(path, std::strerror(errno));
    std::vector<std::uint8_t>& bytes = loaded_.bytes;
    for (std::size_t got = kChunk; got != 0;) {
      const std::size_t have = bytes.size();
      bytes.resize(have + kChunk);
      got = std::fread(bytes.data() + have, 1, kChunk, file.get());
      const int error = errno;
      bytes.resize(have + got);
      if (std::ferror(file.get())) return refused(path, std::string("read failed: ") + std::strerror(error));
      if (bytes.size() > kMaxBytes) return too_large(path);
    }
    return Status();
  }

  TextDataset loaded_;
  std::set<std::pair<dev_t, ino_t>> seen_;
};

}  // namespace

void TextWindow::copy_to(std::span<std::int64_t> token_row, std::span<std::int64_t> target_row) const {
  assert(token_row.size() >= inputs.size() && target_row.size() >= targets.size());
  std::fill(std::copy(inputs.begin(), inputs.end(), token_row.begin()), token_row.end(), 0);
  std::fill(std::copy(targets.begin(), targets.end(), target_row.begin()), target_row.end(), kNoTarget);
}

TextWindow TextDataset::window(std::int64_t number) const {
  assert(number >= 0 && number < windows);
  const auto next = std::upper_bound(
      documents.begin(), documents.end(), number,
      [](std::int64_t wanted, const Document& document) { return wanted < document.first_window; });
  const Document& document = *(next - 1);
  const std::int64_t end = next == documents.end() ? static_cast<std::int64_t>(bytes.size()) : next->begin;
  const std::int64_t begin = document.begin + (number - document.first_window) * context;
  const auto count = static_cast<std::size_t>(std::min(context, end - 1 - begin));
  const Text rest = Text(bytes).subspan(static_cast<std::size_t>(begin));
  return {rest.first(count), rest.subspan(1, count)};
}

Status load_text(const std::vector<std::string>& paths, std::int64_t context, TextDataset* out) {
  if (context < 1) return Status::usage("context: " + std::to_string(context) + ", must be at least 1");
  if (paths.empty()) return Status::usage("no text files were named");
  const std::string* current = nullptr;
  try {
    Loader loader(context);
    for (const std::string& path : paths) {
      current = &path;
      if (Status status = loader.add(path); !status.ok()) return status;
    }
    *out = loader.finish();
    return Status();
  } catch (const std::exception& error) {
    return Status::internal(*current + ": loading text failed: " + error.what());
  }
}

}  // namespace holdfast::train
