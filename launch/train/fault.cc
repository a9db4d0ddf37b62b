#include "train/fault.h"

#include <fnmatch.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>

namespace holdfast::train {
namespace {

constexpr std::uint32_t kQuietNan = 0x7fc00000u;
constexpr std::uint32_t kSignallingNan = 0x7f800001u;
constexpr std::uint32_t kPosInf = 0x7f800000u;
constexpr std::uint32_t kNegInf = 0xff800000u;

Status bad_fault(const Fault& fault, const std::string& what) {
  return Status::usage("fault '" + fault.spec + "': " + what);
}

std::size_t stage_index(Stage stage) { return static_cast<std::size_t>(stage); }

std::string quoted_stage(Stage stage) { return "stage " + std::string(stage_name(stage)); }

bool once_an_attempt(Stage stage) { return stage == Stage::kReduction || stage == Stage::kOptimizer; }

// The whole of `text` as a decimal integer of at least 0.
template <typename Integer>
bool parse_number(std::string_view text, Integer* out) {
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, *out);
  return error == std::errc() && stop == end && *out >= 0;
}

Status parse_value(const std::string& text, Fault* fault) {
  // Decimal only: 0x7f800001 would be taken for a large number by someone who means the bits.
  const bool decimal = !text.empty() && text.find_first_not_of("0123456789+-.eE") == std::string::npos;
  char* end = nullptr;
  errno = 0;
  const float value = decimal ? std::strtof(text.c_str(), &end) : 0.0f;
  if (!decimal || end != text.c_str() + text.size()) {
    return bad_fault(*fault, "value: '" + text + "' is not a decimal number");
  }
  if (!std::isfinite(value))
    return bad_fault(*fault, "value: " + text + " is not finite as fp32; use inf or -inf");
  if (value == 0.0f && errno == ERANGE) return bad_fault(*fault, "value: " + text + " is 0 as fp32");
  std::memcpy(&fault->value_bits, &value, sizeof value);
  return Status();
}

Status parse_kind(const std::string& text, Fault* fault) {
  const auto value = [fault](std::uint32_t bits) {
    fault->kind = Fault::Kind::kValue;
    fault->value_bits = bits;
    return Status();
  };
  const auto other = [fault](Fault::Kind kind) {
    fault->kind = kind;
    return Status();
  };
  if (text == "nan") return value(kQuietNan);
  if (text == "inf") return value(kPosInf);
  if (text == "-inf") return value(kNegInf);
  if (text == "snan") return value(kSignallingNan);
  if (text == "throw") return other(Fault::Kind::kThrow);
  if (text == "hang") return other(Fault::Kind::kHang);
  if (text == "stop") return other(Fault::Kind::kStop);
  if (text == "kill") return other(Fault::Kind::kKill);
  if (text.starts_with("value=")) return parse_value(text.substr(6), fault);
  if (text.starts_with("exit=")) {
    if (!parse_number(std::string_view(text).substr(5), &fault->exit_code) || fault->exit_code > 255) {
      return bad_fault(*fault, "exit: '" + text.substr(5) + "' is not an exit code, 0 to 255");
    }
    return other(Fault::Kind::kExit);
  }
  return bad_fault(
      *fault, "unknown kind '" + text + "' (nan, inf, -inf, snan, value=X, throw, hang, stop, kill, exit=C)");
}

Status parse_index(const std::string& text, Fault* fault) {
  if (text == "first") {
    fault->position = Fault::Position::kFirst;
  } else if (text == "middle") {
    fault->position = Fault::Position::kMiddle;
  } else if (text == "last") {
    fault->position = Fault::Position::kLast;
  } else if (parse_number(text, &fault->index)) {
    fault->position = Fault::Position::kFlat;
  } else {
    return bad_fault(*fault, "index: '" + text + "' is none of a number of at least 0, first, middle, last");
  }
  return Status();
}

Status parse_key(const std::string& key, const std::string& value, Fault* fault) {
  const auto wrong = [&](const char* wanted) {
    return bad_fault(*fault, key + ": '" + value + "' is not " + wanted);
  };
  if (key == "rank") {
    int rank = 0;
    if (value == "all") {
      fault->rank.reset();
    } else if (parse_number(value, &rank)) {
      fault->rank = rank;
    } else {
      return wrong("a rank or 'all'");
    }
    return Status();
  }
  if (key == "attempt") {
    std::uint64_t attempt = 0;
    if (!parse_number(value, &attempt)) return wrong("an attempt, a number of at least 0");
    fault->attempt = attempt;
    return Status();
  }
  if (key == "every") {
    if (!parse_number(value, &fault->every) || fault->every == 0) return wrong("a number of at least 1");
    return Status();
  }
  if (key == "epoch") {
    std::uint64_t epoch = 0;
    if (!parse_number(value, &epoch) || epoch == 0) return wrong("an epoch, a number of at least 1");
    fault->epoch = epoch;
    return Status();
  }
  if (key == "transient") {
    if (value != "yes") return wrong("'yes'");
    fault->transient = true;
    return Status();
  }
  if (key == "micro") {
    if (once_an_attempt(fault->stage)) {
      return bad_fault(*fault, "micro: " + quoted_stage(fault->stage) + " comes once an attempt");
    }
    return parse_number(value, &fault->micro) ? Status() : wrong("a micro-batch, a number of at least 0");
  }
  if (key == "tensor" || key == "index") {
    if (fault->kind != Fault::Kind::kValue)
      return bad_fault(*fault, key + ": only for a fault that puts a value");
    if (key == "index") return parse_index(value, fault);
    if (value.empty()) return wrong("a pattern");
    fault->tensor_glob = value;
    return Status();
  }
  return bad_fault(
      *fault, "unknown key '" + key + "' (rank, attempt, every, epoch, transient, micro, tensor, index)");
}

void announce(const Fault& fault, int rank, std::uint64_t attempt) {
  const std::string line = "guarded_train: rank " + std::to_string(rank) + ": injecting " + fault.spec +
                           " at attempt " + std::to_string(attempt) + "\n";
  std::fwrite(line.data(), 1, line.size(), stderr);
  std::fflush(stderr);
}

}  // namespace

