// What surrounds a process, as far as it may be put on record.
#pragma once

#include <map>
#include <string>
#include <vector>

namespace holdfast {

// "fingerprint.*": processor model, operating system, machine, compiler. "variable.NAME" of
// each that is set among `allowed`: nothing else of the environment.
std::map<std::string, std::string> describe_environment(const std::vector<std::string>& allowed);

}  // namespace holdfast
