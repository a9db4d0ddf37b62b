#include "holdfast/checkpoint/generation.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <optional>

#include "holdfast/checkpoint/manifest.pb.h"
#include "holdfast/coord/printable.h"
#include "manifest_limits.h"
#include "part_file.h"

namespace holdfast {
namespace {

constexpr std::size_t kMostFaults = 32;

// The number that `text` begins with, which is taken off it.
bool take_number(std::string_view* text, std::uint64_t* number) {
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), *number);
  if (error != std::errc()) return false;
  text->remove_prefix(static_cast<std::size_t>(end - text->data()));
  return true;
}

bool looks_like_part(std::string_view name) { return name.ends_with(".safetensors"); }

void add_fault(GenerationReport* report, const std::string& fault) {
  if (report->faults.size() < kMostFaults) report->faults.push_back(printable(fault));
  if (report->faults.size() == kMostFaults) report->faults.back() = "and more";
}

// Opens each part in its turn, and gives it to `look` if it is what the manifest says.
template <typename Look>
void look_into(FileSystem& files, const std::string& checkpoints, GenerationReport* report, Look look) {
  const std::string folder = generation_path(checkpoints, report->id);
  Manifest manifest;
  if (Status s = read_manifest(files, checkpoints, report->id, &manifest); !s.ok()) {
    add_fault(report, s.message());
    return;
  }
  report->complete = true;
  report->whole = report->finite = true;
  std::vector<std::string> extra;
  if (Status s = unexpected_files(files, folder, manifest, &extra, &report->strangers); !s.ok()) {
    report->complete = false;
    add_fault(report, s.message());
  }
  for (const std::string& name : extra) {
    report->complete = false;
    add_fault(report, folder + "/" + name + " is not in the manifest");
  }
  for (const Part& part : manifest.parts()) {
    PartReader reader;
    bool size_is_right = false;
    const Status opened = reader.open(files, folder, part, &size_is_right);
    report->bytes += part.file_bytes();
    report->complete = report->complete && size_is_right;
    report->whole = report->whole && opened.ok();
    if (!opened.ok()) {
      add_fault(report, opened.message());
    } else {
      look(reader);
    }
  }
  report->whole = report->whole && report->complete;
  report->finite = report->finite && report->whole;
}

}  // namespace

std::string GenerationId::name() const { return fmt::format("e{:04}-a{:010}", epoch, attempt); }

bool parse_generation_name(std::string_view name, GenerationId* id) {
  GenerationId parsed;
  std::string_view rest = name;
  if (!rest.starts_with("e")) return false;
  rest.remove_prefix(1);
  if (!take_number(&rest, &parsed.epoch) || !rest.starts_with("-a")) return false;
  rest.remove_prefix(2);
  if (!take_number(&rest, &parsed.attempt) || !rest.empty() || parsed.name() != name) return false;
  *id = parsed;
  return true;
}

std::string checkpoints_path(const std::string& run_dir) { return run_dir + "/checkpoints"; }

std::string generation_path(const std::string& checkpoints, const GenerationId& id) {
  return checkpoints + "/" + id.name();
}

Status list_generations(FileSystem& files, const std::string& checkpoints, std::vector<GenerationId>* out) {
  out->clear();
  if (!files.exists(checkpoints)) return Status();
  std::vector<std::string> names;
  if (Status s = files.list(checkpoints, &names); !s.ok()) return s;
  for (const std::string& name : names) {
    GenerationId id;
    if (parse_generation_name(name, &id)) out->push_back(id);
  }
  std::ranges::sort(*out);
  return Status();
}

Status read_manifest(FileSystem& files, const std::string& checkpoints, const GenerationId& id,
                     Manifest* out) {
  const std::string path = generation_path(checkpoints, id) + "/" + std::string(kManifestName);
  std::string bytes;
  out->Clear();
  if (Status s = read_file(files, path, kLargestManifest, &bytes); !s.ok()) return s;
  if (Status s = decode_manifest(bytes, out); !s.ok()) return Status::internal(path + ": " + s.message());
  const GenerationId told{out->epoch(), out->attempt()};
  if (told == id) return Status();
  out->Clear();
  return Status::internal(path + " is of another generation, " + told.name());
}

Status unexpected_files(FileSystem& files, const std::string& generation, const Manifest& manifest,
                        std::vector<std::string>* extra, std::vector<std::string>* strangers) {
  extra->clear();
  strangers->clear();
  std::vector<std::string> names;
  if (Status s = files.list(generation, &names); !s.ok()) return s;
  for (const std::string& name : names) {
    const bool expected =
        name == kManifestName ||
        std::ranges::any_of(manifest.parts(), [&](const Part& part) { return part.file() == name; });
    if (!expected) (looks_like_part(name) ? extra : strangers)->push_back(printable(name));
  }
  return Status();
}

GenerationReport inspect_generation(FileSystem& files, const std::string& checkpoints,
                                    const GenerationId& id) {
  GenerationReport report;
  report.id = id;
  look_into(files, checkpoints, &report, [](PartReader&) {});
  report.whole = report.finite = false;
  return report;
}

GenerationReport verify_generation(FileSystem& files, const std::string& checkpoints,
                                   const GenerationId& id) {
  GenerationReport report;
  report.id = id;
  look_into(files, checkpoints, &report, [&](PartReader& reader) {
    for (int i = 0; i < reader.tensors(); ++i) {
      std::optional<NonFinite> finding;
      const Status status = reader.check_tensor(i, &finding);
      if (status.ok()) continue;
      (finding ? report.finite : report.whole) = false;
      add_fault(&report, (finding ? reader.path() + ": " : "") + status.message());
    }
  });
  return report;
}

}  // namespace holdfast
