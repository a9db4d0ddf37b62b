#include "holdfast/coord/policy.h"

#include <gtest/gtest.h>

#include "coord/temp_dir.h"
#include "holdfast/coord/policy.pb.h"

namespace holdfast {
namespace {

Policy parsed(const std::string& text) {
  Policy policy;
  const Status status = parse_policy(text, &policy);
  EXPECT_TRUE(status.ok()) << text << ": " << status.to_string();
  return policy;
}

// The refusal's message.
std::string refused(const std::string& text) {
  Policy policy;
  const Status status = parse_policy(text, &policy);
  EXPECT_EQ(status.code(), StatusCode::kUsage) << text;
  return status.message();
}

TEST(Policy, EmptyTextIsTheDefaultPolicy) {
  for (const char* text : {"", " \n\t", "# only a comment\n", "{}", " \n{ }"}) {
    const Policy policy = parsed(text);
    EXPECT_EQ(policy.max_total_skips(), 100u);
    EXPECT_EQ(policy.max_consecutive_skips(), 10u);
    EXPECT_EQ(policy.on_first(), Policy::SKIP);
    EXPECT_EQ(policy.on_error(), Policy::ABORT);
    EXPECT_EQ(policy.attempt_deadline_seconds(), 0);
    EXPECT_EQ(policy.attempt_deadline_floor_seconds(), 60);
    EXPECT_EQ(policy.owner(), "");
    EXPECT_EQ(policy.ticket(), "");
    EXPECT_EQ(policy_hash(policy), policy_hash(parsed("")));
  }
}

TEST(Policy, TextprotoAndJsonOfTheSamePolicyHaveTheSameHash) {
  const Policy text = parsed(R"(
    # expensive run
    max_total_skips: 7
    on_first: ABORT
    attempt_deadline_seconds: 12.5
    owner: "ana@example.org"
  )");
  const Policy json = parsed(R"({
    "owner": "ana@example.org", "on_first": "ABORT", "max_total_skips": 7, "attempt_deadline_seconds": 12.5
  })");
  const Policy camel = parsed(R"({
    "owner": "ana@example.org", "onFirst": "ABORT", "maxTotalSkips": 7, "attemptDeadlineSeconds": 12.5
  })");
  EXPECT_EQ(policy_text(text), policy_text(json));
  EXPECT_EQ(policy_hash(text), policy_hash(json));
  EXPECT_EQ(policy_hash(text), policy_hash(camel));
  EXPECT_EQ(json.max_total_skips(), 7u);
  EXPECT_EQ(json.on_first(), Policy::ABORT);
  EXPECT_EQ(json.attempt_deadline_seconds(), 12.5);
}

TEST(Policy, ADefaultWrittenOutIsTheSamePolicy) {
  EXPECT_EQ(policy_hash(parsed("max_total_skips: 100 on_error: ABORT")), policy_hash(parsed("")));
}

TEST(Policy, EachFieldChangesTheHash) {
  const std::uint64_t usual = policy_hash(parsed(""));
  for (const char* text : {"max_total_skips: 99", "max_consecutive_skips: 9", "on_first: ABORT",
                           "on_error: SKIP", "attempt_deadline_seconds: 301", "owner: 'a'", "ticket: 'a'"}) {
    EXPECT_NE(policy_hash(parsed(text)), usual) << text;
  }
  EXPECT_NE(policy_hash(parsed("owner: 'a'")), policy_hash(parsed("ticket: 'a'")));
}

TEST(Policy, TheTextShowsEveryFieldAndReadsBackAsTheSamePolicy) {
  const Policy policy = parsed("on_first: ABORT ticket: 'JIRA-1 \"quoted\"\\n'");
  const std::string text = policy_text(policy);
  for (const char* field : {"max_total_skips: 100\n", "max_consecutive_skips: 10\n", "on_first: ABORT\n",
                            "on_error: ABORT\n", "attempt_deadline_seconds: 0\n", "owner: ", "ticket: "}) {
    EXPECT_NE(text.find(field), std::string::npos) << field << " in\n" << text;
  }
  EXPECT_EQ(policy_hash(parsed(text)), policy_hash(policy));
}

TEST(Policy, AnUnknownFieldIsRefusedByName) {
  EXPECT_NE(refused("max_total_skip: 3").find("max_total_skip"), std::string::npos);
  EXPECT_NE(refused("\n\n  on_frist: ABORT").find("line 3"), std::string::npos);
  EXPECT_NE(refused(R"({"max_total_skip": 3})").find("max_total_skip"), std::string::npos);
  EXPECT_NE(refused(R"({"on_first": "SKIP", "on_frist": "ABORT"})").find("on_frist"), std::string::npos);
}

