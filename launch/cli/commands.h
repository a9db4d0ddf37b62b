// The subcommands of `holdfast`, one file each.
#pragma once

#include <CLI/CLI.hpp>

#include "holdfast/collectives/status.h"

namespace holdfast::cli {

// Each adds its subcommand to `app`. When that is the one that was called, it does its work while the command
// line is parsed and leaves what came of it in `*outcome`; both must outlive the parsing.
void add_ack(CLI::App* app, Status* outcome);

}  // namespace holdfast::cli
