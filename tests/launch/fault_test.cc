#include "train/fault.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <bit>
#include <chrono>
#include <csignal>
#include <cstring>
#include <limits>
#include <thread>

namespace holdfast::train {
namespace {

using ::testing::ExitedWithCode;
using ::testing::KilledBySignal;

Fault parsed(const std::string& spec) {
  Fault fault;
  const Status status = parse_fault(spec, &fault);
  EXPECT_TRUE(status.ok()) << status.to_string();
  return fault;
}

// The message of the refusal, which must be USAGE and name the specification.
std::string refusal(const Status& status, const std::string& spec) {
  EXPECT_EQ(status.code(), StatusCode::kUsage) << spec;
  const std::string head = "fault '" + spec + "': ";
  EXPECT_TRUE(status.message().starts_with(head)) << status.message();
  return status.message().substr(std::min(head.size(), status.message().size()));
}

std::string parse_refusal(const std::string& spec) {
  Fault fault;
  return refusal(parse_fault(spec, &fault), spec);
}

FaultSurface surface() {
  FaultSurface surface;
  surface.tensors[static_cast<std::size_t>(Stage::kInput)] = {{"images", 12}};
  surface.tensors[static_cast<std::size_t>(Stage::kLoss)] = {{"loss", 1}};
  surface.tensors[static_cast<std::size_t>(Stage::kBackward)] = {
      {"conv1.weight", 9}, {"conv1.bias", 0}, {"fc.weight", 20}, {"fc.bias", 4}};
  surface.micro_batches = 2;
  surface.world_size = 4;
  surface.attempts = 10;
  return surface;
}

Fault resolved(const std::string& spec) {
  Fault fault = parsed(spec);
  const Status status = resolve_fault(surface(), &fault);
  EXPECT_TRUE(status.ok()) << status.to_string();
  return fault;
}

std::string resolve_refusal(const std::string& spec) {
  Fault fault = parsed(spec);
  return refusal(resolve_fault(surface(), &fault), spec);
}

std::uint32_t bits_of(const float* value) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, value, sizeof bits);
  return bits;
}

// Attempts of [0, 10) in which `injector` would write into the tensor.
std::vector<std::uint64_t> corrupted_attempts(const FaultInjector& injector, Stage stage, int micro,
                                              std::string_view tensor) {
  std::vector<std::uint64_t> attempts;
  for (std::uint64_t attempt = 0; attempt < 10; ++attempt) {
    if (injector.corrupts(stage, attempt, micro, tensor)) attempts.push_back(attempt);
  }
  return attempts;
}

TEST(ParseFault, DefaultsToRank0MicroBatch0AndTheFirstElementOfAnyTensor) {
  const Fault fault = parsed("nan@backward,attempt=5");
  EXPECT_EQ(fault.kind, Fault::Kind::kValue);
  EXPECT_EQ(fault.stage, Stage::kBackward);
  EXPECT_EQ(fault.attempt, 5u);
  EXPECT_EQ(fault.rank, 0);
  EXPECT_EQ(fault.micro, 0);
  EXPECT_EQ(fault.tensor_glob, "*");
  EXPECT_EQ(fault.position, Fault::Position::kFirst);
  EXPECT_EQ(fault.spec, "nan@backward,attempt=5");
}

TEST(ParseFault, DefaultsToAllRanksAtReduction) {
  EXPECT_EQ(parsed("inf@reduction,attempt=5").rank, std::nullopt);
  EXPECT_EQ(parsed("inf@reduction,attempt=5,rank=1").rank, 1);
  EXPECT_EQ(parsed("inf@loss,attempt=5,rank=all").rank, std::nullopt);
}

