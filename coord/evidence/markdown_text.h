// What others wrote, within our Markdown.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace holdfast {

// `bytes` as a code span: what Markdown, a table, HTML, a terminal or a reader's eye could be led astray by
// is shown as
// "\x1b", what is longer than `most` bytes is cut, and nothing is shown as "(none)".
std::string code_span(std::string_view bytes, std::size_t most = 200);

// `path` as one word of a shell's command, fit for a fenced block. False when it cannot be: control
// characters, or bytes that are no UTF-8.
bool shell_word(std::string_view path, std::string* word);

}  // namespace holdfast
