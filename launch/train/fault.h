// Fault injection for guarded_train: makes an attempt fail on purpose, at a place that is named beforehand.
//
// A fault is written KIND@STAGE[,key=value...]:
//
//   KIND     nan | inf | -inf | snan | value=X   put this value into a tensor (snan has the bits 0x7f800001;
//                                                X is a decimal number, finite as fp32)
//            throw                               throw an exception
//            hang | stop                         sleep for ever | stop the process (SIGSTOP)
//            kill | exit=C                       SIGKILL | leave at once with exit code C, 0 to 255
//   STAGE    input | forward | loss | backward | reduction | optimizer
//   attempt=A | every=K   exactly one of them: in attempt A, or in every K-th attempt: K-1, 2K-1, ...
//   rank=R|all            default: rank 0; at reduction, and for values at optimizer, all ranks, since all
//                         compute the same
//   micro=M               micro-batch, default 0; not at reduction and optimizer, which come once an attempt
//   epoch=E               only in this epoch: the first is 1, and each restart and rollback begins the next,
//   in which
//                         attempts are made again; default: in each
//   transient=yes         only in the attempt itself, and not when it is made again, here or in a replay
//   tensor=GLOB           the first tensor of the stage whose name matches (fnmatch), default *; values only
//   index=N|first|middle|last   flat element of it, default first; middle is element count / 2; values only
//
//   For example: nan@backward,attempt=5,rank=2,tensor=conv1.*,index=last
//                throw@forward,attempt=3
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "holdfast/collectives/record.h"
#include "holdfast/collectives/status.h"

namespace holdfast::train {

struct Fault {
  enum class Kind { kValue, kThrow, kHang, kStop, kKill, kExit };
  enum class Position { kFlat, kFirst, kMiddle, kLast };

  std::string spec;  // as it was written
  Kind kind = Kind::kValue;
  std::uint32_t value_bits = 0;  // fp32, for kValue
  int exit_code = 0;             // for kExit
  Stage stage = Stage::kInput;
  std::optional<int> rank;  // every rank when empty
  // This one; when empty, each attempt with attempt % every == every - 1.
  std::optional<std::uint64_t> attempt;
  std::uint64_t every = 0;
  std::optional<std::uint64_t> epoch;
  bool transient = false;  // does not strike again when the attempt is made again
  int micro = 0;
  std::string tensor_glob = "*";
  Position position = Position::kFirst;
  std::int64_t index = 0;  // for kFlat; for kValue, the element that was meant once the fault is resolved

  std::string tensor;  // the tensor that was meant; empty until the fault is resolved
};

// Parses one specification. USAGE with what is wrong in it.
Status parse_fault(const std::string& spec, Fault* out);

// Where a workload can take faults. Known before training, the same on every rank.
struct FaultSurface {
  using Tensor = std::pair<std::string, std::int64_t>;  // name, elements

  std::array<std::vector<Tensor>, kStageCount> tensors;  // by stage, in the order in which they are visited
  int micro_batches = 1;
  int world_size = 1;
  std::uint64_t attempts = 0;  // of the run
};

// Checks that the fault can happen in this workload and fixes which tensor and element it is for. USAGE,
// naming the specification, when its rank, attempt, micro-batch, tensor or element does not exist. Pure: the
// same answer on every rank, so that all of them leave before training.
Status resolve_fault(const FaultSurface& surface, Fault* fault);

// Those that strike again when the attempt is made again on the same rank: values and exceptions. What stops, delays or
// ends a process has done so, and tells nothing.
std::vector<Fault> faults_made_again(const std::vector<Fault>& faults);
// Those that strike again on another rank, too, which makes the attempt of what it was fed with: values that
// were put into the input. All others stand for the device of the rank that they strike.
std::vector<Fault> faults_of_the_data(const std::vector<Fault>& faults);

// What a `throw` fault throws.
class InjectedFault : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The faults of one rank. Call at() once for each stage of each micro-batch, and corrupt() for each of the
// stage's tensors. At reduction and optimizer `micro` is not looked at. One thread.
class FaultInjector {
 public:
  FaultInjector() = default;  // injects nothing
  // `faults` are resolved.
  FaultInjector(const std::vector<Fault>& faults, int rank);

  // From now on.
  void set_epoch(std::uint64_t epoch) { epoch_ = epoch; }

  // Does the throw, hang, stop, kill or exit that is due here, after a line on stderr. Throws InjectedFault.
  void at(Stage stage, std::uint64_t attempt, int micro) const;

  // Puts the values due here into `data`, fp32, on the host, bit by bit: a signalling NaN stays one. Throws
  // std::out_of_range when `count` differs so much from the surface's that the element does not exist.
  void corrupt(Stage stage, std::uint64_t attempt, int micro, std::string_view tensor, float* data,
               std::int64_t count) const;

  // The same for elements [begin, begin + piece.size()) of a tensor that is met piece by piece.
  void corrupt_piece(Stage stage, std::uint64_t attempt, std::string_view tensor, std::int64_t begin,
                     std::span<float> piece) const;

  // Whether corrupt() would write: lets a caller that has to copy a tensor to the host spare it.
  bool corrupts(Stage stage, std::uint64_t attempt, int micro, std::string_view tensor) const;

 private:
  bool due(const Fault& fault, Stage stage, std::uint64_t attempt, int micro) const;

  std::vector<Fault> faults_;  // of this rank
  int rank_ = 0;
  std::uint64_t epoch_ = 1;
};

}  // namespace holdfast::train