Status parse_fault(const std::string& spec, Fault* out) {
  Fault fault;
  fault.spec = spec;
  const std::size_t at = spec.find('@');
  if (at == std::string::npos) return bad_fault(fault, "must be KIND@STAGE[,key=value...]");
  if (Status status = parse_kind(spec.substr(0, at), &fault); !status.ok()) return status;

  std::size_t end = std::min(spec.find(',', at), spec.size());
  const std::string stage = spec.substr(at + 1, end - at - 1);
  if (!parse_stage(stage, &fault.stage)) {
    return bad_fault(fault,
                     "unknown stage '" + stage + "' (input, forward, loss, backward, reduction, optimizer)");
  }
  const bool made_by_all = fault.stage == Stage::kReduction ||
                           (fault.stage == Stage::kOptimizer && fault.kind == Fault::Kind::kValue);
  if (!made_by_all) fault.rank = 0;

  std::set<std::string> seen;
  while (end < spec.size()) {
    const std::size_t begin = end + 1;
    end = std::min(spec.find(',', begin), spec.size());
    const std::string item = spec.substr(begin, end - begin);
    const std::size_t equals = item.find('=');
    if (equals == std::string::npos) return bad_fault(fault, "'" + item + "' is not key=value");
    const std::string key = item.substr(0, equals);
    if (!seen.insert(key).second) return bad_fault(fault, key + ": given twice");
    if (Status status = parse_key(key, item.substr(equals + 1), &fault); !status.ok()) return status;
  }
  if (seen.contains("attempt") == seen.contains("every")) {
    return bad_fault(fault, "needs exactly one of attempt=A and every=K");
  }
  *out = std::move(fault);
  return Status();
}

Status resolve_fault(const FaultSurface& surface, Fault* fault) {
  if (fault->rank && *fault->rank >= surface.world_size) {
    return bad_fault(*fault, "no rank " + std::to_string(*fault->rank) + " among " +
                                 std::to_string(surface.world_size) + " ranks");
  }
  const std::uint64_t first_attempt = fault->attempt ? *fault->attempt : fault->every - 1;
  if (first_attempt >= surface.attempts) {
    return bad_fault(*fault, "no attempt " + std::to_string(first_attempt) + " in a run of " +
                                 std::to_string(surface.attempts) + " attempts (they count from 0)");
  }
  if (fault->micro >= surface.micro_batches) {
    return bad_fault(*fault, "no micro-batch " + std::to_string(fault->micro) + " among " +
                                 std::to_string(surface.micro_batches) + " (they count from 0)");
  }
  if (fault->kind != Fault::Kind::kValue) return Status();

  const auto& tensors = surface.tensors[stage_index(fault->stage)];
  if (tensors.empty()) return bad_fault(*fault, "nothing to corrupt at " + quoted_stage(fault->stage));
  const auto found =
      std::find_if(tensors.begin(), tensors.end(), [fault](const FaultSurface::Tensor& tensor) {
        return ::fnmatch(fault->tensor_glob.c_str(), tensor.first.c_str(), 0) == 0;
      });
  if (found == tensors.end()) {
    std::string names;
    for (const auto& [name, count] : tensors) names += (names.empty() ? "" : ", ") + name;
    return bad_fault(*fault, "tensor: '" + fault->tensor_glob + "' matches none at " +
                                 quoted_stage(fault->stage) + " (" + names + ")");
  }
  const auto& [name, count] = *found;
  if (count == 0) return bad_fault(*fault, "tensor '" + name + "' is empty");
  switch (fault->position) {
    case Fault::Position::kFlat: break;
    case Fault::Position::kFirst: fault->index = 0; break;
    case Fault::Position::kMiddle: fault->index = count / 2; break;
    case Fault::Position::kLast: fault->index = count - 1; break;
  }
  if (fault->index >= count) {
    return bad_fault(*fault, "index: no element " + std::to_string(fault->index) + " in tensor '" + name +
                                 "' of " + std::to_string(count));
  }
  fault->tensor = name;
  return Status();
}