TEST(ParseFault, ReadsEveryKey) {
  const Fault fault = parsed("inf@backward,every=3,rank=2,micro=1,tensor=conv[12].*,index=7");
  EXPECT_EQ(fault.attempt, std::nullopt);
  EXPECT_EQ(fault.every, 3u);
  EXPECT_EQ(fault.rank, 2);
  EXPECT_EQ(fault.micro, 1);
  EXPECT_EQ(fault.tensor_glob, "conv[12].*");
  EXPECT_EQ(fault.position, Fault::Position::kFlat);
  EXPECT_EQ(fault.index, 7);
  EXPECT_EQ(parsed("inf@loss,every=3,index=first").position, Fault::Position::kFirst);
  EXPECT_EQ(parsed("inf@loss,every=3,index=middle").position, Fault::Position::kMiddle);
  EXPECT_EQ(parsed("inf@loss,every=3,index=last").position, Fault::Position::kLast);
  EXPECT_EQ(parsed("inf@loss,attempt=18446744073709551615").attempt, 18446744073709551615u);
}

TEST(ParseFault, ReadsEveryStage) {
  for (int i = 0; i < kStageCount; ++i) {
    const auto stage = static_cast<Stage>(i);
    EXPECT_EQ(parsed("throw@" + std::string(stage_name(stage)) + ",attempt=0").stage, stage);
  }
}

TEST(ParseFault, KeepsTheBitsOfEachValue) {
  EXPECT_EQ(parsed("nan@loss,attempt=0").value_bits, 0x7fc00000u);
  EXPECT_EQ(parsed("inf@loss,attempt=0").value_bits, 0x7f800000u);
  EXPECT_EQ(parsed("-inf@loss,attempt=0").value_bits, 0xff800000u);
  EXPECT_EQ(parsed("snan@loss,attempt=0").value_bits, 0x7f800001u);
  EXPECT_EQ(parsed("value=-1.5@loss,attempt=0").value_bits, std::bit_cast<std::uint32_t>(-1.5f));
  EXPECT_EQ(parsed("value=3e38@loss,attempt=0").value_bits, std::bit_cast<std::uint32_t>(3e38f));
  EXPECT_EQ(parsed("value=3.40282347e38@loss,attempt=0").value_bits, 0x7f7fffffu);
  EXPECT_EQ(parsed("value=1e-45@loss,attempt=0").value_bits, 1u);
  EXPECT_EQ(parsed("value=-0@loss,attempt=0").value_bits, 0x80000000u);
}

TEST(ParseFault, ReadsWhatHappensToTheProcess) {
  EXPECT_EQ(parsed("throw@loss,attempt=0").kind, Fault::Kind::kThrow);
  EXPECT_EQ(parsed("hang@loss,attempt=0").kind, Fault::Kind::kHang);
  EXPECT_EQ(parsed("stop@loss,attempt=0").kind, Fault::Kind::kStop);
  EXPECT_EQ(parsed("kill@loss,attempt=0").kind, Fault::Kind::kKill);
  EXPECT_EQ(parsed("exit=255@loss,attempt=0").kind, Fault::Kind::kExit);
  EXPECT_EQ(parsed("exit=255@loss,attempt=0").exit_code, 255);
}

TEST(ParseFault, RefusesAValueThatFp32CannotHold) {
  EXPECT_EQ(parse_refusal("value=1e39@loss,attempt=0"), "value: 1e39 is not finite as fp32; use inf or -inf");
  EXPECT_EQ(parse_refusal("value=-1e39@loss,attempt=0"),
            "value: -1e39 is not finite as fp32; use inf or -inf");
  EXPECT_EQ(parse_refusal("value=1e-60@loss,attempt=0"), "value: 1e-60 is 0 as fp32");
  for (const std::string text : {"", "nan", "inf", "1x", "0x7f800001", " 1", "1 ", "1e", "--1", "."}) {
    EXPECT_EQ(parse_refusal("value=" + text + "@loss,attempt=0"),
              "value: '" + text + "' is not a decimal number");
  }
}

