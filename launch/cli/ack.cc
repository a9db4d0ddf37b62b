#include <cstdio>
#include <memory>
#include <string>

#include "cli/commands.h"
#include "holdfast/coord/acknowledgement.h"
#include "holdfast/coord/printable.h"

namespace holdfast::cli {
namespace {

struct Arguments {
  std::string run_dir;
  Acknowledgement acknowledgement;
};

Status run(const Arguments& arguments) {
  std::string what;
  if (Status s = acknowledge(arguments.run_dir, arguments.acknowledgement, &what); !s.ok()) return s;
  std::printf("acknowledged by %s: %s\nThe run may be resumed. Its budgets go on as they were.\n",
              printable(arguments.acknowledgement.owner).c_str(), what.c_str());
  return Status();
}

}  // namespace

void add_ack(CLI::App* app, Status* outcome) {
  CLI::App* command = app->add_subcommand(
      "ack", "Answer for an aborted run, so that it can be resumed: who looked at it, and what was found.");
  const auto arguments = std::make_shared<Arguments>();
  command->add_option("RUN_DIR", arguments->run_dir, "Folder of the run")->required();
  command->add_option("--owner", arguments->acknowledgement.owner, "Who answers for going on")->required();
  command->add_option("--note", arguments->acknowledgement.note, "What was found, and what was done about it")
      ->required();
  command->add_option("--ticket", arguments->acknowledgement.ticket,
                      "Where it is followed up: a name or URL");
  command->callback([arguments, outcome] { *outcome = run(*arguments); });
}

}  // namespace holdfast::cli
