#include "part_reports.h"

#include <fmt/format.h>

#include "holdfast/coord/printable.h"
#include "part_file.h"

namespace holdfast {
namespace {

// Why a report that claims to be whole is not what `rank` had to write; "" when it is.
std::string fault_of(const PartReport& report, int rank, const GenerationId& id) {
  if (report.rank() != rank) return fmt::format("its report is of rank {}", report.rank());
  if (const GenerationId of{report.epoch(), report.attempt()}; of != id) {
    return fmt::format("it is at {} where rank 0 is at {}", of.name(), id.name());
  }
  for (const Part& part : report.parts()) {
    const bool is_replicated = rank == 0 && !part.has_rank() && part.file() == part_file_name(-1);
    const bool is_own = part.has_rank() && part.rank() == rank && part.file() == part_file_name(rank);
    if (!is_replicated && !is_own) return "its report names " + printable(part.file());
  }
  return "";
}

Refusal refusal_of(const Bytes& bytes, int rank, bool writes, const GenerationId& id, PartReport* report) {
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
  const std::string why = fault_of(*report, rank, id);
  return why.empty() ? Refusal{} : of_rank(why);
}

}  // namespace

Refusal assemble(const std::vector<Bytes>& reports, const RanksState& ranks, const GenerationId& id,
                 Manifest* manifest) {
  Refusal first;
  for (std::size_t r = 0; r < reports.size(); ++r) {
    PartReport report;
    const Refusal refusal = refusal_of(reports[r], static_cast<int>(r), ranks.writes[r], id, &report);
    if (first.reason.empty() || (refusal.non_finite && !first.non_finite)) {
      if (!refusal.reason.empty()) first = refusal;
    }
    for (Part& part : *report.mutable_parts()) *manifest->add_parts() = std::move(part);
  }
  return first;
}

}  // namespace holdfast
