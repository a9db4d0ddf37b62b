// The loss scale against a reference that is written from its rules and shares no code with it.
#include "holdfast/loss_scaler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>

namespace holdfast {
namespace {

// Exponents and the whole history, where the scaler has doubles and counters.
struct Reference {
  int exponent = 16;
  int floor = 0;
  int cap = 24;
  std::size_t growth_interval = 2000;
  std::ptrdiff_t hysteresis = 1;
  std::string since = {};  // 'c'lean updates and 'o'verflows since the last growth or halving

  std::ptrdiff_t overflows() const { return std::count(since.begin(), since.end(), 'o'); }
  std::size_t clean_in_a_row() const {
    const auto last = since.find_last_of('o');
    return last == std::string::npos ? since.size() : since.size() - last - 1;
  }
  bool exhausted_by_overflow() const { return exponent == floor && overflows() + 1 >= hysteresis; }

  void add(char what) {
    since += what;
    if (what == 'c' && clean_in_a_row() == growth_interval) {
      exponent = std::min(exponent + 1, cap);
      since.clear();
    } else if (what == 'o' && overflows() == hysteresis) {
      exponent = std::max(exponent - 1, floor);
      since.clear();
    }
  }

  LossScaleOptions options() const {
    return {std::ldexp(1.0, exponent), std::ldexp(1.0, cap), std::ldexp(1.0, floor), growth_interval,
            static_cast<std::uint64_t>(hysteresis)};
  }
};

void add(LossScaler& scaler, char what) {
  if (what == 'c') {
    scaler.on_clean_update();
  } else {
    scaler.on_overflow();
  }
}

Reference random_reference(std::mt19937_64& random) {
  const auto between = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  Reference reference;
  reference.floor = between(-3, 6);
  reference.cap = between(reference.floor, 24);
  reference.exponent = between(reference.floor, reference.cap);
  reference.growth_interval = static_cast<std::size_t>(between(1, 12));
  reference.hysteresis = between(1, 4);
  return reference;
}

TEST(LossScaler, FollowsTheReferenceOverRandomSequences) {
  std::mt19937_64 random(20240601);
  for (int trial = 0; trial < 400; ++trial) {
    Reference reference = random_reference(random);
    const double largest = std::ldexp(1.0, reference.cap);
    LossScaler scaler(reference.options());
    std::bernoulli_distribution overflow(std::uniform_real_distribution<>(0.0, 0.7)(random));
    for (int step = 0; step < 400; ++step) {
      ASSERT_EQ(scaler.scale(), std::ldexp(1.0, reference.exponent))
          << "trial " << trial << ", step " << step;
      ASSERT_EQ(scaler.exhausted_by_overflow(), reference.exhausted_by_overflow())
          << "trial " << trial << ", step " << step;
      ASSERT_EQ(scaler.state().clean_updates, reference.clean_in_a_row());
      ASSERT_GT(scaler.scale(), 0.0);
      ASSERT_LE(scaler.scale(), largest);
      const char what = overflow(random) ? 'o' : 'c';
      add(scaler, what);
      reference.add(what);
    }
  }
}

TEST(LossScaler, RestoredAnywhereItGoesOnTheSame) {
  std::mt19937_64 random(7);
  for (int trial = 0; trial < 200; ++trial) {
    const Reference reference = random_reference(random);
    LossScaler whole(reference.options());
    std::bernoulli_distribution overflow(0.25);
    const int saved_at = std::uniform_int_distribution<int>(0, 100)(random);
    for (int step = 0; step < saved_at; ++step) add(whole, overflow(random) ? 'o' : 'c');
    LossScaler resumed(reference.options());
    ASSERT_TRUE(resumed.restore(whole.state()).ok());
    for (int step = 0; step < 200; ++step) {
      ASSERT_EQ(resumed.state(), whole.state()) << "trial " << trial << ", step " << step;
      ASSERT_EQ(resumed.exhausted_by_overflow(), whole.exhausted_by_overflow());
      const char what = overflow(random) ? 'o' : 'c';
      add(whole, what);
      add(resumed, what);
    }
  }
}

TEST(LossScaler, TheDefaultsAre65536DoubledAfter2000UpTo2To24) {
  LossScaler scaler((LossScaleOptions()));
  EXPECT_EQ(scaler.scale(), 65536.0);
  for (int i = 0; i < 1999; ++i) scaler.on_clean_update();
  EXPECT_EQ(scaler.scale(), 65536.0);
  scaler.on_clean_update();
  EXPECT_EQ(scaler.scale(), 131072.0);
  for (int i = 0; i < 7 * 2000; ++i) scaler.on_clean_update();
  EXPECT_EQ(scaler.scale(), 0x1p24);
  for (int i = 0; i < 2 * 2000; ++i) scaler.on_clean_update();
  EXPECT_EQ(scaler.scale(), 0x1p24);
}

TEST(LossScaler, SixteenOverflowsReachTheFloorAndNoneGoesBelow) {
  LossScaler scaler((LossScaleOptions()));
  for (int i = 16; i > 0; --i) {
    EXPECT_EQ(scaler.scale(), std::ldexp(1.0, i));
    EXPECT_FALSE(scaler.exhausted_by_overflow()) << i;
    scaler.on_overflow();
  }
  EXPECT_EQ(scaler.scale(), 1.0);
  EXPECT_TRUE(scaler.exhausted_by_overflow());
  for (int i = 0; i < 2000; ++i) scaler.on_overflow();
  EXPECT_EQ(scaler.scale(), 1.0);
}

TEST(LossScaler, AnOverflowStartsTheCountOfCleanUpdatesAgain) {
  LossScaleOptions options;
  options.growth_interval = 3;
  LossScaler scaler(options);
  for (const char what : std::string("ccocc")) add(scaler, what);
  EXPECT_EQ(scaler.scale(), 32768.0);
  scaler.on_clean_update();
  EXPECT_EQ(scaler.scale(), 65536.0);
}

TEST(LossScaler, HysteresisAbsorbsOverflowsAndStartsAgainWithAHalvingAndWithAGrowth) {
  LossScaleOptions options;
  options.hysteresis = 3;
  options.growth_interval = 2;
  LossScaler scaler(options);
  for (const char what : std::string("oo")) add(scaler, what);
  EXPECT_EQ(scaler.scale(), 65536.0);
  scaler.on_overflow();
  EXPECT_EQ(scaler.scale(), 32768.0);
  for (const char what : std::string("oo")) add(scaler, what);
  EXPECT_EQ(scaler.scale(), 32768.0);
  for (const char what : std::string("cc")) add(scaler, what);
  EXPECT_EQ(scaler.scale(), 65536.0);
  for (const char what : std::string("oo")) add(scaler, what);
  EXPECT_EQ(scaler.scale(), 65536.0);
  scaler.on_overflow();
  EXPECT_EQ(scaler.scale(), 32768.0);
}

TEST(LossScaler, AtTheFloorItIsExhaustedOnlyWhenTheHysteresisIsUsedUp) {
  LossScaleOptions options;
  options.initial = 1.0;
  options.hysteresis = 2;
  LossScaler scaler(options);
  EXPECT_FALSE(scaler.exhausted_by_overflow());
  scaler.on_overflow();
  EXPECT_TRUE(scaler.exhausted_by_overflow());
}

// Field case 21.
TEST(LossScaler, SavedAt256With37Of100CleanUpdatesItGrowsAfter63More) {
  LossScaleOptions options;
  options.initial = 256.0;
  options.growth_interval = 100;
  LossScaler saved(options);
  for (int i = 0; i < 37; ++i) saved.on_clean_update();
  options.initial = 65536.0;
  LossScaler resumed(options);
  ASSERT_TRUE(resumed.restore(saved.state()).ok());
  EXPECT_EQ(resumed.state(), saved.state());
  for (int i = 0; i < 62; ++i) resumed.on_clean_update();
  EXPECT_EQ(resumed.scale(), 256.0);
  resumed.on_clean_update();
  EXPECT_EQ(resumed.scale(), 512.0);
}

TEST(LossScaler, RefusesAStateThatItCouldNotHaveComeToAndStaysAsItWas) {
  LossScaleOptions options;
  options.smallest = 0.25;
  options.largest = 1024.0;
  options.initial = 256.0;
  options.growth_interval = 100;
  options.hysteresis = 2;
  LossScaler scaler(options);
  const double inf = std::numeric_limits<double>::infinity();
  using State = LossScaler::State;
  for (const State state :
       {State{std::nan(""), 0, 1}, State{inf, 0, 1}, State{-inf, 0, 1}, State{0.0, 0, 1}, State{-0.0, 0, 1},
        State{-256.0, 0, 1}, State{384.0, 0, 1}, State{std::nextafter(256.0, 0.0), 0, 1}, State{5e-324, 0, 1},
        State{0.125, 0, 1}, State{2048.0, 0, 1}, State{256.0, 100, 1}, State{256.0, ~std::uint64_t{0}, 1},
        State{256.0, 0, 0}, State{256.0, 0, 3}}) {
    const Status status = scaler.restore(state);
    EXPECT_EQ(status.code(), StatusCode::kUsage) << state.scale;
    EXPECT_NE(status.message().find("saved loss scale: "), std::string::npos) << status.message();
    EXPECT_EQ(scaler.state(), (State{256.0, 0, 2}));
  }
  for (const State state : {State{0.25, 99, 2}, State{1024.0, 0, 1}, State{1.0, 50, 1}}) {
    EXPECT_TRUE(scaler.restore(state).ok());
    EXPECT_EQ(scaler.state(), state);
  }
}

}  // namespace
}  // namespace holdfast
