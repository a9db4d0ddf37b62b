// The check of an incident report takes time by its stages alone: not by how many ranks, tensors or values
// the incident had, nor by how long a text it is that pretends to be one.
#include <fmt/format.h>

#include <string>
#include <vector>

#include "contest.h"
#include "holdfast/coord/evidence/evidence.pb.h"
#include "holdfast/coord/evidence/incident_report.h"
#include "require.h"

namespace holdfast {
namespace {

using bench::require;

constexpr int kRounds = 9;
constexpr double kLeastSeconds = 0.05;

struct Size {
  std::string name;
  int ranks = 1;
  int names = 1;  // of tensors, each stage
  std::size_t name_bytes = 8;
  std::uint64_t observations = 1;  // each stage
  std::uint64_t elements = 1000;   // each stage
};

// Non-finite gradients on rank 0, with all stages up to there observed.
BundleManifest incident(const Size& size) {
  BundleManifest manifest;
  manifest.set_epoch(1);
  manifest.set_attempt(7);
  manifest.set_run("bench");
  manifest.set_kind("NON_FINITE");
  manifest.set_action("SKIP");
  constexpr int kBackward = 3;
  manifest.set_stage(kBackward);
  manifest.set_nan(static_cast<std::uint64_t>(size.ranks));
  for (int rank = 0; rank < size.ranks; ++rank) {
    IncidentOrigin* origin = manifest.add_origins();
    origin->set_rank(rank);
    origin->set_stage(kBackward);
    EvidencePart* part = manifest.add_parts();
    part->set_rank(rank);
    part->set_is_origin(true);
    if (rank > 0) continue;
    for (int stage = 0; stage <= kBackward; ++stage) {
      StageTotal* total = part->add_stages();
      total->set_stage(stage);
      total->set_tensors(size.observations);
      total->set_elements(size.elements);
      total->set_nan(stage == kBackward ? 1 : 0);
      total->set_abs_max(1.5);
      total->set_dtype("F32");
      for (int i = 0; i < size.names; ++i) {
        total->add_names(fmt::format("{:04}{}", i, std::string(size.name_bytes, 'x')));
      }
    }
  }
  return manifest;
}

std::string report_of(const Size& size) {
  nlohmann::ordered_json report;
  const std::string content_id = "training-incident-evidence@sha256:" + std::string(64, '0');
  const Status made = make_incident_report(incident(size), content_id, &report);
  require(made.ok(), made.to_string());
  return report.dump();
}

void run() {
  const std::vector<Size> sizes = {
      {.name = "base"},
      {.name = "ranks_10000", .ranks = 10000},
      {.name = "elements_2^42", .elements = std::uint64_t{1} << 42},
      {.name = "observations_2^20", .observations = std::uint64_t{1} << 20},
      {.name = "names_16", .names = 16, .observations = 1 << 20},
      {.name = "names_4096", .names = 4096, .observations = 1 << 20},
      {.name = "names_at_the_caps", .names = 4096, .name_bytes = 4096, .observations = 1 << 20},
  };
  std::vector<std::string> texts;
  std::vector<std::string> names;
  for (const Size& size : sizes) {
    names.push_back(size.name);
    texts.push_back(report_of(size));
  }
  const std::size_t good = texts.size();
  for (const std::size_t kib : {127, 1024, 65536}) {
    names.push_back(fmt::format("refused_{}_kib_of_brackets", kib));
    texts.emplace_back(kib << 10, '[');
    names.push_back(fmt::format("refused_{}_kib_of_numbers", kib));
    std::string numbers = "[0";
    while (numbers.size() + 2 <= kib << 10) numbers += ",0";
    texts.push_back(numbers);
  }
  std::vector<std::function<void()>> contenders;
  for (std::size_t i = 0; i < texts.size(); ++i) {
    contenders.emplace_back([&texts, i, good] {
      require(validate_incident_report(texts[i]).ok() == (i < good), "a report is judged wrongly");
    });
  }
  contenders.push_back(contenders.front());  // the control
  names.emplace_back("control");
  texts.push_back(texts.front());
  const std::vector<double> seconds = bench::contest(contenders, kRounds, kLeastSeconds);
  for (std::size_t i = 0; i < names.size(); ++i) {
    fmt::print("validate {:32} bytes={:<9} us={:<9.1f} ratio={:.2f}\n", names[i], texts[i].size(),
               seconds[i] * 1e6, seconds[i] / seconds[0]);
  }
}

}  // namespace
}  // namespace holdfast

int main() {
  holdfast::run();
  return 0;
}
