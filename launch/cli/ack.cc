#include <cstdio>
#include <memory>
#include <string>

#include "cli/commands.h"
#include "holdfast/coord/acknowledgement.h"
#include "holdfast/coord/printable.h"

namespace holdfast::cli {
namespace {

constexpr const char* kFooter = R"(
Example:
  holdfast ack runs/long --owner ana --note "shard 3 was damaged, replaced" --ticket RUN-142
Exit codes: 0 acknowledged   64 usage, or nothing to acknowledge in that folder   80 it could not be written)";

struct Arguments {
  std::string run_dir;
  Acknowledgement acknowledgement;
};

Status run(const Arguments& arguments) {
  std::string what;
  if (Status s = acknowledge(arguments.run_dir, arguments.acknowledgement, &what); !s.ok()) return s;
  std::printf("acknowledged by %s: %s\nThe run may be resumed. Its budgets go on, or back with it to its checkpoint.\n",
              printable(arguments.acknowledgement.owner).c_str(), what.c_str());
  return Status();
}

}  // namespace

void add_ack(CLI::App* app, Outcome* outcome) {
  CLI::App* command = app->add_subcommand(
      "ack", "Answer for an aborted run, so that it can be resumed: who looked at it, and what was found.");
  command->footer(kFooter);
  const auto arguments = std::make_shared<Arguments>();
  command->add_option("RUN_DIR", arguments->run_dir, "Folder of the run")->required();
  command->add_option("--owner", arguments->acknowledgement.owner, "Who answers for going on")->required();
  command->add_option("--note", arguments->acknowledgement.note, "What was found, and what was done about it")
      ->required();
  command->add_option("--ticket", arguments->acknowledgement.ticket,
                      "Where it is followed up: a name or URL");
  command->callback([arguments, outcome] { outcome->status = run(*arguments); });
}

}  // namespace holdfast::cli
