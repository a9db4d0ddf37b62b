// For whoever looks after a run: holdfast COMMAND RUN_DIR. Needs neither MPI nor the machines of the run.
#include <cstdio>
#include <exception>

#include "cli/commands.h"

namespace {

constexpr const char* kFooter = R"(
Exit codes: 0 done   64 usage, or nothing to be done in that folder   80 internal error)";

int fail(const char* why, holdfast::StatusCode code) {
  std::fprintf(stderr, "holdfast: %s\n", why);
  return static_cast<int>(code);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    CLI::App app("Looks after runs of Holdfast, by their run folders.", "holdfast");
    app.footer(kFooter);
    app.require_subcommand(1);
    holdfast::Status outcome;
    holdfast::cli::add_ack(&app, &outcome);
    try {
      app.parse(argc, argv);
    } catch (const CLI::Success& help) {
      return app.exit(help);
    } catch (const CLI::ParseError& error) {
      return fail(error.what(), holdfast::StatusCode::kUsage);
    }
    if (!outcome.ok()) return fail(outcome.message().c_str(), outcome.code());
    return 0;
  } catch (const std::exception& error) {
    return fail(error.what(), holdfast::StatusCode::kInternal);
  }
}
