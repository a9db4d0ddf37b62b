#include "run_environment.h"

#include <sys/utsname.h>

#include <cstdlib>
#include <fstream>

namespace holdfast {
namespace {

std::string processor_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const auto colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown";
}

}  // namespace

std::map<std::string, std::string> describe_environment(const std::vector<std::string>& allowed) {
  std::map<std::string, std::string> all;
  utsname system{};
  if (uname(&system) == 0) {
    all["fingerprint.system"] = std::string(system.sysname) + " " + system.release;
    all["fingerprint.machine"] = system.machine;
  }
  all["fingerprint.processor"] = processor_model();
  all["fingerprint.compiler"] = __VERSION__;
  for (const std::string& name : allowed) {
    if (const char* value = std::getenv(name.c_str())) all["variable." + name] = value;
  }
  return all;
}

}  // namespace holdfast
