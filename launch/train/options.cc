#include "train/options.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <map>
#include <optional>

#include "train/natural_fault_spec.h"
#include "train/replay_settings.h"

namespace holdfast::train {
namespace {

constexpr const char* kFooter = R"(
Faults: --inject KIND@STAGE[,key=value...]
  KIND   nan | inf | -inf | snan | value=X | throw | hang | stop | kill | exit=C
  STAGE  input | forward | loss | backward | reduction | optimizer
  keys   attempt=A or every=K (one of them), rank=R|all (default 0; reduction and values at optimizer: all),
         tensor=GLOB,
         index=N|first|middle|last, micro=M, epoch=E (only in this one; a rollback or restart begins the next),
         transient=yes (not again when the attempt is made again)
  e.g.   --inject nan@backward,rank=2,attempt=300,tensor=conv2.weight,index=middle

Exit codes, the same on every rank and from mpirun whenever the guard decides the exit:
  0 done   64 usage, bad policy, bad input   80 internal error or exception   81 skip or rollback budget spent, on_first: ABORT
  82 loss scale exhausted   83 ranks disagree, or replicas differ   84 a rank is missing or stuck
  85 no clean checkpoint to restore   86 stopped by the operator
  87 restart refused: the run was aborted, or fails again and again, and nobody ran `holdfast ack` on it
`holdfast stop RUN_DIR` stops a run from any host that sees its folder (86); `holdfast status RUN_DIR` shows it.
A rank killed by a signal makes mpirun return 128 + the signal's number. SIGUSR1 to mpirun, or SIGUSR1 or SIGTERM
to any one rank, stops all ranks together at the end of the running attempt, without its update (86); SIGTERM
while a rank is missing makes the others leave at once (84). SIGTERM to mpirun itself reaches the ranks too, but
mpirun kills them after a moment whether they got there or not.)";

constexpr const char* kFashionMnist = "/usr/share/datasets/fashion-mnist";
constexpr const char* kLicences = "/usr/share/common-licenses";  // text that every Debian system has

std::string default_run_dir() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  char text[64];
  std::strftime(text, sizeof(text), "runs/%Y%m%d-%H%M%S", &utc);
  return std::string(text) + "-" + std::to_string(getpid());
}

// CLI11's own ranges let NaN through.
CLI::Validator finite(const std::string& name, bool (*allowed)(double)) {
  return CLI::Validator(
      [name, allowed](const std::string& text) {
        char* end = nullptr;
        const double value = std::strtod(text.c_str(), &end);
        const bool good = !text.empty() && *end == '\0' && std::isfinite(value) && allowed(value);
        return good ? std::string() : "'" + text + "' is not a number in the range " + name;
      },
      name);
}

// CLI11 takes -1 for 2^64 - 1, and what is more than that, too: a checkpoint interval that never ends.
CLI::Validator whole_number() {
  return CLI::Validator(
      [](const std::string& text) {
        const bool digit = !text.empty() && text[0] >= '0' && text[0] <= '9';
        errno = 0;
        if (digit) std::strtoull(text.c_str(), nullptr, 0);
        const bool good = digit && errno != ERANGE;
        return good ? std::string() : "'" + text + "' is not a whole number from 0 to 2^64 - 1";
      },
      "WHOLE");
}

bool parse_data_end(const std::string& text, int* rank, std::uint64_t* attempts) {
  int used = 0;
  unsigned long long count = 0;
  if (text.find('-') != std::string::npos) return false;  // %llu would take it
  if (std::sscanf(text.c_str(), "%d=%llu%n", rank, &count, &used) != 2) return false;
  *attempts = count;
  return static_cast<std::size_t>(used) == text.size() && *rank >= 0 && count > 0;
}

Status check(const Options& options) {
  if (options.resume && options.run_dir.empty()) return Status::usage("--resume needs --run-dir");
  if (options.resume && !options.guard) return Status::usage("--resume needs the guard, which keeps the run");
  if (options.replay.empty() && !options.replay_settings.empty())
    return Status::usage("--set needs --replay");
  if (options.replay.empty() && (options.shrink || options.one_factor))
    return Status::usage("--shrink and --one-factor need --replay");
  if (options.shrink && options.one_factor)
    return Status::usage("--shrink or --one-factor: the latter shrinks first by itself");
  if (options.metrics_port && !options.guard) return Status::usage("--metrics-port needs the guard");
  for (const std::string& text : options.uneven_data) {
    int rank = 0;
    std::uint64_t attempts = 0;
    if (!parse_data_end(text, &rank, &attempts)) {
      return Status::usage("--data-ends " + text + ": not RANK=ATTEMPTS, at least one attempt");
    }
  }
  if (options.replay.empty() && options.workload == "fashion-mnist" && options.data.size() != 1) {
    return Status::usage("--data: workload fashion-mnist takes one folder, not " +
                         std::to_string(options.data.size()));
  }
  for (const std::uint64_t attempt : options.omitted_updates) {
    if (attempt >= options.steps) {
      return Status::usage("--omit-update " + std::to_string(attempt) + ": the last attempt is " +
                           std::to_string(options.steps - 1));
    }
  }
  return Status();
}

}  // namespace

