// Reading the policy. The message itself, with its defaults and their reasons, is coord/policy.proto.
#pragma once

#include <cstdint>
#include <string>

#include "holdfast/collectives/status.h"

namespace holdfast {

class Policy;

// Parses textproto, or JSON when the first character that is not white space is '{'. Unset fields get their
// defaults. Unknown fields, wrong types and values out of range are USAGE errors that name the place.
// Empty text is the default policy.
Status parse_policy(const std::string& text, Policy* policy);

// Reads `path`; "" gives the empty text. USAGE, naming the file, when it cannot be read.
Status read_policy_file(const std::string& path, std::string* text);

// USAGE, naming it, for a rule that goes back to checkpoints: for a run that writes none.
Status check_can_roll_back(const Policy& policy);

// Textproto, one field a line, every field shown.
std::string policy_text(const Policy& policy);

// The same as JSON, under the same names.
std::string policy_json(const Policy& policy);

// Equal for equal effective policies, whatever they were written in.
std::uint64_t policy_hash(const Policy& policy);

}  // namespace holdfast
