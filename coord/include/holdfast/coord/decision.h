// What the ranks do with an attempt.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "holdfast/collectives/record.h"
#include "holdfast/collectives/status.h"
#include "holdfast/coord/generation_id.h"

namespace holdfast {

enum class Action : int { kApply, kSkip, kRollBack, kAbort, kStop };
std::string_view action_name(Action action);  // "APPLY", ...

// What rank 0 wants kept of an attempt that was not clean.
struct EvidenceOrder {
  std::vector<int> ranks;         // that contribute in full, ascending
  bool full = false;              // with tensors
  bool from_all = false;          // every rank of the first origin's replica group adds its own value
  std::uint64_t bytes = 0;        // of tensors, from each of `ranks`
  std::uint64_t state_bytes = 0;  // of rank 0's state
  Stage stage = Stage::kInput;    // of the first origin's finding
  std::string tensor;
  std::int64_t index = -1;
  int micro_batch = -1;
  bool of_update = false;  // the state is what went wrong, and not the attempt
  // The attempt of `examined`, one of `ranks`, is made again by `examiner`, too. -1: by nobody.
  int examined = -1;
  int examiner = -1;
  std::uint64_t examined_bytes = 0;  // that its batch may have

  bool cross_examines() const { return examiner >= 0; }
};

// The same on every rank.
struct Decision {
  Action action = Action::kAbort;
  StatusCode code = StatusCode::kInternal;  // why the run ends; kOk for APPLY and SKIP
  std::string reason;                       // one line for people; empty for APPLY

  std::optional<EvidenceOrder> evidence = {};

  // With ROLL_BACK: the generation that rank 0 has chosen.
  std::optional<GenerationId> back_to = {};

  // A rank has no batch for the next attempt: every rank stops after this one.
  bool last_attempt_with_data = false;

  // False when the ranks could not be told (a collective failed): others may be gone, so leave with _exit and
  // do not call MPI_Finalize.
  bool agreed = true;

  bool apply() const { return action == Action::kApply; }
  // Call StepGuard::roll_back().
  bool rolls_back() const { return action == Action::kRollBack; }
  // The run is over: return exit_code() from main on every rank.
  bool ends_run() const { return action == Action::kAbort || action == Action::kStop; }
  int exit_code() const { return static_cast<int>(code); }
  Status status() const { return {code, reason}; }
};

// A decision as bytes. decode_decision() takes anything and gives false for what it cannot read.
std::string encode_decision(const Decision& decision);
bool decode_decision(const std::string& bytes, Decision* decision);

}  // namespace holdfast
