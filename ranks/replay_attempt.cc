#include "replay_attempt.h"

#include <fmt/format.h>

#define XXH_STATIC_LINKING_ONLY  // a state on the stack
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <exception>

#include "checkpoint/part_file.h"
#include "holdfast/coord/evidence/evidence.pb.h"
#include "holdfast/coord/printable.h"
#include "holdfast/coord/storage/sha256.h"

namespace holdfast {
namespace {

// What `body` returns or throws, as "" or a reason.
template <typename Body>
std::string refusal(const char* who, Body&& body) {
  try {
    const Status status = body();
    return status.ok() ? "" : printable(status.message());
  } catch (const std::exception& error) {
    return fmt::format("{} failed: {}", who, printable(error.what()));
  } catch (...) {
    return fmt::format("{} failed: exception of unknown type", who);
  }
}

void zero_row(RecordedTensor& tensor, std::int64_t row) {
  const std::size_t size = tensor.bytes.size() / static_cast<std::size_t>(tensor.shape[0]);
  std::memset(tensor.bytes.data() + static_cast<std::size_t>(row) * size, 0, size);
}

void blank(const ReplayTrainer& trainer, const RecordedSample& sample, std::vector<RecordedTensor>* batch) {
  for (RecordedTensor& tensor : *batch) {
    if (tensor.micro_batch != sample.micro_batch || tensor.shape.empty() || sample.index >= tensor.shape[0])
      continue;
    trainer.blank ? trainer.blank(tensor, sample.index) : zero_row(tensor, sample.index);
  }
}

Status blank_all(const ReplayTrainer& trainer, const std::vector<RecordedSample>& samples,
                 std::vector<RecordedTensor>* batch) {
  for (const RecordedSample& sample : samples) blank(trainer, sample, batch);
  return Status();
}

std::string digest_of(const RecordedAttempt& attempt) {
  std::string all;
  for (const RecordedTensor& tensor : attempt.batch) {
    all += fmt::format("{} {} {} {}\n", tensor.name.size(), tensor.name, tensor.micro_batch,
                       tensor.bytes.size());
    all += sha256(tensor.bytes);
  }
  return hex(sha256(all));
}

// What is stored of complex128 has one more extent of 2. Of no extents at all a bundle makes one of 1.
bool same_shape(const StateTensor& tensor, const RecordedTensor& kept) {
  std::vector<std::int64_t> shape = tensor.shape;
  std::vector<std::int64_t> stored = kept.shape;
  if (tensor.dtype == DType::kComplex128) {
    if (stored.empty() || stored.back() != 2) return false;
    stored.pop_back();
  }
  if (shape.empty()) shape.push_back(1);
  if (stored.empty()) stored.push_back(1);
  return shape == stored;
}

}  // namespace

std::int64_t count_samples(const RecordedAttempt& attempt, int micro_batch) {
  std::optional<std::int64_t> count;
  for (const RecordedTensor& tensor : attempt.batch) {
    if (tensor.micro_batch != micro_batch) continue;
    const std::int64_t rows = tensor.shape.empty() ? 0 : tensor.shape[0];
    if (count && *count != rows) return 0;
    count = rows;
  }
  return count.value_or(0);
}

ReplayOutcome AttemptReplay::run(const std::vector<std::string>& settings,
                                 const std::vector<RecordedSample>& blanked) {
  ReplayOutcome outcome;
  RecordedAttempt recorded = recorded_.attempt();
  recorded.settings = settings;
  std::string before, after;
  const auto refused = [&](const char* who, auto&& body) {
    outcome.missing = refusal(who, body);
    return !outcome.missing.empty();
  };
  if (refused("prepare", [&] { return prepare(recorded); })) return outcome;
  if (refused("load_state", [&] { return load_state(); })) return outcome;
  if (refused("blank", [&] { return blank_all(trainer_, blanked, &recorded.batch); })) return outcome;
  if (refused("weights_digest", [&] { return before = weights(), Status(); })) return outcome;
  outcome.batch_sha256 = digest_of(recorded);
  ReplayWatcher watcher;
  make(recorded, watcher);
  outcome.missing = watcher.missing_;
  if (!outcome.missing.empty()) return outcome;
  if (refused("weights_digest", [&] { return after = weights(), Status(); })) return outcome;
  outcome.weights_untouched = before == after;
  outcome.found = watcher.earliest();
  outcome.notes = watcher.notes_;
  const EvidencePart& seen = watcher.recorder_.part();
  outcome.first_dirty = seen.first_dirty();
  outcome.last_clean = seen.last_clean();
  outcome.bits = compare_measurements(seen, recorded_.origin());
  return outcome;
}

void AttemptReplay::make(const RecordedAttempt& recorded, ReplayWatcher& watcher) {
  // What is thrown outside of run().
  const auto call = [&](const auto& callback) {
    try {
      callback(recorded, watcher);
    } catch (const std::exception& error) {
      watcher.fail(error.what());
    } catch (...) {
      watcher.fail("exception of unknown type");
    }
  };
  call(trainer_.run_attempt);
  const Stage stage = recorded_.boundary().stage;
  if (!is_made_in_part(stage) || !recorded_.boundary().error.empty() || watcher.earliest()) return;
  const bool of_sum = stage == Stage::kReduction;
  const auto& again = of_sum ? trainer_.reduce_again : trainer_.update_again;
  watcher.stage_ = stage;
  if (again) call(again);
  if (!again)
    watcher.lacks(of_sum ? "a trainer that makes the sum again" : "a trainer that makes the update again");
}

Status AttemptReplay::prepare(const RecordedAttempt& recorded) {
  if (prepared_ == recorded.settings) return Status();
  prepared_.reset();
  if (trainer_.prepare) {
    if (Status s = trainer_.prepare(recorded); !s.ok()) return s;
  } else if (!recorded.settings.empty()) {
    return Status::usage("this trainer has no settings: " + recorded.settings.front());
  }
  prepared_ = recorded.settings;
  return Status();
}

Status AttemptReplay::load_state() {
  if (trainer_.state) return fill(trainer_.state());
  if (std::string why = recorded_.read_state(trainer_.needed_state); !why.empty()) return Status::usage(why);
  for (const auto& [name, tensor] : recorded_.state()) {
    if (Status s = trainer_.load_state(tensor); !s.ok()) return s;
  }
  return Status();
}

Status AttemptReplay::fill(const TrainingState& state) {
  if (Status s = state.check(); !s.ok()) return s;
  std::vector<std::string> needed;
  for (const StateTensor& tensor : state.tensors()) needed.push_back(tensor.name);
  for (const StateBytes& bytes : state.bytes()) {
    if (!bytes.renewable) needed.push_back(bytes.name);
  }
  if (std::string why = recorded_.read_state(needed); !why.empty()) return Status::usage(why);
  const auto refuse = [&](const std::string& name) {
    return Status::usage(not_of_rank(name, recorded_.attempt().rank));
  };
  for (const StateTensor& tensor : state.tensors()) {
    if (tensor.held != Held::kReplicated && !recorded_.has_own_state()) return refuse(tensor.name);
    const RecordedTensor& kept = recorded_.state().at(tensor.name);
    if (stored_dtype(kept.dtype) != stored_dtype(tensor.dtype) || !same_shape(tensor, kept) ||
        std::ssize(kept.bytes) != tensor.bytes())
      return Status::usage(tensor.name + " is of another model");
    if (!kept.bytes.empty()) std::memcpy(tensor.data, kept.bytes.data(), kept.bytes.size());
  }
  for (const StateBytes& bytes : state.bytes()) {
    const auto kept = recorded_.state().find(bytes.name);
    const bool others = bytes.held != Held::kReplicated && !recorded_.has_own_state();
    if (others && !bytes.renewable) return refuse(bytes.name);
    if (others || kept == recorded_.state().end()) continue;
    if (Status s = bytes.load(kept->second.bytes); !s.ok()) return s;
  }
  return Status();
}

// Of what an update changes and forward does not.
std::string AttemptReplay::weights() const {
  if (trainer_.weights_digest) return trainer_.weights_digest();
  XXH3_state_t hash;
  XXH3_128bits_reset(&hash);
  const TrainingState state = trainer_.state();
  for (const StateTensor& tensor : state.tensors()) {
    if (tensor.forward_mutates) continue;
    XXH3_128bits_update(&hash, tensor.data, static_cast<std::size_t>(tensor.bytes()));
  }
  const XXH128_hash_t digest = XXH3_128bits_digest(&hash);
  return fmt::format("{:016x}{:016x}", digest.high64, digest.low64);
}

}  // namespace holdfast
