#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "holdfast/checkpoint/generation.h"
#include "holdfast/checkpoint/manifest.pb.h"
#include "holdfast/coord/printable.h"
#include "holdfast/coord/run_folder.h"

namespace holdfast::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kFooter = R"(
A generation is complete when its manifest is whole and all its files are there with their sizes, whole when every byte is
what was written, and finite when no tensor that must be finite holds NaN or an infinity. `list` looks at complete only.
What is listed as set aside was refused at a restore or left behind by a rollback; it is never restored.
Examples:
  holdfast checkpoint list runs/long
  holdfast checkpoint verify runs/long                      # reads all of every generation
  holdfast checkpoint verify runs/long e0001-a0000000600
  holdfast checkpoint show runs/long e0001-a0000000600      # its tensors, and who holds them
Exit codes: 0 shown, and what was verified is clean   1 `verify` found a generation that is not clean, or `show` one whose
            manifest cannot be read   64 usage, or no such generation in that folder)";

struct Arguments {
  std::string run_dir;
  std::vector<std::string> names;
  bool json = false;
};

void print_json(const Json& json) {
  fmt::print("{}\n", json.dump(1, ' ', true, Json::error_handler_t::replace));
}

// What the folder holds that is no generation: names, printable.
struct Others {
  std::vector<std::string> set_aside;
  std::vector<std::string> partial;  // being written, or left by a run that was killed
};

Status look(const std::string& run_dir, std::vector<GenerationId>* ids, Others* others) {
  FileSystem& files = real_file_system();
  const std::string checkpoints = checkpoints_path(run_dir);
  if (!files.exists(checkpoints)) {
    return RunFolder::holds_record(run_dir) ? Status() : Status::usage("there is no run in " + run_dir);
  }
  if (Status s = list_generations(files, checkpoints, ids); !s.ok()) return Status::usage(s.message());
  std::vector<std::string> names;
  if (Status s = files.list(checkpoints, &names); !s.ok()) return Status::usage(s.message());
  for (const std::string& name : names) {
    if (name.starts_with('.') && name.ends_with(".partial")) others->partial.push_back(printable(name));
  }
  const std::string set_aside = checkpoints + "/" + std::string(kSetAsideName);
  if (!files.exists(set_aside)) return Status();
  if (Status s = files.list(set_aside, &names); !s.ok()) return Status::usage(s.message());
  for (const std::string& name : names) others->set_aside.push_back(printable(name));
  return Status();
}

// The generations that were named, or all; at least one.
Status chosen(const Arguments& arguments, std::vector<GenerationId>* ids) {
  Others others;
  std::vector<GenerationId> all;
  if (Status s = look(arguments.run_dir, &all, &others); !s.ok()) return s;
  for (const std::string& name : arguments.names) {
    GenerationId id;
    if (!parse_generation_name(name, &id) || !std::ranges::binary_search(all, id)) {
      return Status::usage("there is no generation " + name + " in " + checkpoints_path(arguments.run_dir));
    }
    ids->push_back(id);
  }
  if (arguments.names.empty()) *ids = std::move(all);
  return ids->empty() ? Status::usage("there is no generation in " + checkpoints_path(arguments.run_dir))
                      : Status();
}

Json listed(const GenerationReport& report, const Manifest& manifest) {
  Json json = {{"generation", report.id.name()}, {"epoch", report.id.epoch}, {"attempt", report.id.attempt}};
  const bool readable = manifest.has_epoch();
  json["update"] = readable ? Json(manifest.update()) : Json();
  json["skips"] = readable ? Json(manifest.skips()) : Json();
  json["ranks"] = readable ? Json(manifest.ranks()) : Json();
  json["time"] = readable ? Json(manifest.time()) : Json();
  json["bytes"] = readable ? Json(report.bytes) : Json();
  json["complete"] = report.complete;
  json["faults"] = report.faults;
  json["strangers"] = report.strangers;
  return json;
}

std::string shown(const Json& value) {
  return value.is_null() ? "-" : value.is_string() ? printable(value.get<std::string>()) : value.dump();
}

void print_notes(const std::vector<std::string>& faults, const std::vector<std::string>& strangers) {
  for (const std::string& fault : faults) fmt::print("  fault: {}\n", fault);
  for (const std::string& name : strangers) fmt::print("  no part of it, and not read: {}\n", name);
}

