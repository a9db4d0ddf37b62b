#include "holdfast/coord/generation_id.h"

#include <fmt/format.h>

#include <charconv>

namespace holdfast {

std::string GenerationId::name() const { return fmt::format("e{:04}-a{:010}", epoch, attempt); }

bool parse_generation_name(std::string_view name, GenerationId* id) {
  const auto dash = name.find("-a");
  if (name.empty() || name.front() != 'e' || dash == std::string_view::npos) return false;
  const char* const epoch_end = name.data() + dash;
  const char* const end = name.data() + name.size();
  GenerationId parsed;
  const auto epoch = std::from_chars(name.data() + 1, epoch_end, parsed.epoch);
  const auto attempt = std::from_chars(epoch_end + 2, end, parsed.attempt);
  if (epoch.ec != std::errc() || attempt.ec != std::errc()) return false;
  // "e1-a2", signs, spaces and whatever else reads as the same numbers is another name.
  if (parsed.name() != name) return false;
  *id = parsed;
  return true;
}

}  // namespace holdfast
