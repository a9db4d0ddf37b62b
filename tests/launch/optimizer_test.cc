#include "train/optimizer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <string>

namespace holdfast::train {
namespace {

std::vector<std::uint32_t> bits(std::span<const float> values) {
  std::vector<std::uint32_t> out;
  for (const float value : values) out.push_back(std::bit_cast<std::uint32_t>(value));
  return out;
}

std::vector<float> random_values(std::size_t count, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

// Parameters under "" and the state's arrays, by name.
using Arrays = std::map<std::string, std::vector<std::uint32_t>>;

Arrays arrays_of(Optimizer& optimizer, std::span<const float> parameters) {
  Arrays arrays = {{"", bits(parameters)}};
  for (const StateArray& state : optimizer.state()) arrays[std::string(state.name)] = bits(state.values);
  return arrays;
}

OptimizerOptions named(const std::string& name) {
  OptimizerOptions options;
  options.name = name;
  return options;
}

class AnyOptimizer : public testing::TestWithParam<std::string> {
 protected:
  std::unique_ptr<Optimizer> make(std::size_t count) const {
    return make_optimizer(named(GetParam()), count);
  }
};

INSTANTIATE_TEST_SUITE_P(Names, AnyOptimizer, testing::Values("sgd", "adamw"),
                         [](const auto& test) { return test.param; });

// Around the size of a preview's blocks, and odd ones.
TEST_P(AnyOptimizer, APreviewHasTheBitsOfTheUpdateAndWritesNothing) {
  for (const std::size_t count : {1u, 3u, 17u, 4095u, 4096u, 4097u, 8193u, 12289u}) {
    std::mt19937 random(static_cast<std::uint32_t>(count));
    const auto optimizer = make(count);
    std::vector<float> parameters = random_values(count, random);
    for (int step = 0; step < 4; ++step) {
      const std::vector<float> gradients = random_values(count, random);
      const UpdateScale scale = {0.37f, 0.01f};
      const Arrays before = arrays_of(*optimizer, parameters);
      const std::uint64_t steps = optimizer->steps();

      Arrays seen;
      for (const auto& [name, values] : before) seen[name].assign(count, 0xdeadbeef);
      std::map<std::string, std::size_t> seen_elements;
      // In two unequal pieces, as ranks that share the work would.
      const std::size_t cut = count / 3;
      for (const auto& [begin, size] : {std::pair{std::size_t{0}, cut}, std::pair{cut, count - cut}}) {
        optimizer->preview(begin, size, parameters, gradients, scale,
                           [&](std::string_view name, std::size_t offset, std::span<float> values) {
                             ASSERT_GE(offset, begin);
                             ASSERT_LE(offset + values.size(), begin + size);
                             seen_elements[std::string(name)] += values.size();
                             const auto piece = bits(values);
                             std::ranges::copy(piece, seen.at(std::string(name)).begin() +
                                                          static_cast<std::ptrdiff_t>(offset));
                             std::ranges::fill(values, 7.0f);  // the caller's to overwrite
                           });
      }
      ASSERT_EQ(arrays_of(*optimizer, parameters), before) << count << ", step " << step;
      ASSERT_EQ(optimizer->steps(), steps);
      for (const auto& [name, values] : before) ASSERT_EQ(seen_elements[name], count) << name;

      optimizer->next_step();
      optimizer->apply(0, count, parameters, gradients, scale);
      ASSERT_EQ(arrays_of(*optimizer, parameters), seen) << count << ", step " << step;
      ASSERT_NE(arrays_of(*optimizer, parameters), before);
    }
  }
}

TEST_P(AnyOptimizer, AnUpdateInPiecesHasTheBitsOfOneInOne) {
  constexpr std::size_t kCount = 1003;
  std::mt19937 random(5);
  const auto whole = make(kCount);
  const auto pieces = make(kCount);
  std::vector<float> a = random_values(kCount, random);
  std::vector<float> b = a;
  for (int step = 0; step < 3; ++step) {
    const std::vector<float> gradients = random_values(kCount, random);
    whole->next_step();
    whole->apply(0, kCount, a, gradients, {1.0f, 0.1f});
    pieces->next_step();
    for (std::size_t at = 0; at < kCount; at += 41) {
      pieces->apply(at, std::min<std::size_t>(41, kCount - at), b, gradients, {1.0f, 0.1f});
    }
    ASSERT_EQ(arrays_of(*whole, a), arrays_of(*pieces, b)) << step;
  }
}

TEST_P(AnyOptimizer, APreviewShowsWhatIsNotFiniteAheadOfTheUpdate) {
  std::vector<float> parameters(10, 1.0f);
  std::vector<float> gradients(10, 1.0f);
  gradients[6] = std::numeric_limits<float>::infinity();
  const auto optimizer = make(10);
  std::size_t bad_parameters = 0;
  optimizer->preview(0, 10, parameters, gradients, {1.0f, 0.1f},
                     [&](std::string_view name, std::size_t offset, std::span<float> values) {
                       for (std::size_t i = 0; i < values.size(); ++i) {
                         if (name.empty() && !std::isfinite(values[i])) {
                           ++bad_parameters;
                           EXPECT_EQ(offset + i, 6u);
                         }
                       }
                     });
  EXPECT_EQ(bad_parameters, 1u);
  EXPECT_EQ(parameters, std::vector<float>(10, 1.0f));
}

TEST_P(AnyOptimizer, APreviewOfNoElementsShowsNothing) {
  const auto optimizer = make(4);
  const std::vector<float> four(4, 1.0f);
  optimizer->preview(2, 0, four, four, {}, [](std::string_view, std::size_t, std::span<float>) { FAIL(); });
}

// Numbers for which every step is exact.
TEST(Sgd, ByHand) {
  OptimizerOptions options = named("sgd");
  options.momentum = 0.5f;
  options.weight_decay = 0.25f;
  const auto sgd = make_optimizer(options, 1);
  std::vector<float> parameters = {4.0f};
  const std::vector<float> gradients = {6.0f};
  sgd->next_step();
  sgd->apply(0, 1, parameters, gradients, {0.5f, 0.5f});
  EXPECT_EQ(sgd->state().at(0).values[0], 4.0f);  // 6 / 2 + 4 / 4
  EXPECT_EQ(parameters[0], 2.0f);
  sgd->next_step();
  sgd->apply(0, 1, parameters, gradients, {0.5f, 0.5f});
  EXPECT_EQ(sgd->state().at(0).values[0], 5.5f);  // 4 / 2 + 3 + 2 / 4
  EXPECT_EQ(parameters[0], -0.75f);
  EXPECT_EQ(sgd->steps(), 2u);
}

TEST(AdamW, ByHand) {
  OptimizerOptions options = named("adamw");
  options.beta1 = 0.5f;
  options.beta2 = 0.75f;
  options.eps = 1.0f;
  options.weight_decay = 0.125f;
  const auto adamw = make_optimizer(options, 1);
  std::vector<float> parameters = {4.0f};
  adamw->next_step();
  adamw->apply(0, 1, parameters, std::vector<float>{6.0f}, {0.5f, 0.5f});
  EXPECT_EQ(adamw->state().at(0).name, "exp_avg");
  EXPECT_EQ(adamw->state().at(0).values[0], 1.5f);
  EXPECT_EQ(adamw->state().at(1).name, "exp_avg_sq");
  EXPECT_EQ(adamw->state().at(1).values[0], 2.25f);
  EXPECT_EQ(parameters[0], 3.375f);  // 4 - (3 / (3 + 1) + 4 / 8) / 2
}

// Field case 14.
TEST(AdamW, WithEpsZeroAGradientThatWasAlwaysZeroGivesNanInTheParameterAlone) {
  OptimizerOptions options = named("adamw");
  options.eps = 0.0f;
  const auto adamw = make_optimizer(options, 3);
  std::vector<float> parameters = {1.0f, 1.0f, 1.0f};
  const std::vector<float> gradients = {1.0f, 0.0f, -1.0f};
  std::size_t nan = 0;
  adamw->preview(0, 3, parameters, gradients, {1.0f, 0.1f},
                 [&](std::string_view name, std::size_t, std::span<float> values) {
                   for (std::size_t i = 0; i < values.size(); ++i) {
                     EXPECT_EQ(std::isnan(values[i]), name.empty() && i == 1) << name << i;
                     nan += std::isnan(values[i]) ? 1u : 0u;
                   }
                 });
  EXPECT_EQ(nan, 1u);
  adamw->next_step();
  adamw->apply(0, 3, parameters, gradients, {1.0f, 0.1f});
  EXPECT_TRUE(std::isfinite(parameters[0]));
  EXPECT_TRUE(std::isnan(parameters[1]));
  EXPECT_TRUE(std::isfinite(parameters[2]));
}

TEST(AdamW, WithItsDefaultEpsAGradientThatWasAlwaysZeroOnlyDecaysTheParameter) {
  OptimizerOptions options = named("adamw");
  options.weight_decay = 0.0f;
  const auto adamw = make_optimizer(options, 1);
  std::vector<float> parameters = {1.0f};
  adamw->next_step();
  adamw->apply(0, 1, parameters, std::vector<float>{0.0f}, {1.0f, 0.1f});
  EXPECT_EQ(parameters[0], 1.0f);
}

}  // namespace
}  // namespace holdfast::train
