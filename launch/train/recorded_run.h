// What a bundle says of the run that an attempt was part of, as this program's own options.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "holdfast/replay.h"
#include "train/local_attempt.h"
#include "train/options.h"
#include "train/replay_settings.h"

namespace holdfast::train {

struct RecordedRun {
  ReplaySettings settings;
  Options options;
  AttemptPlan plan;           // without the batch
  std::vector<Fault> faults;  // that hit this rank
  std::vector<NaturalFaultSpec> natural_faults;
  bool sum_overflow_off = false;  // the attempt had it, and the experiment is without
};

// All but the faults, with the attempt's settings. USAGE for a bundle that is not this program's.
Status read_run(const RecordedAttempt& attempt, RecordedRun* run);
// Of it, run->plan alone, for run->options and run->settings; and the batch into it.
Status read_plan(const RecordedAttempt& attempt, RecordedRun* run);
void put_batch(const RecordedAttempt& attempt, AttemptPlan* plan);
// Once there is a model for them to strike. What would end the process is left out: it tells nothing here.
Status read_faults(const RecordedAttempt& attempt, Workload& workload, RecordedRun* run);

// Adds the batch again, from the data set and the sample ids on record. USAGE when they do not fit.
Status load_batch(const std::vector<std::string>& data, RecordedAttempt* attempt);

// "" for none.
std::string configured(const RecordedAttempt& attempt, const std::string& name);
// A fact that parse_exact() takes.
bool read_number(const RecordedAttempt& attempt, std::string_view name, double* value);

}  // namespace holdfast::train
