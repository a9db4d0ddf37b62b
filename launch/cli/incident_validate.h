// `holdfast incident validate FILE`
#pragma once

#include <CLI/CLI.hpp>

#include "cli/commands.h"

namespace holdfast::cli {

// Adds `validate` to the command `incident`. As in commands.h, both must outlive the parsing.
void add_incident_validate(CLI::App* incident, Outcome* outcome);

}  // namespace holdfast::cli
