// Which checkpoint.
#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <string_view>

namespace holdfast {

// The state before `attempt`, as written in `epoch`: unique in a run.
struct GenerationId {
  std::uint64_t epoch = 0;
  std::uint64_t attempt = 0;  // the next one to make

  std::string name() const;  // "e0001-a0000000600"
  auto operator<=>(const GenerationId&) const = default;
};
bool parse_generation_name(std::string_view name, GenerationId* id);  // only what name() gives

}  // namespace holdfast
