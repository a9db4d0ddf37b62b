// Incidents to decide on, without ranks that had them.
#pragma once

#include <string>
#include <utility>

#include "holdfast/coord/incident.h"

namespace holdfast {

inline Record clean_record(int world_size) {
  Record sum;
  for (int r = 0; r < world_size; ++r) {
    Record record;
    record.set_participant(agreement_coefficient(r, world_size) * agreement_hash({1, 7, 42}));
    sum += record;
  }
  return sum;
}

// An incident of `world_size` ranks at attempt 7 of epoch 1, after 5 updates; `edit(record)` says what went
// wrong.
template <typename Edit>
Incident sample_incident(int world_size, Edit&& edit) {
  Record sum = clean_record(world_size);
  edit(sum);
  return {1, 7, 5, judge(sum, world_size), {}};
}

inline RankView sample_view(int rank, std::vector<Finding> findings) {
  RankView view;
  view.rank = rank;
  view.host = "node" + std::to_string(rank);
  view.findings = std::move(findings);
  view.agreement = {1, 7, 42};
  return view;
}

// One NaN in conv1.weight[71] on `rank` of four, whose loss was NaN.
inline Incident one_nan(int rank) {
  Incident incident = sample_incident(4, [&](Record& sum) {
    sum.add_bad(Stage::kBackward, {1, 0, 0});
    sum.mark_bad(rank);
  });
  incident.views = {sample_view(rank, {{Stage::kBackward, "conv1.weight", 71, {1, 0, 0}, 2}})};
  incident.views[0].has_loss = true;
  return incident;
}

inline Incident exception_on(int rank, const std::string& what) {
  Incident incident = sample_incident(4, [&](Record& sum) {
    sum.set_error();
    sum.mark_bad(rank);
  });
  incident.views = {sample_view(rank, {})};
  incident.views[0].error = LocalError{Stage::kForward, what};
  return incident;
}

}  // namespace holdfast
