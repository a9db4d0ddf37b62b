#include "holdfast/coord/dropped_data.h"

#include "holdfast/coord/state.pb.h"

namespace holdfast {

nlohmann::ordered_json DroppedData::count(std::uint64_t epoch, std::uint64_t attempt, int origin) {
  std::vector<std::vector<Sample>> dropped;
  for (int rank = 0; rank < ranks_; ++rank) dropped.push_back(source_.samples_of(rank, attempt));

  nlohmann::ordered_json fields = {{"epoch", epoch}, {"attempt", attempt}, {"origin", nullptr}};
  if (origin >= 0 && origin < ranks_) {
    fields["origin"] = origin;
    ++by_origin_[static_cast<std::size_t>(origin)];
  }
  fields["ranks"] = nlohmann::ordered_json::array();
  for (int rank = 0; rank < ranks_; ++rank) {
    std::vector<std::int64_t> ids;
    std::vector<std::int64_t> classes;
    for (const Sample& sample : dropped[static_cast<std::size_t>(rank)]) {
      ids.push_back(sample.id);
      classes.push_back(sample.label);
      const auto label = static_cast<std::uint64_t>(sample.label);
      if (label < by_class_.size()) ++by_class_[label];
    }
    nlohmann::ordered_json of_rank = {{"rank", rank}, {"samples", std::move(ids)}};
    if (!by_class_.empty()) of_rank["classes"] = std::move(classes);
    fields["ranks"].push_back(std::move(of_rank));
  }
  return fields;
}

std::optional<DroppedDataSkew> DroppedData::next_skew() {
  const auto look = [](const char* of, const std::vector<std::uint64_t>& observed,
                       const std::vector<std::uint64_t>& weights,
                       bool* told) -> std::optional<DroppedDataSkew> {
    if (*told) return std::nullopt;
    const auto fit = goodness_of_fit(observed, weights);
    if (!fit || fit->p >= kSmallestP) return std::nullopt;
    *told = true;
    return DroppedDataSkew{of, *fit, observed[fit->most_over]};
  };
  if (auto skew = look("classes", by_class_, source_.class_counts, &told_classes_)) return skew;
  return look("shards", by_origin_, std::vector<std::uint64_t>(by_origin_.size(), 1), &told_shards_);
}

void DroppedData::save(RunState* state) const {
  state->mutable_dropped_by_class()->Assign(by_class_.begin(), by_class_.end());
  state->mutable_dropped_by_origin()->Assign(by_origin_.begin(), by_origin_.end());
  state->set_told_skewed_classes(told_classes_);
  state->set_told_skewed_shards(told_shards_);
}

void DroppedData::restore(const RunState& state) {
  if (static_cast<std::size_t>(state.dropped_by_class_size()) == by_class_.size()) {
    by_class_.assign(state.dropped_by_class().begin(), state.dropped_by_class().end());
    told_classes_ = state.told_skewed_classes();
  }
  if (state.dropped_by_origin_size() == ranks_) {
    by_origin_.assign(state.dropped_by_origin().begin(), state.dropped_by_origin().end());
    told_shards_ = state.told_skewed_shards();
  }
}

}  // namespace holdfast
