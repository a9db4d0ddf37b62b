// What the evidence of an incident holds up: the attempt's decide() beside a copy of the same bytes. And that
// a clean attempt costs the same whether evidence would be kept or not. What was written is verified.
//
//   capture_bench [FOLDER]     on the file system of FOLDER, by default the current folder
#include <fmt/format.h>

#include <cstring>
#include <filesystem>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "alone.h"
#include "holdfast/coord/evidence/bundle.h"
#include "holdfast/step_guard.h"
#include "paired.h"
#include "require.h"

namespace {

using namespace holdfast;
using namespace holdfast::bench;

constexpr int kTensors = 48;
constexpr std::int64_t kElements = std::int64_t{1} << 20;  // of each: 192 MiB in all
constexpr int kRounds = 15;

// Any number of bundles in full, and everything skipped.
constexpr const char* kPolicy =
    "max_total_skips: 1000000 max_consecutive_skips: 1000000 "
    "evidence { full_incidents: 1000000 bundle_quota_bytes: 1000000000 run_quota_bytes: 1000000000000 "
    "max_bundles: 1000000 }";

struct Model {
  Model() : tensors(kTensors, std::vector<float>(kElements)) {
    for (int t = 0; t < kTensors; ++t) {
      for (std::size_t i = 0; i < tensors[0].size(); ++i) {
        tensors[static_cast<std::size_t>(t)][i] = static_cast<float>(t) + static_cast<float>(i) * 1e-6f;
      }
      StateTensor tensor;
      tensor.name = fmt::format("layer{}.weight", t);
      tensor.data = tensors[static_cast<std::size_t>(t)].data();
      tensor.shape = {kElements};
      state.add(tensor);
    }
  }
  std::vector<std::vector<float>> tensors;
  TrainingState state;
};

// A guard with or without evidence. The watchdog is off, as nobody is waited for.
class Trainer {
 public:
  Trainer(const std::filesystem::path& folder, Model* model, bool with_evidence) : run_dir_(folder) {
    GuardOptions options;
    options.policy = kPolicy;
    options.run_dir = run_dir_.path();
    options.watchdog = false;
    require(StepGuard::create(alone_, options, &guard_));
    if (model != nullptr) require(guard_->register_state(model->state));
    if (!with_evidence) return;
    EvidenceProviders providers;
    providers.batch = [this](const EvidenceSubject&, EvidenceRecorder& recorder) {
      recorder.batch("images", TensorView::of(batch_));
    };
    guard_->provide_evidence(std::move(providers));
  }

  // Seconds that decide() took.
  double attempt(double loss) {
    guard_->begin();
    guard_->observe_loss(loss);
    Decision decision;
    const double took = seconds([&] { decision = guard_->decide(); });
    require(decision.action == (loss == loss ? Action::kApply : Action::kSkip), "another decision");
    guard_->finish();
    return took;
  }

  double clean_attempts(int count) {
    return seconds([&] {
      for (int i = 0; i < count; ++i) attempt(1.0);
    });
  }

  // Waits for the bundle of the attempt that was made last, holds it against the model and removes it.
  void check_bundle(const Model& model) {
    const std::string path =
        fmt::format("{}/incidents/e{:04}-a{:010}", run_dir_.path(), guard_->epoch(), guard_->attempt() - 1);
    for (int i = 0; i < 60'000 && !std::filesystem::exists(path); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::unique_ptr<Bundle> bundle;
    require(Bundle::open(real_file_system(), path, &bundle));
    require(bundle->verify().empty(), "the bundle is damaged");
    const std::uint64_t state_bytes = static_cast<std::uint64_t>(kTensors * kElements) * sizeof(float);
    require(std::filesystem::file_size(path + "/rank-00000.safetensors") > state_bytes,
            "the bundle has not all of the state");
    require(model.tensors[0][1] == 1e-6f, "the state was changed");
    bundle.reset();
    std::filesystem::remove_all(path);
  }

 private:
  AloneCollective alone_;
  RunDir run_dir_;
  std::vector<float> batch_ = std::vector<float>(1000, 1.0f);
  std::unique_ptr<StepGuard> guard_;
};

void bench_capture(const std::filesystem::path& folder, Model& model) {
  Trainer trainer(folder, &model, true);
  // Into memory that is asked for at that moment, as a copy on an incident has to be: none is kept for it.
  const auto copy = [&] {
    std::vector<std::unique_ptr<char[]>> copies;
    return seconds([&] {
      for (const std::vector<float>& tensor : model.tensors) {
        const std::size_t bytes = tensor.size() * sizeof(float);
        copies.push_back(std::make_unique_for_overwrite<char[]>(bytes));
        std::memcpy(copies.back().get(), tensor.data(), bytes);
      }
    });
  };
  const auto capture = [&] {
    const double took = trainer.attempt(std::numeric_limits<double>::quiet_NaN());
    trainer.check_bundle(model);
    return took;
  };
  const Ratios ratios = paired(copy, capture, kRounds);
  fmt::print("speed copy={:.2f} GB/s\n",
             static_cast<double>(kTensors * kElements * 4) / ratios.base_seconds * 1e-9);
  print_ratio("capture_over_copy", ratios);
}

// Two guards differ by where their memory lies, too: so beside the one with providers stands a second one
// without.
void bench_clean(const std::filesystem::path& folder) {
  constexpr int kAttempts = 20'000;
  Trainer without(folder, nullptr, false);
  Trainer with(folder, nullptr, true);
  Trainer second(folder, nullptr, false);
  const auto against = [&without](Trainer& other) {
    return paired([&] { return without.clean_attempts(kAttempts); },
                  [&] { return other.clean_attempts(kAttempts); }, 4 * kRounds);
  };
  const Ratios ratios = against(with);
  fmt::print("speed clean_attempt={:.0f} ns\n", ratios.base_seconds / kAttempts * 1e9);
  print_ratio("clean_attempt_with_providers_over_without", ratios);
  print_ratio("clean_attempt_of_a_second_without_over_without", against(second));
}

}  // namespace

int main(int argc, char** argv) {
  const std::filesystem::path folder = argc > 1 ? argv[1] : ".";
  {
    Model model;
    bench_capture(folder, model);
  }
  bench_clean(folder);
  return 0;
}
