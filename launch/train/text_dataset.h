// Text files as a data set for a model that predicts the next byte.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "holdfast/collectives/status.h"

namespace holdfast::train {

// Stands for "no target" in a row of targets.
inline constexpr std::int64_t kNoTarget = -100;

// Inputs, and for each of them the byte that comes after it.
struct TextWindow {
  std::span<const std::uint8_t> inputs;   // 1 to `context` bytes
  std::span<const std::uint8_t> targets;  // as many

  // Writes a row of `tokens` and one of `targets`, as long as the context. Behind the window's end tokens are
  // 0 and targets kNoTarget.
  void copy_to(std::span<std::int64_t> token_row, std::span<std::int64_t> target_row) const;
};

// Documents, one after the other, each cut into windows of `context` inputs that do not overlap; the last one
// of a document can be shorter. Windows are numbered from 0 through all documents. Every tenth, number 9, 19,
// ..., is held out; training windows and held-out windows have numbers of their own, from 0.
struct TextDataset {
  struct Document {
    std::int64_t begin = 0;  // in `bytes`; it goes on to the next document's
    std::int64_t first_window = 0;
  };

  std::int64_t context = 0;
  std::int64_t windows = 0;  // at least 1 after a successful load
  std::vector<std::uint8_t> bytes;
  std::vector<Document> documents;

  std::int64_t held_out_windows() const { return windows / 10; }
  std::int64_t training_windows() const { return windows - held_out_windows(); }

  TextWindow window(std::int64_t number) const;
  TextWindow held_out_window(std::int64_t number) const { return window(number * 10 + 9); }
  TextWindow training_window(std::int64_t number) const { return window(number + number / 9); }
};

// Each path is a file or a folder, whose files are taken in the order of their names (as bytes) and whose
// subfolders are not looked into. Symbolic links are followed; a file that is met again, under whatever name,
// is left out. A file is a document.
//
// USAGE, with a message that names the file and, where there is one, the byte (from 0), for: a `context`
// below 1, no paths, a folder without files, what is missing, unreadable or not a regular file, an empty
// document, one of a single byte, a NUL byte, text that is not valid UTF-8 (overlong forms, surrogates and
// code points above U+10FFFF are not), and more than 1 GiB altogether. `*out` is written on success only.
// Does not throw. Local; every rank loads its own copy.
Status load_text(const std::vector<std::string>& paths, std::int64_t context, TextDataset* out);

}  // namespace holdfast::train