Status list(const Arguments& arguments) {
  std::vector<GenerationId> ids;
  Others others;
  if (Status s = look(arguments.run_dir, &ids, &others); !s.ok()) return s;
  FileSystem& files = real_file_system();
  const std::string checkpoints = checkpoints_path(arguments.run_dir);
  Json rows = Json::array();
  for (const GenerationId& id : ids) {
    Manifest manifest;
    (void)read_manifest(files, checkpoints, id, &manifest);  // the report says what is wrong with it
    rows.push_back(listed(inspect_generation(files, checkpoints, id), manifest));
  }
  if (arguments.json) {
    print_json({{"run_dir", arguments.run_dir},
                {"generations", rows},
                {"set_aside", others.set_aside},
                {"partial", others.partial}});
    return Status();
  }
  if (rows.empty()) fmt::print("no generations in {}\n", printable(checkpoints));
  if (!rows.empty()) {
    fmt::print("{:<20} {:>10} {:>5} {:>14}  {:<24}  complete\n", "generation", "update", "ranks", "bytes",
               "begun");
  }
  for (const Json& row : rows) {
    fmt::print("{:<20} {:>10} {:>5} {:>14}  {:<24}  {}\n", shown(row["generation"]), shown(row["update"]),
               shown(row["ranks"]), shown(row["bytes"]), shown(row["time"]),
               row["complete"].get<bool>() ? "yes" : "no");
    print_notes(row["faults"], row["strangers"]);
  }
  for (const std::string& name : others.set_aside) fmt::print("set aside: {}\n", name);
  for (const std::string& name : others.partial) {
    fmt::print("being written, or left by a run that was killed: {}\n", name);
  }
  return Status();
}

const char* yes_or_no(bool yes) { return yes ? "yes" : "no"; }

void print_verdict(const GenerationReport& report) {
  if (report.clean()) {
    fmt::print("{}: clean, {} bytes\n", report.id.name(), report.bytes);
  } else {
    fmt::print("{}: NOT CLEAN: complete {}, whole {}, finite {}\n", report.id.name(),
               yes_or_no(report.complete), yes_or_no(report.whole),
               report.whole ? yes_or_no(report.finite) : "not known");
  }
  print_notes(report.faults, report.strangers);
  std::fflush(stdout);  // the next one may take minutes
}

Outcome verify(const Arguments& arguments) {
  std::vector<GenerationId> ids;
  if (Status s = chosen(arguments, &ids); !s.ok()) return {s};
  FileSystem& files = real_file_system();
  const std::string checkpoints = checkpoints_path(arguments.run_dir);
  Json rows = Json::array();
  std::size_t clean = 0;
  std::size_t verified = 0;
  for (const GenerationId& id : ids) {
    const GenerationReport report = verify_generation(files, checkpoints, id);
    if (!report.clean() && !files.exists(generation_path(checkpoints, id))) {
      // A live run keeps so many only.
      if (!arguments.json) fmt::print("{}: removed while it was read\n", id.name());
      continue;
    }
    ++verified;
    clean += report.clean() ? 1 : 0;
    if (!arguments.json) print_verdict(report);
    rows.push_back({{"generation", id.name()},
                    {"clean", report.clean()},
                    {"complete", report.complete},
                    {"whole", report.whole},
                    {"finite", report.whole ? Json(report.finite) : Json()},
                    {"bytes", report.bytes},
                    {"faults", report.faults},
                    {"strangers", report.strangers}});
  }
  const bool all_clean = clean == verified;
  if (arguments.json) {
    print_json({{"run_dir", arguments.run_dir}, {"clean", all_clean}, {"generations", rows}});
  } else {
    fmt::print("{} of {} clean\n", clean, verified);
  }
  return {Status(), false, !all_clean};
}

// Name of the part's replica group, printable; "" when there is only one.
std::string group_of(const Manifest& manifest, const Part& part) {
  return part.has_group() ? printable(manifest.groups(static_cast<int>(part.group()))) : "";
}

std::string held_by(const Manifest& manifest, const Part& part, const TensorEntry& tensor) {
  const std::string group = group_of(manifest, part);
  if (!part.has_rank()) return group.empty() ? "all ranks" : "all ranks of " + group;
  std::string held = fmt::format("rank {}{}", part.rank(), group.empty() ? "" : " of " + group);
  if (!tensor.has_shard_offset() || tensor.bytes() == 0) return held;
  std::uint64_t elements = 1;
  for (const std::uint64_t extent : tensor.shape()) elements *= extent;
  return held + fmt::format(", elements {}-{} of {}", tensor.shard_offset(),
                            tensor.shard_offset() + elements - 1, tensor.shard_total());
}