TEST(ParseFault, RefusesWhatItDoesNotUnderstand) {
  EXPECT_EQ(parse_refusal(""), "must be KIND@STAGE[,key=value...]");
  EXPECT_EQ(parse_refusal("nan"), "must be KIND@STAGE[,key=value...]");
  EXPECT_EQ(parse_refusal("NaN@loss,attempt=0"),
            "unknown kind 'NaN' (nan, inf, -inf, snan, value=X, throw, hang, stop, kill, exit=C)");
  EXPECT_EQ(parse_refusal("nan@Loss,attempt=0"),
            "unknown stage 'Loss' (input, forward, loss, backward, reduction, optimizer)");
  EXPECT_EQ(parse_refusal("nan@,attempt=0"),
            "unknown stage '' (input, forward, loss, backward, reduction, optimizer)");
  EXPECT_EQ(parse_refusal("nan@loss,attempt=0,step=1"),
            "unknown key 'step' (rank, attempt, every, epoch, transient, micro, tensor, index)");
  EXPECT_EQ(parse_refusal("nan@loss,attempt"), "'attempt' is not key=value");
  EXPECT_EQ(parse_refusal("nan@loss,attempt=0,"), "'' is not key=value");
  EXPECT_EQ(parse_refusal("nan@loss,attempt=0,attempt=1"), "attempt: given twice");
}

TEST(ParseFault, RefusesNumbersThatAreNone) {
  EXPECT_EQ(parse_refusal("nan@loss,attempt=-1"), "attempt: '-1' is not an attempt, a number of at least 0");
  EXPECT_EQ(parse_refusal("nan@loss,attempt=18446744073709551616"),
            "attempt: '18446744073709551616' is not an attempt, a number of at least 0");
  EXPECT_EQ(parse_refusal("nan@loss,every=0"), "every: '0' is not a number of at least 1");
  EXPECT_EQ(parse_refusal("nan@loss,attempt=0,rank=-1"), "rank: '-1' is not a rank or 'all'");
  EXPECT_EQ(parse_refusal("nan@loss,attempt=0,rank=1x"), "rank: '1x' is not a rank or 'all'");
  EXPECT_EQ(parse_refusal("nan@loss,attempt=0,micro="),
            "micro: '' is not a micro-batch, a number of at least 0");
  EXPECT_EQ(parse_refusal("nan@loss,attempt=0,index=-1"),
            "index: '-1' is none of a number of at least 0, first, middle, last");
  EXPECT_EQ(parse_refusal("nan@loss,attempt=0,tensor="), "tensor: '' is not a pattern");
  for (const std::string code : {"", "-1", "256", "1.5", "x"}) {
    EXPECT_EQ(parse_refusal("exit=" + code + "@loss,attempt=0"),
              "exit: '" + code + "' is not an exit code, 0 to 255");
  }
}

TEST(ParseFault, NeedsExactlyOneOfAttemptAndEvery) {
  EXPECT_EQ(parse_refusal("nan@loss"), "needs exactly one of attempt=A and every=K");
  EXPECT_EQ(parse_refusal("nan@loss,attempt=1,every=2"), "needs exactly one of attempt=A and every=K");
}

TEST(ParseFault, RefusesKeysThatWouldDoNothing) {
  EXPECT_EQ(parse_refusal("throw@loss,attempt=0,tensor=*"), "tensor: only for a fault that puts a value");
  EXPECT_EQ(parse_refusal("kill@loss,attempt=0,index=1"), "index: only for a fault that puts a value");
  EXPECT_EQ(parse_refusal("nan@reduction,attempt=0,micro=0"), "micro: stage reduction comes once an attempt");
  EXPECT_EQ(parse_refusal("throw@optimizer,attempt=0,micro=0"),
            "micro: stage optimizer comes once an attempt");
}

TEST(ParseFault, LeavesTheResultAloneOnFailure) {
  Fault fault = parsed("inf@loss,attempt=7");
  EXPECT_FALSE(parse_fault("nan@loss,attempt=x", &fault).ok());
  EXPECT_EQ(fault.spec, "inf@loss,attempt=7");
  EXPECT_EQ(fault.value_bits, 0x7f800000u);
}