DType Options::dtype() const {
  if (precision == "fp16") return DType::kFloat16;
  return precision == "bf16" ? DType::kBFloat16 : DType::kFloat32;
}

bool Options::scales_loss() const {
  return loss_scaling == "on" || (loss_scaling == "auto" && precision == "fp16");
}

std::uint64_t Options::data_ends(int rank) const {
  std::uint64_t ends = 0;
  for (const std::string& text : uneven_data) {
    int of_rank = 0;
    std::uint64_t attempts = 0;
    if (parse_data_end(text, &of_rank, &attempts) && of_rank == rank) ends = attempts;
  }
  return ends;
}

Status parse_options(int argc, const char* const* argv, Options* options, std::string* help) {
  CLI::App app(
      "Data-parallel training that skips a non-finite step on every rank together, and puts it on record.\n"
      "Run it under mpirun: mpirun -np 4 guarded_train --steps 600");
  app.footer("\nNatural faults: --fault NAME[,attempt=A|every=K][,rank=R|all][,micro=M]\n" +
             natural_fault_help() + kFooter);
  app.option_defaults()->always_capture_default();
  const CLI::Validator positive = finite("POSITIVE", [](double v) { return v > 0; });
  const CLI::Validator not_negative = finite("NONNEGATIVE", [](double v) { return v >= 0; });
  const CLI::Validator whole = whole_number();
  const CLI::Validator part = finite("0..1", [](double v) { return v >= 0 && v <= 1; });

  app.add_option("--workload", options->workload, "What to train")
      ->check(CLI::IsMember({"fashion-mnist", "gpt"}));
  app.add_option("--data", options->data,
                 "fashion-mnist: the folder with the four IDX files, plain or gzip (default: " +
                     std::string(kFashionMnist) +
                     "); gpt: text files or folders of them (default: " + std::string(kLicences) + ")");
  app.add_option("--steps", options->steps, "Attempts to make")->check(positive)->check(whole);
  app.add_option("--batch", options->batch, "Samples a rank and micro-batch")->check(CLI::Range(1, 60000));
  app.add_option("--accumulate", options->accumulate, "Micro-batches an attempt")->check(CLI::Range(1, 1024));
  app.add_option(
         "--precision", options->precision,
         "fp32, bf16 or fp16: in which gradients are held and reduced; weights and optimizer are fp32")
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}));
  app.add_option("--loss-scaling", options->loss_scaling, "auto (with fp16), on or off")
      ->check(CLI::IsMember({"auto", "on", "off"}));
  app.add_flag("--local-denominator", options->local_denominator,
               "Each rank divides its loss by its own count of targets, and is 0/0 without any");
  app.add_option("--seed", options->seed, "Of weights, sample order and dropout")->check(whole);

  std::string optimizer;
  app.add_option("--optimizer", optimizer, "sgd or adamw (default: sgd; for gpt adamw)")
      ->check(CLI::IsMember({"sgd", "adamw"}))
      ->always_capture_default(false);
  app.add_option("--momentum", options->optimizer.momentum, "sgd")->check(part);
  app.add_option("--eps", options->optimizer.eps, "adamw: added to the denominator")->check(not_negative);
  app.add_option("--weight-decay", options->optimizer.weight_decay, "sgd: L2; adamw: decoupled")
      ->check(not_negative);
  app.add_option("--clip", options->clip, "Largest global gradient norm; 0 turns clipping off")
      ->check(not_negative);
  app.add_option("--ema-decay", options->ema_decay, "Of the moving average of the weights")->check(part);

  std::optional<double> rate;
  app.add_option("--lr", rate, "Peak learning rate (default: sgd 0.05; adamw 0.002, for gpt 0.003)")
      ->check(positive);
  app.add_option("--warmup", options->schedule.warmup_updates, "Updates of linear warm-up")->check(whole);
  const std::map<std::string, Schedule::Decay> decays = {{"none", Schedule::Decay::kNone},
                                                         {"cosine", Schedule::Decay::kCosine},
                                                         {"exponential", Schedule::Decay::kExponential}};
  std::string decay = "cosine";
  app.add_option("--decay", decay, "After the warm-up: none, cosine (to 0 at --steps updates), exponential")
      ->check(CLI::IsMember({"none", "cosine", "exponential"}));
  app.add_option("--decay-rate", options->schedule.decay_rate, "Factor an update of the exponential decay")
      ->check(part);

  std::string guard = "on";
  app.add_option("--guard", guard, "off: train without the guard, to see what it prevents")
      ->check(CLI::IsMember({"on", "off"}));
  app.add_option("--policy", options->policy_file, "Policy, textproto or JSON (fields: coord/policy.proto)");
  app.add_option("--run-dir", options->run_dir, "Folder for the record of this run (default: runs/TIME-PID)");

  app.add_flag(
      "--resume", options->resume,
      "Go on with the run in --run-dir, from its newest clean checkpoint, as if it had not been interrupted. "
      "Without a run there, begin one");
  app.add_option("--checkpoint-interval", options->checkpoints.interval_attempts,
                 "Attempts between two checkpoints, written in the background to RUN_DIR/checkpoints, which "
                 "all hosts must see; there is one at the start and one at the end, too. 0: none")
      ->check(whole);
  app.add_option("--checkpoint-keep", options->checkpoints.keep, "Newest checkpoints to keep")
      ->check(CLI::Range(1, 1 << 20));
  app.add_option("--checkpoint-keep-every", options->checkpoints.keep_every,
                 "Keep one in so many for good, beside the newest; 0: none")
      ->check(whole);
  app.add_option(
         "--checkpoint-quota", options->checkpoints.quota_bytes,
         "Bytes that all checkpoints together may take (K, M, G are understood); 0: what the disk holds")
      ->transform(CLI::AsSizeValue(false))
      ->transform(whole);  // the last is the first to see the text

  app.add_option("--metrics-port", options->metrics_port,
                 "Rank 0 serves Prometheus metrics over HTTP on this port; 0 takes a free one and prints it")
      ->check(CLI::Range(0, 65535))
      ->always_capture_default(false);
  app.add_option("--metrics-address", options->metrics_address,
                 "Numeric address to serve them on; 0.0.0.0 for all interfaces: anybody may read them then");

  app.add_option(
      "--replay", options->replay,
      "Make the attempt of this incident (RUN_DIR/incidents/...) again, in one process, without updating "
      "anything. Exit code: 0 REPRODUCED, 1 DIFFERENT, 2 NOT_REPRODUCED, 3 NOT_REPLAYABLE. A state that is not in "
      "there is taken from the checkpoint right before it, in --run-dir when the incident was moved; a batch that is "
      "not, from --data, by its sample ids");
  app.add_option("--set", options->replay_settings,
                 "With --replay: " + replay_settings_help() + "; may be repeated");
  app.add_flag("--shrink", options->shrink,
               "With --replay: look for the fewest samples of the batch that still do it, the others replaced by "
               "zeros without a target, and for the first layer that is not finite");
  app.add_flag("--one-factor", options->one_factor,
               "With --replay: try precision, loss scale, learning rate, eps, faults and each sample of the "
               "smallest set, one at a time, and say which takes it away");
  app.add_option("--expect-ranks", options->expected_ranks, "Refuse any other number of ranks (exit code 83)")
      ->check(not_negative);
  app.add_option("--data-ends", options->uneven_data,
                 "RANK=ATTEMPTS: this rank has batches for so many attempts only; may be repeated");
  app.add_option("--inject", options->faults, "Put in a fault, see below; may be repeated");
  app.add_option("--fault", options->natural_faults, "Set up a natural fault, see below; may be repeated");
  app.add_option("--omit-update", options->omitted_updates,
                 "Train through this attempt without applying its update: the reference for a skip; may be "
                 "repeated")
      ->check(whole);
  app.add_flag("--print-digests", options->print_digests, "One line a rank at the end: digests of all state");
  app.add_flag("--print-rates", options->print_rates, "One line an attempt: the learning rate of its update");
  app.add_flag("--print-timing", options->print_timing,
               "One line at the end: seconds of rank 0's median and mean attempt");
  app.add_option("--evaluate", options->evaluate, "Test samples at the end; -1 for all of them")
      ->check(CLI::Range(-1, 1 << 30));
  const std::map<std::string, Progress::Mode> modes = {{"auto", Progress::Mode::kAuto},
                                                       {"line", Progress::Mode::kTerminal},
                                                       {"plain", Progress::Mode::kPlain},
                                                       {"off", Progress::Mode::kOff}};
  std::string progress = "auto";
  app.add_option("--progress", progress, "auto, line (rewrites one line), plain, off")
      ->check(CLI::IsMember({"auto", "line", "plain", "off"}));

  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    *help = app.help();
    return Status();
  } catch (const CLI::ParseError& error) {
    return Status::usage(std::string(error.what()) + " (guarded_train --help explains each option)");
  }
  const bool gpt = options->workload == "gpt";
  options->optimizer.name = !optimizer.empty() ? optimizer : gpt ? "adamw" : "sgd";
  const double usual_rate = options->optimizer.name == "sgd" ? 0.05 : gpt ? 0.003 : 0.002;
  options->schedule.peak = rate.value_or(usual_rate);
  options->schedule.decay = decays.at(decay);
  options->schedule.total_updates = options->steps;
  options->progress = modes.at(progress);
  if (options->data.empty() && options->replay.empty()) options->data = {gpt ? kLicences : kFashionMnist};
  options->guard = guard == "on";
  if (Status s = check(*options); !s.ok()) return s;
  if (options->run_dir.empty() && options->replay.empty()) options->run_dir = default_run_dir();
  return Status();
}

}  // namespace holdfast::train
