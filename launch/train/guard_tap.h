// Shows the guard the layers of an attempt.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "holdfast/step_guard.h"
#include "train/workload.h"

namespace holdfast::train {

class GuardTap final : public LayerTap {
 public:
  explicit GuardTap(StepGuard* guard) : guard_(guard) {}
  void set_stage(Stage stage) { stage_ = stage; }
  void activation(std::string_view layer, std::span<const float> values) override {
    guard_->observe_layer(stage_, EvidenceRecorder::Kind::kActivation, layer, TensorView::of(values));
  }
  void gradient(std::string_view layer, std::span<const float> values) override {
    name_.assign(layer).append("/gradient");
    guard_->observe_layer(stage_, EvidenceRecorder::Kind::kActivationGradient, name_, TensorView::of(values));
  }

 private:
  StepGuard* const guard_;
  Stage stage_ = Stage::kInput;
  std::string name_;
};

}  // namespace holdfast::train
