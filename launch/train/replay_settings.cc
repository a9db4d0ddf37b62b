#include "train/replay_settings.h"

#include <cmath>
#include <cstdlib>

namespace holdfast::train {
namespace {

bool parse_not_negative(const std::string& text, std::optional<double>* out) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != '\0' || !std::isfinite(value) || value < 0) return false;
  *out = value;
  return true;
}

bool apply(const std::string& key, const std::string& value, ReplaySettings* out) {
  if (key == "precision" && (value == "fp32" || value == "fp16" || value == "bf16")) {
    out->precision = value;
    return true;
  }
  if (key == "loss_scale") return parse_not_negative(value, &out->loss_scale) && *out->loss_scale > 0;
  if (key == "learning_rate") return parse_not_negative(value, &out->learning_rate);
  if (key == "eps") return parse_not_negative(value, &out->eps);
  if (key == "injected" && value == "off") {
    out->injected = false;
    return true;
  }
  if (key == "natural_faults" && value == "off") {
    out->natural_faults = false;
    return true;
  }
  return false;
}

}  // namespace

Status parse_replay_settings(const std::vector<std::string>& texts, ReplaySettings* out) {
  for (const std::string& text : texts) {
    const auto equals = text.find('=');
    if (equals == std::string::npos || !apply(text.substr(0, equals), text.substr(equals + 1), out)) {
      return Status::usage("--set " + text + ": " + replay_settings_help());
    }
  }
  return Status();
}

std::string replay_settings_help() {
  return "precision=fp32|fp16|bf16, loss_scale=X, learning_rate=X, eps=X, injected=off, natural_faults=off, "
         "sample.MICRO.INDEX=0 (that sample of the batch becomes zeros, without a target)";
}

}  // namespace holdfast::train
