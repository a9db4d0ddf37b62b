// What a call that can fail returns: a code and a sentence.
#pragma once

#include <string>
#include <string_view>
#include <utility>

namespace holdfast {

// The reasons for which a run can end. The number is the exit code of the process, the same on every rank
// and from mpirun whenever the guard decides the exit.
enum class StatusCode : int {
  kOk = 0,
  kUsage = 64,                  // bad option, bad policy or bad input; nothing was trained
  kInternal = 80,               // internal error or an exception in the trainer
  kBudgetExhausted = 81,        // skip budget spent, or `on_first: ABORT`
  kLossScaleExhausted = 82,     // still non-finite at the smallest loss scale
  kRanksDisagree = 83,          // ranks at different attempts or policies, or replicas that diverged
  kRankMissing = 84,            // a rank is missing or stuck
  kNoCleanGeneration = 85,      // no clean checkpoint to restore
  kStoppedByOperator = 86,      // an orderly stop was asked for
  kRestartNotAcknowledged = 87  // an earlier abort was not acknowledged
};

// The code as it is written in logs, e.g. "BUDGET_EXHAUSTED".
std::string_view status_code_name(StatusCode code);

// Success, or a code with a message that says what failed, where, and what to do about it.
// Cheap to copy when ok. Not thread-safe: guard shared objects yourself.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  static Status ok_status() { return Status(); }
  static Status usage(std::string message) { return {StatusCode::kUsage, std::move(message)}; }
  static Status internal(std::string message) { return {StatusCode::kInternal, std::move(message)}; }

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  int exit_code() const { return static_cast<int>(code_); }
  const std::string& message() const { return message_; }

  // "USAGE (64): policy.textproto:3: unknown field"; "OK" when ok.
  std::string to_string() const;

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

}  // namespace holdfast
