#include "train/natural_fault_spec.h"

#include <gtest/gtest.h>

#include <vector>

namespace holdfast::train {
namespace {

NaturalFaultSpec parsed(const std::string& text) {
  NaturalFaultSpec spec;
  const Status status = parse_natural_fault_spec(text, &spec);
  EXPECT_TRUE(status.ok()) << status.to_string();
  EXPECT_EQ(spec.text, text);
  return spec;
}

void expect_refused(const std::string& text) {
  NaturalFaultSpec spec;
  const Status status = parse_natural_fault_spec(text, &spec);
  EXPECT_EQ(status.code(), StatusCode::kUsage) << "'" << text << "'";
  EXPECT_TRUE(status.message().starts_with("--fault " + text + ": ")) << status.message();
}

std::vector<std::uint64_t> attempts_due(const NaturalFaultSpec& spec, int rank, int micro) {
  std::vector<std::uint64_t> attempts;
  for (std::uint64_t attempt = 0; attempt < 12; ++attempt) {
    if (spec.due(rank, attempt, micro)) attempts.push_back(attempt);
  }
  return attempts;
}

using Attempts = std::vector<std::uint64_t>;

TEST(NaturalFaultSpec, ANameAloneIsRank0sFirstMicroBatchOfAttempt0) {
  const NaturalFaultSpec spec = parsed("activation-overflow");
  EXPECT_EQ(spec.fault, NaturalFault::kActivationOverflow);
  EXPECT_EQ(attempts_due(spec, 0, 0), Attempts{0});
  EXPECT_EQ(attempts_due(spec, 1, 0), Attempts{});
  EXPECT_EQ(attempts_due(spec, 0, 1), Attempts{});
}

TEST(NaturalFaultSpec, EveryNameIsKnownAndInTheHelpWithItsStage) {
  const std::string help = natural_fault_help();
  for (const NaturalFaultInfo& info : kNaturalFaults) {
    const NaturalFaultSpec spec = parsed(std::string(info.name));
    EXPECT_EQ(spec.fault, info.fault);
    EXPECT_EQ(&natural_fault_info(info.fault), &info);
    EXPECT_FALSE(spec.sum_overflow());
    const auto line = help.find("  " + std::string(info.name) + " ");
    ASSERT_NE(line, std::string::npos) << info.name;
    EXPECT_NE(help.substr(line, help.find('\n', line) - line).find(stage_name(info.stage)),
              std::string::npos);
  }
  EXPECT_NE(help.find("sum-overflow"), std::string::npos);
}

TEST(NaturalFaultSpec, KeysComeInAnyOrder) {
  for (const std::string text :
       {"corrupt-record,rank=2,attempt=7,micro=1", "corrupt-record,micro=1,attempt=7,rank=2"}) {
    const NaturalFaultSpec spec = parsed(text);
    EXPECT_EQ(attempts_due(spec, 2, 1), Attempts{7});
    EXPECT_EQ(attempts_due(spec, 2, 0), Attempts{});
    EXPECT_EQ(attempts_due(spec, 0, 1), Attempts{});
  }
}

TEST(NaturalFaultSpec, EveryKIsTheLastOfEachKAttempts) {
  EXPECT_EQ(attempts_due(parsed("corrupt-record,every=5"), 0, 0), (Attempts{4, 9}));
  EXPECT_EQ(attempts_due(parsed("corrupt-record,every=1"), 0, 0).size(), 12u);
}

TEST(NaturalFaultSpec, RankAllIsEveryRank) {
  const NaturalFaultSpec spec = parsed("masked-attention-row,rank=all,attempt=3");
  EXPECT_FALSE(spec.rank.has_value());
  for (const int rank : {0, 1, 1000}) EXPECT_EQ(attempts_due(spec, rank, 0), Attempts{3});
}

TEST(NaturalFaultSpec, SumOverflowAndDeadUnitConcernAllRanks) {
  for (const std::string name : {"sum-overflow", "dead-unit"}) {
    for (const std::string& text : {name, name + ",rank=all"}) {
      const NaturalFaultSpec spec = parsed(text);
      EXPECT_EQ(spec.sum_overflow(), name == "sum-overflow");
      for (const int rank : {0, 3}) EXPECT_EQ(attempts_due(spec, rank, 0), Attempts{0});
    }
    expect_refused(name + ",rank=0");
    expect_refused(name + ",rank=1");
  }
}

TEST(NaturalFaultSpec, TheLargestAttemptIsRead) {
  EXPECT_EQ(parsed("corrupt-record,attempt=18446744073709551615").attempt, 18446744073709551615u);
  expect_refused("corrupt-record,attempt=18446744073709551616");
}

TEST(NaturalFaultSpec, WhatIsNotUnderstoodIsRefusedAndQuoted) {
  for (const std::string text : {"",
                                 "nan",
                                 "Corrupt-record",
                                 "corrupt-record ",
                                 "corrupt-record=1",
                                 ",corrupt-record",
                                 "corrupt-record,attempt",
                                 "corrupt-record,attempt=",
                                 "corrupt-record,attempt=-1",
                                 "corrupt-record,attempt=1x",
                                 "corrupt-record,attempt= 1",
                                 "corrupt-record,attempt=1.5",
                                 "corrupt-record,every=0",
                                 "corrupt-record,every=-2",
                                 "corrupt-record,micro=-1",
                                 "corrupt-record,micro=4294967296",
                                 "corrupt-record,rank=-1",
                                 "corrupt-record,rank=ALL",
                                 "corrupt-record,rank=",
                                 "corrupt-record,stage=loss",
                                 "corrupt-record,,rank=1",
                                 "corrupt-record,rank=1=2"}) {
    expect_refused(text);
  }
}

// As the specification of injected faults has it.
TEST(NaturalFaultSpec, ACommaAtTheEndIsRefused) {
  expect_refused("corrupt-record,");
  expect_refused("corrupt-record,rank=1,");
}

TEST(NaturalFaultSpec, AttemptAndEveryTogetherAreRefused) {
  expect_refused("corrupt-record,attempt=3,every=5");
  expect_refused("corrupt-record,every=5,attempt=0");
}

TEST(NaturalFaultSpec, AKeyGivenTwiceIsRefused) {
  expect_refused("corrupt-record,attempt=3,attempt=4");
  expect_refused("corrupt-record,rank=1,rank=all");
}

}  // namespace
}  // namespace holdfast::train
