// For whoever looks after a run: holdfast COMMAND RUN_DIR. Needs neither MPI nor the machines of the run.
#include <cstdio>
#include <exception>
#include <string>

#include "cli/commands.h"
#include "holdfast/coord/printable.h"

namespace {

constexpr const char* kFooter = R"(
Examples:
  holdfast status runs/long                 how a run is doing, or how it ended
  holdfast stop runs/long                   end it in order (exit code 86)
  holdfast ack runs/long --owner ana --note "shard 3 was damaged, replaced"
  holdfast policy check run.policy          read a policy as a run would
  holdfast checkpoint verify runs/long      read its checkpoints, and say which are clean
  holdfast incident list runs/long          what is kept of its incidents
  source <(holdfast completion bash)
holdfast COMMAND --help says more of each.
Exit codes: 0 done   1 `stop` asked, and the run goes on still; a checkpoint, bundle or report is not clean   64 usage, or
            nothing to be done in that folder   80 internal error)";

int fail(const char* why, holdfast::StatusCode code) {
  std::fprintf(stderr, "holdfast: %s\n", holdfast::printable(why).c_str());
  return static_cast<int>(code);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    CLI::App app("Looks after runs of Holdfast, by their run folders.", "holdfast");
    app.footer(kFooter);
    app.require_subcommand(1);
    app.set_version_flag("--version", HOLDFAST_VERSION);
    holdfast::cli::Outcome outcome;
    holdfast::cli::add_status(&app, &outcome);
    holdfast::cli::add_stop(&app, &outcome);
    holdfast::cli::add_ack(&app, &outcome);
    holdfast::cli::add_policy(&app, &outcome);
    holdfast::cli::add_checkpoint(&app, &outcome);
    holdfast::cli::add_incident(&app, &outcome);
    holdfast::cli::add_completion(&app, &outcome);
    try {
      app.parse(argc, argv);
    } catch (const CLI::Success& help) {
      return app.exit(help);
    } catch (const CLI::ParseError& error) {
      return fail((std::string(error.what()) + ". See --help").c_str(), holdfast::StatusCode::kUsage);
    }
    if (!outcome.status.ok()) return fail(outcome.status.message().c_str(), outcome.status.code());
    return outcome.not_yet || outcome.bad ? 1 : 0;
  } catch (const std::exception& error) {
    return fail(error.what(), holdfast::StatusCode::kInternal);
  }
}