TEST(Policy, AWrongTypeIsRefusedByName) {
  for (const char* field : {"max_total_skips", "attempt_deadline_seconds", "on_first"}) {
    const std::string name = field;
    EXPECT_NE(refused(name + ": 'many'").find("line 1"), std::string::npos);
    EXPECT_NE(refused("{\"" + name + "\": \"many\"}").find(name), std::string::npos);
    EXPECT_NE(refused("{\"" + name + "\": {}}").find(name), std::string::npos);
    refused("{\"" + name + "\": [1]}");
    refused("{\"" + name + "\": true}");
  }
  refused("max_total_skips: 1.5");
  refused(R"({"max_total_skips": 1.5})");
  refused("owner: 3");
}

// A number that stands for no answer must not quietly become the default answer.
TEST(Policy, AResponseThatDoesNotExistIsRefused) {
  for (const char* text : {"on_first: HALT", "on_first: 3", "on_first: 0", R"({"on_first": "HALT"})",
                           R"({"on_first": 3})", R"({"on_error": 0})"}) {
    refused(text);
  }
}

TEST(Policy, NegativeBudgetsAreRefused) {
  for (const char* text : {"max_total_skips: -1", "max_consecutive_skips: -1", R"({"max_total_skips": -1})",
                           R"({"max_consecutive_skips": -1})", R"({"max_total_skips": "-1"})"}) {
    refused(text);
  }
}

TEST(Policy, BudgetsBeyond64BitsAreRefused) {
  EXPECT_EQ(parsed("max_total_skips: 18446744073709551615").max_total_skips(), ~std::uint64_t{0});
  refused("max_total_skips: 18446744073709551616");
  refused(R"({"max_total_skips": 18446744073709551616})");
}

TEST(Policy, ADeadlineIsAutomaticOrAtMostADay) {
  for (const char* value : {"-1", "nan", "inf", "-inf", "86400.001", "1e300"}) {
    EXPECT_NE(refused(std::string("attempt_deadline_seconds: ") + value).find("attempt_deadline_seconds"),
              std::string::npos)
        << value;
  }
  for (const char* value : {"-1", "86401", "\"NaN\"", "\"Infinity\"", "1e300"}) {
    refused(std::string("{\"attempt_deadline_seconds\": ") + value + "}");
  }
  EXPECT_EQ(parsed("attempt_deadline_seconds: 86400").attempt_deadline_seconds(), 86400);
  EXPECT_EQ(parsed("attempt_deadline_seconds: 0.25").attempt_deadline_seconds(), 0.25);
}

TEST(Policy, TextThatIsNoPolicyIsRefused) {
  for (const char* text : {"max_total_skips", "max_total_skips: 1 max_total_skips: 2", "}", "{",
                           "{\"owner\": \"a\"", "{} trailing", "[1, 2]", "hello", "\xff\xfe"}) {
    refused(text);
  }
}

TEST(Policy, AParseStartsAfresh) {
  Policy policy = parsed("max_total_skips: 7 owner: 'a'");
  ASSERT_TRUE(parse_policy("", &policy).ok());
  EXPECT_EQ(policy_hash(policy), policy_hash(parsed("")));
}

TEST(PolicyFile, IsReadAsItIs) {
  const TempDir folder;
  const std::string content("owner: 'a'\r\n\0# not text", 23);
  write_file(folder / "policy.textproto", content);
  std::string text = "left over";
  ASSERT_TRUE(read_policy_file(folder / "policy.textproto", &text).ok());
  EXPECT_EQ(text, content);

  write_file(folder / "empty", "");
  ASSERT_TRUE(read_policy_file(folder / "empty", &text).ok());
  EXPECT_EQ(text, "");
}

TEST(PolicyFile, NoFileIsTheDefaultPolicy) {
  std::string text = "left over";
  ASSERT_TRUE(read_policy_file("", &text).ok());
  EXPECT_EQ(text, "");
}

TEST(PolicyFile, AMissingFileIsNamed) {
  const TempDir folder;
  std::string text;
  const Status status = read_policy_file(folder / "nowhere.textproto", &text);
  EXPECT_EQ(status.code(), StatusCode::kUsage);
  EXPECT_NE(status.message().find("nowhere.textproto"), std::string::npos);
  EXPECT_NE(status.message().find("No such file"), std::string::npos) << status.message();
}

TEST(PolicyFile, AFolderIsRefusedAndNotTakenForTheDefaultPolicy) {
  const TempDir folder;
  std::string text;
  const Status status = read_policy_file(folder.path(), &text);
  EXPECT_EQ(status.code(), StatusCode::kUsage);
  EXPECT_NE(status.message().find(folder.path()), std::string::npos) << status.message();
}

}  // namespace
}  // namespace holdfast
