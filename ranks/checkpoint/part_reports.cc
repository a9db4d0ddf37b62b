#include "part_reports.h"

#include <fmt/format.h>

#include <algorithm>

#include "holdfast/coord/printable.h"
#include "part_file.h"

namespace holdfast {
namespace {

// Why a report that claims to be whole is not what `rank` had to write; "" when it is.
std::string fault_of(const PartReport& report, int rank, const ReplicaGroups& groups,
                     const GenerationId& id) {
  const int group = groups.only_one() ? -1 : groups.group_of(rank);
  const bool is_first = groups.only_one() ? rank == 0 : groups.is_first(rank);
  if (report.rank() != rank) return fmt::format("its report is of rank {}", report.rank());
  if (const GenerationId of{report.epoch(), report.attempt()}; of != id) {
    return fmt::format("it is at {} where rank 0 is at {}", of.name(), id.name());
  }
  for (const Part& part : report.parts()) {
    const int of_group = part.has_group() ? static_cast<int>(part.group()) : -1;
    const bool is_replicated = is_first && !part.has_rank() && part.file() == part_file_name(-1, group);
    const bool is_own = part.has_rank() && part.rank() == rank && part.file() == part_file_name(rank);
    if ((!is_replicated && !is_own) || of_group != group) return "its report names " + printable(part.file());
  }
  return "";
}

Refusal refusal_of(const Bytes& bytes, int rank, const RanksState& ranks, const GenerationId& id,
                   PartReport* report) {
  const bool writes = ranks.writes[static_cast<std::size_t>(rank)];
  const auto of_rank = [&](const std::string& why) {
    return Refusal{fmt::format("rank {}: {}", rank, why), false};
  };
  if (!report->ParseFromString(bytes)) return of_rank("its report is malformed");
  if (report->has_failure() && report->non_finite()) {
    return {fmt::format("{} on rank {}", report->failure(), rank), true};
  }
  if (report->has_failure()) return of_rank(report->failure());
  if (bytes.empty() && !writes) return {};
  if (report->parts_size() == 0) return of_rank("it has written nothing");
  const std::string why = fault_of(*report, rank, ranks.groups, id);
  return why.empty() ? Refusal{} : of_rank(why);
}

}  // namespace

Refusal assemble(const std::vector<Bytes>& reports, const RanksState& ranks, const GenerationId& id,
                 Manifest* manifest) {
  Refusal first;
  for (std::size_t r = 0; r < reports.size(); ++r) {
    PartReport report;
    const Refusal refusal = refusal_of(reports[r], static_cast<int>(r), ranks, id, &report);
    if (first.reason.empty() || (refusal.non_finite && !first.non_finite)) {
      if (!refusal.reason.empty()) first = refusal;
    }
    for (Part& part : *report.mutable_parts()) *manifest->add_parts() = std::move(part);
  }
  // By rank, and before them what the groups share, by group.
  std::stable_sort(manifest->mutable_parts()->begin(), manifest->mutable_parts()->end(),
                   [](const Part& a, const Part& b) { return a.rank() < b.rank(); });
  if (!ranks.groups.only_one()) {
    for (const std::string& name : ranks.groups.names()) manifest->add_groups(name);
  }
  return first;
}

}  // namespace holdfast