Json described(const Manifest& manifest, const Part& part, const TensorEntry& tensor) {
  Json json = {{"name", tensor.name()},
               {"dtype", tensor.dtype()},
               {"shape", std::vector<std::uint64_t>(tensor.shape().begin(), tensor.shape().end())},
               {"bytes", tensor.bytes()},
               {"file", part.file()},
               {"rank", part.has_rank() ? Json(part.rank()) : Json()},
               {"replica_group", part.has_group() ? Json(group_of(manifest, part)) : Json()},
               {"kind", tensor.is_bytes() ? "bytes" : "tensor"},
               {"must_be_finite", !tensor.may_be_non_finite()},
               {"xxh3_128", fmt::format("{:016x}{:016x}", tensor.digest_high(), tensor.digest_low())}};
  json["shard_offset"] = tensor.has_shard_offset() ? Json(tensor.shard_offset()) : Json();
  json["shard_total"] = tensor.has_shard_total() ? Json(tensor.shard_total()) : Json();
  return json;
}

void print(const GenerationId& id, const Manifest& manifest) {
  fmt::print("{}: epoch {}, attempt {}, {} updates, {} skips, {} ranks, begun {}, by version {}\n", id.name(),
             manifest.epoch(), manifest.attempt(), manifest.update(), manifest.skips(), manifest.ranks(),
             printable(manifest.time()), printable(manifest.version()));
  for (const Part& part : manifest.parts()) {
    fmt::print("{}: {} bytes\n", part.file(), part.file_bytes());
    for (const TensorEntry& tensor : part.tensors()) {
      const std::vector<std::uint64_t> shape(tensor.shape().begin(), tensor.shape().end());
      fmt::print("  {:<40} {:<8} {:<16} {:>12}  {}{}\n", printable(tensor.name()),
                 tensor.is_bytes() ? "bytes" : tensor.dtype(), tensor.is_bytes() ? "" : Json(shape).dump(),
                 tensor.bytes(), held_by(manifest, part, tensor),
                 tensor.may_be_non_finite() ? ", need not be finite" : "");
    }
  }
}

Outcome show(const Arguments& arguments) {
  std::vector<GenerationId> ids;
  if (Status s = chosen(arguments, &ids); !s.ok()) return {s};
  const GenerationId& id = ids.front();
  Manifest manifest;
  if (Status s = read_manifest(real_file_system(), checkpoints_path(arguments.run_dir), id, &manifest);
      !s.ok()) {
    std::fprintf(stderr, "holdfast: %s\n", printable(s.message()).c_str());
    return {Status(), false, true};
  }
  if (!arguments.json) {
    print(id, manifest);
    return {};
  }
  Json tensors = Json::array();
  for (const Part& part : manifest.parts()) {
    for (const TensorEntry& tensor : part.tensors()) tensors.push_back(described(manifest, part, tensor));
  }
  print_json({{"generation", id.name()},
              {"epoch", manifest.epoch()},
              {"attempt", manifest.attempt()},
              {"update", manifest.update()},
              {"skips", manifest.skips()},
              {"ranks", manifest.ranks()},
              {"time", manifest.time()},
              {"version", manifest.version()},
              {"tensors", tensors}});
  return {};
}

CLI::App* add(CLI::App* checkpoint, const char* name, const char* about,
              const std::shared_ptr<Arguments>& arguments) {
  CLI::App* command = checkpoint->add_subcommand(name, about);
  command->footer(kFooter);
  command->add_option("RUN_DIR", arguments->run_dir, "Folder of the run")->required();
  command->add_flag("--json", arguments->json, "For programs: one strict JSON object");
  return command;
}

}  // namespace

void add_checkpoint(CLI::App* app, Outcome* outcome) {
  CLI::App* checkpoint = app->add_subcommand("checkpoint", "Look at a run's checkpoints, and verify them.");
  checkpoint->require_subcommand(1);
  checkpoint->footer(kFooter);
  const auto arguments = std::make_shared<Arguments>();
  add(checkpoint, "list", "Show which generations there are, and what was set aside.", arguments)
      ->callback([arguments, outcome] { outcome->status = list(*arguments); });
  CLI::App* command = add(checkpoint, "verify",
                          "Read every byte of the generations, or of those named, and judge it.", arguments);
  command->add_option("GENERATION", arguments->names, "Such as e0001-a0000000600; all when none is named");
  command->callback([arguments, outcome] { *outcome = verify(*arguments); });
  command = add(checkpoint, "show", "Show what a generation is made of.", arguments);
  command->add_option("GENERATION", arguments->names, "Such as e0001-a0000000600")->required()->expected(1);
  command->callback([arguments, outcome] { *outcome = show(*arguments); });
}

}  // namespace holdfast::cli
