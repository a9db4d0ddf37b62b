// The subcommands of `holdfast`, one file each.
#pragma once

#include <CLI/CLI.hpp>

#include "holdfast/collectives/status.h"

namespace holdfast::cli {

// What came of the command that was called.
struct Outcome {
  Status status;
  bool not_yet = false;  // what was asked for is on its way, and was not waited for
  bool bad = false;      // what was asked about is not as it should be; it has been said how
};

// Each adds its subcommand to `app`. When that is the one that was called, it does its work while the command
// line is parsed and leaves what came of it in `*outcome`; both must outlive the parsing.
void add_ack(CLI::App* app, Outcome* outcome);
void add_checkpoint(CLI::App* app, Outcome* outcome);
void add_completion(CLI::App* app, Outcome* outcome);  // after the others
void add_incident(CLI::App* app, Outcome* outcome);
void add_policy(CLI::App* app, Outcome* outcome);
void add_status(CLI::App* app, Outcome* outcome);
void add_stop(CLI::App* app, Outcome* outcome);

}  // namespace holdfast::cli
