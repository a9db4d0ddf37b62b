#include "markdown_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "holdfast/coord/printable.h"

namespace holdfast {
namespace {

// Characters without a look of their own, or that turn the direction of the text behind them: U+00AD, U+061C,
// U+200B-200F, U+2028-202E, U+2060-206F, U+FEFF. `size` is that of the character.
bool is_unseen(std::string_view text, std::size_t* size) {
  const auto at = [&](std::size_t i) {
    return i < text.size() ? static_cast<unsigned>(static_cast<unsigned char>(text[i])) : 0u;
  };
  *size = 2;
  if ((at(0) == 0xc2 && at(1) == 0xad) || (at(0) == 0xd8 && at(1) == 0x9c)) return true;
  *size = 3;
  const unsigned code = (at(0) & 0x0fu) << 12 | (at(1) & 0x3fu) << 6 | (at(2) & 0x3fu);
  if (at(0) != 0xe2 && at(0) != 0xef) return false;
  return (code >= 0x200b && code <= 0x200f) || (code >= 0x2028 && code <= 0x202e) ||
         (code >= 0x2060 && code <= 0x206f) || code == 0xfeff;
}

std::string escaped(std::string_view bytes) {
  constexpr std::string_view kActive = "`|<>&";
  std::string text;
  const auto put = [&](char c) { text += fmt::format("\\x{:02x}", static_cast<unsigned char>(c)); };
  const bool whole = is_utf8(bytes);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    const char c = bytes[i];
    std::size_t size = 0;
    const bool foreign = static_cast<unsigned char>(c) >= 0x80;
    if (kActive.find(c) != std::string_view::npos || (foreign && !whole)) {
      put(c);
    } else if (foreign && is_unseen(bytes.substr(i), &size)) {
      for (std::size_t k = 0; k < size; ++k) put(bytes[i + k]);
      i += size - 1;
    } else {
      text += c;
    }
  }
  return printable(text);
}

}  // namespace

std::string code_span(std::string_view bytes, std::size_t most) {
  if (bytes.empty()) return "(none)";
  std::string_view kept = bytes.substr(0, most);
  // A character is kept whole or not at all; bytes that are no UTF-8 are cut anywhere.
  while (kept.size() < bytes.size() && kept.size() + 4 > most && !kept.empty() &&
         (static_cast<unsigned char>(bytes[kept.size()]) & 0xc0) == 0x80) {
    kept.remove_suffix(1);
  }
  std::string text = escaped(kept);
  // A code span of spaces alone is none, and one space at both ends is taken away.
  if (text.front() == ' ') text.replace(0, 1, "\\x20");
  if (text.back() == ' ') text.replace(text.size() - 1, 1, "\\x20");
  return "`" + text + "`" + (kept.size() < bytes.size() ? fmt::format(" (cut, {} bytes)", bytes.size()) : "");
}

bool shell_word(std::string_view path, std::string* word) {
  constexpr std::string_view kPlain = "/._-+=:,@%";
  const bool odd = path.empty() || !is_utf8(path) || escaped(path).find("\\x") != std::string::npos;
  if (odd) return false;
  const bool plain = std::ranges::all_of(path, [&](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
           kPlain.find(c) != std::string_view::npos;
  });
  *word = path.front() == '-' ? "./" : "";
  if (plain) {
    *word += path;
    return true;
  }
  *word += '\'';
  for (const char c : path) {
    if (c == '\'') {
      *word += "'\\''";
    } else {
      *word += c;
    }
  }
  *word += '\'';
  return true;
}

}  // namespace holdfast