TEST(ResolveFault, TakesTheFirstTensorThatMatches) {
  EXPECT_EQ(resolved("nan@backward,attempt=0").tensor, "conv1.weight");
  EXPECT_EQ(resolved("nan@backward,attempt=0,tensor=fc.*").tensor, "fc.weight");
  EXPECT_EQ(resolved("nan@backward,attempt=0,tensor=*.weight").tensor, "conv1.weight");
  EXPECT_EQ(resolved("nan@backward,attempt=0,tensor=?c.bias").tensor, "fc.bias");
}

TEST(ResolveFault, TurnsAPositionIntoAnElement) {
  EXPECT_EQ(resolved("nan@backward,attempt=0,tensor=fc.weight").index, 0);
  EXPECT_EQ(resolved("nan@backward,attempt=0,tensor=fc.weight,index=middle").index, 10);
  EXPECT_EQ(resolved("nan@backward,attempt=0,index=middle").index, 4);  // of 9
  EXPECT_EQ(resolved("nan@backward,attempt=0,tensor=fc.weight,index=last").index, 19);
  EXPECT_EQ(resolved("nan@backward,attempt=0,tensor=fc.weight,index=19").index, 19);
  EXPECT_EQ(resolved("nan@loss,attempt=0,index=middle").index, 0);
}

TEST(ResolveFault, RefusesPlacesThatDoNotExist) {
  EXPECT_EQ(resolve_refusal("nan@loss,attempt=0,rank=4"), "no rank 4 among 4 ranks");
  EXPECT_EQ(resolve_refusal("throw@loss,attempt=10"),
            "no attempt 10 in a run of 10 attempts (they count from 0)");
  EXPECT_EQ(resolve_refusal("throw@loss,every=11"),
            "no attempt 10 in a run of 10 attempts (they count from 0)");
  EXPECT_EQ(resolve_refusal("throw@loss,attempt=0,micro=2"), "no micro-batch 2 among 2 (they count from 0)");
  EXPECT_EQ(resolve_refusal("nan@optimizer,attempt=0"), "nothing to corrupt at stage optimizer");
  EXPECT_EQ(
      resolve_refusal("nan@backward,attempt=0,tensor=conv2.*"),
      "tensor: 'conv2.*' matches none at stage backward (conv1.weight, conv1.bias, fc.weight, fc.bias)");
  EXPECT_EQ(resolve_refusal("nan@backward,attempt=0,tensor=*.bias"), "tensor 'conv1.bias' is empty");
  EXPECT_EQ(resolve_refusal("nan@backward,attempt=0,tensor=fc.weight,index=20"),
            "index: no element 20 in tensor 'fc.weight' of 20");
}

TEST(ResolveFault, AcceptsTheLastPlaceOfEachKind) {
  resolved("nan@loss,attempt=9,rank=3,micro=1");
  resolved("throw@optimizer,every=10");
}

std::vector<std::string> specs(const std::vector<Fault>& faults) {
  std::vector<std::string> all;
  for (const Fault& fault : faults) all.push_back(fault.spec);
  return all;
}

TEST(FaultsMadeAgain, AreAllButTheTransientOnes) {
  const std::string often = "nan@loss,attempt=1";
  const std::string once = "nan@loss,attempt=2,transient=yes";
  EXPECT_EQ(specs(faults_made_again({resolved(often), resolved(once)})), std::vector<std::string>{often});
}

TEST(FaultsMadeAgain, AreValuesAndExceptionsAndNeverWhatStopsAProcess) {
  const std::vector<Fault> all = {resolved("nan@loss,attempt=1"), resolved("throw@backward,attempt=1"),
                                  resolved("stop@input,attempt=1,rank=0"),
                                  resolved("kill@forward,attempt=1,rank=0"),
                                  resolved("hang@forward,attempt=1,rank=0")};
  EXPECT_EQ(specs(faults_made_again(all)),
            (std::vector<std::string>{"nan@loss,attempt=1", "throw@backward,attempt=1"}));
}

