// Names and notes on a terminal.
#pragma once

#include <string>
#include <string_view>

namespace holdfast {

// `text` with control characters (line ends too) as "\x1b", so that what a file or a trainer calls itself
// cannot act on the terminal of who reads it.
std::string printable(std::string_view text);

bool is_utf8(std::string_view text);

}  // namespace holdfast