std::vector<Fault> faults_made_again(const std::vector<Fault>& faults) {
  std::vector<Fault> again = faults;
  std::erase_if(again, [](const Fault& fault) {
    const bool is_told = fault.kind == Fault::Kind::kValue || fault.kind == Fault::Kind::kThrow;
    return fault.transient || !is_told;
  });
  return again;
}

std::vector<Fault> faults_of_the_data(const std::vector<Fault>& faults) {
  std::vector<Fault> data = faults_made_again(faults);
  std::erase_if(data, [](const Fault& fault) {
    return fault.stage != Stage::kInput || fault.kind != Fault::Kind::kValue;
  });
  return data;
}

FaultInjector::FaultInjector(const std::vector<Fault>& faults, int rank) : rank_(rank) {
  for (const Fault& fault : faults) {
    if (!fault.rank || *fault.rank == rank) faults_.push_back(fault);
  }
}

bool FaultInjector::due(const Fault& fault, Stage stage, std::uint64_t attempt, int micro) const {
  if (fault.stage != stage || (fault.epoch && *fault.epoch != epoch_)) return false;
  if (!once_an_attempt(stage) && fault.micro != micro) return false;
  return fault.attempt ? attempt == *fault.attempt : attempt % fault.every == fault.every - 1;
}

void FaultInjector::at(Stage stage, std::uint64_t attempt, int micro) const {
  for (const Fault& fault : faults_) {
    if (fault.kind == Fault::Kind::kValue || !due(fault, stage, attempt, micro)) continue;
    announce(fault, rank_, attempt);
    switch (fault.kind) {
      case Fault::Kind::kValue: break;
      case Fault::Kind::kThrow: throw InjectedFault("injected fault " + fault.spec);
      case Fault::Kind::kHang:
        for (;;) ::pause();
      case Fault::Kind::kStop: ::raise(SIGSTOP); break;
      case Fault::Kind::kKill: ::raise(SIGKILL); break;
      case Fault::Kind::kExit: ::_exit(fault.exit_code);
    }
  }
}

bool FaultInjector::corrupts(Stage stage, std::uint64_t attempt, int micro, std::string_view tensor) const {
  return std::any_of(faults_.begin(), faults_.end(), [&](const Fault& fault) {
    return fault.kind == Fault::Kind::kValue && fault.tensor == tensor && due(fault, stage, attempt, micro);
  });
}

void FaultInjector::corrupt(Stage stage, std::uint64_t attempt, int micro, std::string_view tensor,
                            float* data, std::int64_t count) const {
  for (const Fault& fault : faults_) {
    if (fault.kind != Fault::Kind::kValue || fault.tensor != tensor || !due(fault, stage, attempt, micro))
      continue;
    if (fault.index >= count) {
      throw std::out_of_range("fault " + fault.spec + ": element " + std::to_string(fault.index) +
                              " of tensor " + fault.tensor + ", which has " + std::to_string(count));
    }
    // Not through a float: loading a signalling NaN into a register may quieten it.
    std::memcpy(data + fault.index, &fault.value_bits, sizeof fault.value_bits);
  }
}

void FaultInjector::corrupt_piece(Stage stage, std::uint64_t attempt, std::string_view tensor,
                                  std::int64_t begin, std::span<float> piece) const {
  for (const Fault& fault : faults_) {
    if (fault.kind != Fault::Kind::kValue || fault.tensor != tensor || !due(fault, stage, attempt, 0))
      continue;
    const std::int64_t at = fault.index - begin;
    if (at < 0 || at >= static_cast<std::int64_t>(piece.size())) continue;
    std::memcpy(piece.data() + at, &fault.value_bits, sizeof fault.value_bits);
  }
}

}  // namespace holdfast::train