TEST(FaultsOfTheData, AreValuesInTheInput) {
  const std::string data = "nan@input,attempt=1,rank=2";
  const std::vector<Fault> all = {resolved("nan@input,attempt=1,transient=yes"),
                                  resolved("throw@input,attempt=1"), resolved(data),
                                  resolved("nan@loss,attempt=1"), resolved("inf@backward,attempt=1")};
  EXPECT_EQ(specs(faults_of_the_data(all)), std::vector<std::string>{data});
}

TEST(ParseFault, TransientIsYesOrAbsent) {
  EXPECT_TRUE(parsed("nan@loss,attempt=1,transient=yes").transient);
  EXPECT_FALSE(parsed("nan@loss,attempt=1").transient);
  EXPECT_EQ(parse_refusal("nan@loss,attempt=1,transient=no"), "transient: 'no' is not 'yes'");
}

TEST(FaultInjector, WritesOneElementBitForBit) {
  for (const auto& [kind, bits] : {std::pair{"nan", 0x7fc00000u},
                                   {"snan", 0x7f800001u},
                                   {"inf", 0x7f800000u},
                                   {"-inf", 0xff800000u},
                                   {"value=1", 0x3f800000u}}) {
    const FaultInjector injector({resolved(std::string(kind) + "@backward,attempt=2,index=5")}, 0);
    std::array<float, 9> data;
    data.fill(-7.0f);
    injector.corrupt(Stage::kBackward, 2, 0, "conv1.weight", data.data(), 9);
    for (std::size_t i = 0; i < data.size(); ++i) {
      EXPECT_EQ(bits_of(&data[i]), i == 5 ? bits : std::bit_cast<std::uint32_t>(-7.0f)) << kind << " " << i;
    }
  }
}

TEST(FaultInjector, WritesNowhereElse) {
  const FaultInjector injector({resolved("nan@backward,attempt=2,micro=1,tensor=fc.*")}, 0);
  std::array<float, 20> data{};
  injector.corrupt(Stage::kBackward, 1, 1, "fc.weight", data.data(), 20);
  injector.corrupt(Stage::kBackward, 3, 1, "fc.weight", data.data(), 20);
  injector.corrupt(Stage::kBackward, 2, 0, "fc.weight", data.data(), 20);
  injector.corrupt(Stage::kReduction, 2, 1, "fc.weight", data.data(), 20);
  injector.corrupt(Stage::kBackward, 2, 1, "fc.bias", data.data(), 4);  // matches, but is not the first
  for (const float& value : data) EXPECT_EQ(bits_of(&value), 0u);
  injector.at(Stage::kBackward, 2, 1);  // a value is nothing that happens to the process
  injector.corrupt(Stage::kBackward, 2, 1, "fc.weight", data.data(), 20);
  EXPECT_EQ(bits_of(data.data()), 0x7fc00000u);
}

TEST(FaultInjector, HappensOnItsRankOnly) {
  const std::vector<Fault> faults = {resolved("nan@loss,attempt=2,rank=1"),
                                     resolved("nan@loss,attempt=4,rank=all")};
  using Attempts = std::vector<std::uint64_t>;
  EXPECT_EQ(corrupted_attempts(FaultInjector(faults, 0), Stage::kLoss, 0, "loss"), (Attempts{4}));
  EXPECT_EQ(corrupted_attempts(FaultInjector(faults, 1), Stage::kLoss, 0, "loss"), (Attempts{2, 4}));
  EXPECT_EQ(corrupted_attempts(FaultInjector(), Stage::kLoss, 0, "loss"), Attempts{});
}

