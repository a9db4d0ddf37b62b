#include "holdfast/coord/decision.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace holdfast {
namespace {

const std::vector<Decision> kDecisions = {
    {Action::kApply, StatusCode::kOk, {}},
    {Action::kSkip, StatusCode::kOk, "1 non-finite value at loss"},
    {Action::kRollBack, StatusCode::kOk, "rolled back"},
    {Action::kAbort, StatusCode::kBudgetExhausted, std::string("not UTF-8: \xff\xfe, a \0 byte\n", 24)},
    {Action::kAbort, StatusCode::kRestartNotAcknowledged, std::string(100000, 'x')},
    {Action::kStop, StatusCode::kStoppedByOperator, "an orderly stop was asked for"},
};

TEST(Decision, ActionsHaveTheirNames) {
  EXPECT_EQ(action_name(Action::kApply), "APPLY");
  EXPECT_EQ(action_name(Action::kSkip), "SKIP");
  EXPECT_EQ(action_name(Action::kRollBack), "ROLL_BACK");
  EXPECT_EQ(action_name(Action::kAbort), "ABORT");
  EXPECT_EQ(action_name(Action::kStop), "STOP");
}

TEST(Decision, OnlyApplyAppliesAndOnlyAbortAndStopEndTheRun) {
  for (const Decision& decision : kDecisions) {
    EXPECT_EQ(decision.apply(), decision.action == Action::kApply);
    EXPECT_EQ(decision.ends_run(), decision.action == Action::kAbort || decision.action == Action::kStop);
  }
  EXPECT_FALSE(Decision().apply());
  EXPECT_EQ(Decision().exit_code(), 80);
}

TEST(DecisionBytes, GiveBackWhatWasPutIn) {
  for (const Decision& decision : kDecisions) {
    Decision read;
    ASSERT_TRUE(decode_decision(encode_decision(decision), &read)) << action_name(decision.action);
    EXPECT_EQ(read.action, decision.action);
    EXPECT_EQ(read.code, decision.code);
    EXPECT_EQ(read.reason, decision.reason);
  }
}

TEST(DecisionBytes, GiveBackWhoExaminesWhom) {
  Decision decision{Action::kSkip, StatusCode::kOk, "x"};
  decision.evidence.emplace();
  Decision read;
  ASSERT_TRUE(decode_decision(encode_decision(decision), &read));
  EXPECT_FALSE(read.evidence->cross_examines());
  decision.evidence->examined = 3;
  decision.evidence->examiner = 0;
  decision.evidence->examined_bytes = 77;
  ASSERT_TRUE(decode_decision(encode_decision(decision), &read));
  EXPECT_TRUE(read.evidence->cross_examines());
  EXPECT_EQ(read.evidence->examined, 3);
  EXPECT_EQ(read.evidence->examiner, 0);
  EXPECT_EQ(read.evidence->examined_bytes, 77u);
}

TEST(DecisionBytes, EmptyAndForeignBytesAreRefused) {
  Decision read;
  EXPECT_FALSE(decode_decision("", &read));
  EXPECT_FALSE(decode_decision("\x08", &read));
  EXPECT_FALSE(decode_decision(std::string("\x08\x05", 2), &read));                      // action 5
  EXPECT_FALSE(decode_decision("\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", &read));  // action -1
  EXPECT_FALSE(decode_decision("not a message", &read));
}

// Field case 29: a process must never leave with 0, or with what the shell turns into 0, for a run that was
// cut.
TEST(DecisionBytes, AnEndOfTheRunWithAnExitCodeThatMeansSuccessIsRefused) {
  for (const int code : {0, 256, -1, 1, 63, 88}) {
    for (const Action action : {Action::kAbort, Action::kStop}) {
      Decision read;
      EXPECT_FALSE(decode_decision(encode_decision({action, static_cast<StatusCode>(code), "cut"}), &read))
          << action_name(action) << " with " << code;
    }
  }
}

TEST(DecisionBytes, TruncatedOrRandomBytesNeverGiveAnUnknownAction) {
  std::mt19937 random(3);
  const auto check = [](const std::string& bytes) {
    Decision read;
    if (decode_decision(bytes, &read)) {
      EXPECT_NE(action_name(read.action), "UNKNOWN");
    }
  };
  const std::string whole = encode_decision(kDecisions[3]);
  for (std::size_t size = 0; size < whole.size(); ++size) check(whole.substr(0, size));
  for (int round = 0; round < 20000; ++round) {
    std::string bytes(random() % 40, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    check(bytes);
    std::string flipped = whole;
    flipped[random() % flipped.size()] = static_cast<char>(random());
    check(flipped);
  }
}

}  // namespace
}  // namespace holdfast
