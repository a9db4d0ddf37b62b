#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "cli/commands.h"
#include "holdfast/coord/policy.h"
#include "holdfast/coord/policy.pb.h"

namespace holdfast::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kFooter = R"(
Examples:
  holdfast policy check run.policy          # prints the effective policy, every field
  holdfast policy check run.policy --json   # {"valid": true, "policy": {...}}
Exit codes: 0 the policy is good   64 it is not, and why)";

struct Arguments {
  std::string file;
  bool json = false;
};

Status check(const Arguments& arguments) {
  std::string text;
  Policy policy;
  Status status = read_policy_file(arguments.file, &text);
  if (status.ok()) status = parse_policy(text, &policy);
  if (!arguments.json) {
    if (status.ok()) std::fputs(policy_text(policy).c_str(), stdout);
    return status;
  }
  Json json = {{"valid", status.ok()}};
  if (status.ok()) {
    json["policy"] = Json::parse(policy_json(policy));
  } else {
    json["reason"] = status.message();
  }
  std::printf("%s\n", json.dump(1, ' ', true, Json::error_handler_t::replace).c_str());
  return status;
}

}  // namespace

void add_policy(CLI::App* app, Outcome* outcome) {
  CLI::App* policy = app->add_subcommand("policy", "Look at a policy before a run is started with it.");
  policy->require_subcommand(1);
  policy->footer(kFooter);
  CLI::App* command =
      policy->add_subcommand("check", "Read a policy file, and print what is in effect with it.");
  command->footer(kFooter);
  const auto arguments = std::make_shared<Arguments>();
  command->add_option("FILE", arguments->file, "Policy, textproto or JSON")->required();
  command->add_flag("--json", arguments->json, "For programs: one strict JSON object");
  command->callback([arguments, outcome] { outcome->status = check(*arguments); });
}

}  // namespace holdfast::cli