TEST(FaultInjector, EveryKthAttemptIsTheLastOfEachK) {
  using Attempts = std::vector<std::uint64_t>;
  EXPECT_EQ(corrupted_attempts(FaultInjector({resolved("nan@loss,every=4")}, 0), Stage::kLoss, 0, "loss"),
            (Attempts{3, 7}));
  EXPECT_EQ(corrupted_attempts(FaultInjector({resolved("nan@loss,every=1")}, 0), Stage::kLoss, 0, "loss"),
            (Attempts{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
}

TEST(FaultInjector, DoesNotLookAtTheMicroBatchWhereThereIsNone) {
  const FaultInjector injector({resolved("throw@optimizer,attempt=2"), resolved("throw@loss,attempt=2")}, 0);
  EXPECT_THROW(injector.at(Stage::kOptimizer, 2, 1), InjectedFault);
  EXPECT_THROW(injector.at(Stage::kLoss, 2, 0), InjectedFault);
  EXPECT_NO_THROW(injector.at(Stage::kLoss, 2, 1));
}

TEST(FaultInjector, ThrowsItsSpecificationAndSaysSoFirst) {
  const FaultInjector injector({resolved("throw@forward,attempt=3,rank=all")}, 2);
  testing::internal::CaptureStderr();
  std::string what;
  try {
    injector.at(Stage::kForward, 3, 0);
  } catch (const InjectedFault& fault) {
    what = fault.what();
  }
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "guarded_train: rank 2: injecting throw@forward,attempt=3,rank=all at attempt 3\n");
  EXPECT_EQ(what, "injected fault throw@forward,attempt=3,rank=all");
}

TEST(FaultInjector, RefusesATensorShorterThanItsSurface) {
  const FaultInjector injector({resolved("nan@backward,attempt=0,index=8")}, 0);
  std::array<float, 8> data{};
  EXPECT_THROW(injector.corrupt(Stage::kBackward, 0, 0, "conv1.weight", data.data(), 8), std::out_of_range);
}

using FaultInjectorDeathTest = ::testing::Test;

TEST(FaultInjectorDeathTest, LeavesWithTheExitCode) {
  const FaultInjector injector({resolved("exit=7@loss,attempt=0")}, 0);
  EXPECT_EXIT(injector.at(Stage::kLoss, 0, 0), ExitedWithCode(7),
              "guarded_train: rank 0: injecting exit=7@loss,attempt=0 at attempt 0");
}

TEST(FaultInjectorDeathTest, Kills) {
  const FaultInjector injector({resolved("kill@loss,attempt=0")}, 0);
  EXPECT_EXIT(injector.at(Stage::kLoss, 0, 0), KilledBySignal(SIGKILL), "injecting kill@loss");
}

// Runs `body` in a child process and returns its number. The child ends with code 0 if `body` returns.
template <typename Body>
pid_t in_child(Body&& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    body();
    ::_exit(0);
  }
  return child;
}

TEST(FaultInjectorDeathTest, StopsAndGoesOnWhenContinued) {
  const FaultInjector injector({resolved("stop@loss,attempt=0")}, 0);
  const pid_t child = in_child([&] { injector.at(Stage::kLoss, 0, 0); });
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, WUNTRACED), child);
  ASSERT_TRUE(WIFSTOPPED(status));
  EXPECT_EQ(WSTOPSIG(status), SIGSTOP);
  ::kill(child, SIGCONT);
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

TEST(FaultInjectorDeathTest, HangsThroughSignalsUntilItIsKilled) {
  int pipe_ends[2];
  ASSERT_EQ(::pipe(pipe_ends), 0);
  const FaultInjector injector({resolved("hang@loss,attempt=0")}, 0);
  const pid_t child = in_child([&] {
    ::dup2(pipe_ends[1], STDERR_FILENO);
    std::signal(SIGUSR1, [](int) {});
    injector.at(Stage::kLoss, 0, 0);
  });
  char first = 0;
  ASSERT_EQ(::read(pipe_ends[0], &first, 1), 1);  // it has said what it is about to do
  for (int i = 0; i < 20; ++i) {
    ::kill(child, SIGUSR1);
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, WNOHANG), 0);
  ::kill(child, SIGKILL);
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
  ::close(pipe_ends[0]);
  ::close(pipe_ends[1]);
}

}  // namespace
}  // namespace holdfast::train
