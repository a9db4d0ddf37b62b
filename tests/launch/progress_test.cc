#include "train/progress.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <pty.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <optional>
#include <string>

namespace holdfast::train {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

ProgressView view() { return {120, 600, 118, 2, 0.43214, 1.2345, 98.34}; }

TEST(FormatProgress, ShowsEveryField) {
  EXPECT_EQ(format_progress(view(), 0),
            "attempt 120/600  loss 0.4321  grad norm 1.234  skips 2  0:05 left  98.3/s  updates 118");
}

TEST(FormatProgress, ShowsNonFiniteValuesAsTheyAre) {
  ProgressView shown = view();
  shown.loss = -kNan;
  shown.gradient_norm = kInf;
  EXPECT_EQ(format_progress(shown, 0),
            "attempt 120/600  loss nan  grad norm inf  skips 2  0:05 left  98.3/s  updates 118");
  shown.loss = -kInf;
  shown.gradient_norm = kNan;
  EXPECT_EQ(format_progress(shown, 0),
            "attempt 120/600  loss -inf  grad norm nan  skips 2  0:05 left  98.3/s  updates 118");
}

TEST(FormatProgress, ShowsFourDigits) {
  ProgressView shown = view();
  for (const auto& [loss, text] : {std::pair{0.0, "0.000"},
                                   {2.0, "2.000"},
                                   {-0.01, "-0.01000"},
                                   {999.94, "999.9"},
                                   {1000.0, "1000"},
                                   {123456.0, "1.235e+05"},
                                   {3e38, "3e+38"}}) {
    shown.loss = loss;
    EXPECT_EQ(format_progress(shown, 17 + 5 + std::strlen(text)),
              std::string("attempt 120/600  loss ") + text);
  }
}

TEST(FormatProgress, ShowsALongRunsEssentialsIn80Columns) {
  EXPECT_EQ(format_progress({50000, 60000, 49900, 100, 0.4321, 1.234, 98.34}, 79),
            "attempt 50000/60000  loss 0.4321  grad norm 1.234  skips 100  1:42 left  98.3/s");
}

TEST(FormatProgress, SaysWhenTheRateIsNotKnown) {
  for (const double rate : {0.0, kNan}) {
    ProgressView shown = view();
    shown.attempts_per_second = rate;
    EXPECT_EQ(format_progress(shown, 70),
              "attempt 120/600  loss 0.4321  grad norm 1.234  skips 2  ? left  ?/s");
  }
}

TEST(FormatProgress, ShowsRatesWithTheDigitsThatMatter) {
  ProgressView shown = view();
  shown.done = shown.total;  // nothing is left
  for (const auto& [rate, text] :
       {std::pair{1234.56, "1235/s"}, {99.96, "100.0/s"}, {2.345, "2.3/s"}, {0.0123, "0.012/s"}}) {
    shown.attempts_per_second = rate;
    EXPECT_EQ(format_progress(shown, 65),
              std::string("attempt 600/600  loss 0.4321  grad norm 1.234  skips 2  ") + text);
  }
}

TEST(FormatProgress, LeavesOutWholeFieldsToFitTheWidth) {
  const std::string whole = format_progress(view(), 0);
  EXPECT_EQ(format_progress(view(), whole.size()), whole);
  EXPECT_EQ(format_progress(view(), whole.size() - 1), whole.substr(0, whole.rfind("  ")));
  EXPECT_EQ(format_progress(view(), 30), "attempt 120/600  loss 0.4321");
  EXPECT_EQ(format_progress(view(), 15), "attempt 120/600");
  EXPECT_EQ(format_progress(view(), 9), "attempt 1");
  for (std::size_t width = 1; width < 100; ++width) EXPECT_LE(format_progress(view(), width).size(), width);
}

TEST(FormatDuration, ReadsAsAClock) {
  EXPECT_EQ(format_duration(0.0), "0:00");
  EXPECT_EQ(format_duration(4.4), "0:04");
  EXPECT_EQ(format_duration(59.6), "1:00");
  EXPECT_EQ(format_duration(754.0), "12:34");
  EXPECT_EQ(format_duration(3723.0), "1:02:03");
  EXPECT_EQ(format_duration(3 * 86400.0 + 4 * 3600.0 + 5 * 60.0), "3d 04:05");
  EXPECT_EQ(format_duration(-1.0), "?");
  EXPECT_EQ(format_duration(kNan), "?");
  EXPECT_EQ(format_duration(kInf), "?");
  EXPECT_EQ(format_duration(1e13), "?");
}

// A file to write to, and a clock that is set by hand.
class ProgressOutput : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_NE(file_, nullptr); }
  void TearDown() override { std::fclose(file_); }

  // What was written since the last call.
  std::string written() {
    std::string text(static_cast<std::size_t>(std::ftell(file_) - read_), '\0');
    const auto got = ::pread(::fileno(file_), text.data(), text.size(), read_);
    EXPECT_EQ(got, static_cast<ssize_t>(text.size()));
    read_ += got;
    return text;
  }
  void report(Progress& progress, std::uint64_t attempt, std::uint64_t skips = 0) {
    progress.report(attempt, attempt + 1 - skips, skips, 0.5, 2.0);
  }

  double now_ = 1000.0;
  std::FILE* file_ = std::tmpfile();
  long read_ = 0;
  const Progress::Clock clock_ = [this] { return now_; };
};

TEST_F(ProgressOutput, PlainLinesComeEveryTwoSecondsAndAtTheEnd) {
  Progress progress(100, Progress::Mode::kPlain, file_, clock_);
  now_ += 1.0;
  report(progress, 0);
  EXPECT_EQ(written(), "attempt 1/100  loss 0.5000  grad norm 2.000  skips 0  1:39 left  1/s  updates 1\n");
  now_ += 1.9;
  report(progress, 1);
  EXPECT_EQ(written(), "");
  now_ += 0.1;
  report(progress, 2);
  EXPECT_EQ(written(), "attempt 3/100  loss 0.5000  grad norm 2.000  skips 0  1:37 left  1/s  updates 3\n");
  report(progress, 98);
  EXPECT_EQ(written(), "");
  report(progress, 99);
  EXPECT_EQ(written(), "attempt 100/100  loss 0.5000  grad norm 2.000  skips 0  33.3/s  updates 100\n");
  progress.finish();
  EXPECT_EQ(written(), "");
}

TEST_F(ProgressOutput, FinishWritesWhatWasHeldBackOnce) {
  {
    Progress progress(100, Progress::Mode::kPlain, file_, clock_);
    now_ += 1.0;
    report(progress, 0);
    report(progress, 1);
    written();
    progress.finish();
    EXPECT_EQ(written(), "attempt 2/100  loss 0.5000  grad norm 2.000  skips 0  0:49 left  2/s  updates 2\n");
    progress.finish();
  }
  EXPECT_EQ(written(), "");
}

TEST_F(ProgressOutput, ATerminalsLineIsRewrittenEveryFifthOfASecond) {
  Progress progress(100, Progress::Mode::kTerminal, file_, clock_);
  now_ += 1.0;
  report(progress, 0);
  EXPECT_EQ(written(),
            "\rattempt 1/100  loss 0.5000  grad norm 2.000  skips 0  1:39 left  1/s  updates 1\033[K");
  now_ += 0.125;
  report(progress, 1);
  EXPECT_EQ(written(), "");
  now_ += 0.125;
  report(progress, 4);
  EXPECT_EQ(written(),
            "\rattempt 5/100  loss 0.5000  grad norm 2.000  skips 0  0:24 left  4/s  updates 5\033[K");
  progress.finish();
  EXPECT_EQ(written(), "\n");
  progress.finish();
  EXPECT_EQ(written(), "");
}

TEST_F(ProgressOutput, ANoteStandsAboveTheTerminalsLine) {
  Progress progress(100, Progress::Mode::kTerminal, file_, clock_);
  progress.note("first");
  EXPECT_EQ(written(), "first\n");
  now_ += 1.0;
  report(progress, 0);
  const std::string line = written();
  progress.note("skipped attempt 0");
  EXPECT_EQ(written(), "\r\033[Kskipped attempt 0\n" + line);
  progress.finish();
  progress.note("done");
  EXPECT_EQ(written(), "\ndone\n");
}

TEST_F(ProgressOutput, ANoteIsAPlainLineInALog) {
  Progress progress(100, Progress::Mode::kPlain, file_, clock_);
  now_ += 1.0;
  report(progress, 0);
  written();
  progress.note("skipped attempt 0");
  EXPECT_EQ(written(), "skipped attempt 0\n");
}

TEST_F(ProgressOutput, ANoteCannotControlTheTerminal) {
  Progress progress(100, Progress::Mode::kPlain, file_, clock_);
  progress.note("tensor \033[2J\r\n\x7f \u00e9");
  EXPECT_EQ(written(), "tensor \\x1b[2J\\x0d\\x0a\\x7f \u00e9\n");
}

TEST_F(ProgressOutput, OffWritesNothing) {
  Progress progress(1, Progress::Mode::kOff, file_, clock_);
  report(progress, 0);
  progress.note("note");
  progress.finish();
  EXPECT_EQ(written(), "");
}

TEST_F(ProgressOutput, TheRateIsTheRecentOne) {
  Progress progress(1000, Progress::Mode::kPlain, file_, clock_);
  std::uint64_t attempt = 0;
  for (int second = 0; second < 30; ++second) {  // 1/s
    now_ += 1.0;
    report(progress, attempt++);
  }
  for (int i = 0; i < 120; ++i) {  // then 8/s for 15 s
    now_ += 0.125;
    report(progress, attempt++);
  }
  written();
  progress.finish();
  report(progress, attempt);  // 151 of 1000
  progress.finish();
  const std::string line = written();
  EXPECT_NE(line.find("  8"), std::string::npos) << line;
  EXPECT_NE(line.find("8.1/s"), std::string::npos) << line;
}

TEST_F(ProgressOutput, ARunThatGoesOnInTheMiddleDoesNotCountWhatWasDoneBefore) {
  Progress progress(1000, Progress::Mode::kPlain, file_, clock_);
  now_ += 1.0;
  report(progress, 500);
  EXPECT_EQ(written(),
            "attempt 501/1000  loss 0.5000  grad norm 2.000  skips 0  8:19 left  1/s  updates 501\n");
}

// A pseudo-terminal of the given width: what a program writes to `out` is shown on it.
struct Terminal {
  explicit Terminal(int columns) {
    winsize size{};
    size.ws_row = 24;
    size.ws_col = static_cast<unsigned short>(columns);
    EXPECT_EQ(::openpty(&screen, &program, nullptr, nullptr, &size), 0);
    out = ::fdopen(program, "w");
  }
  ~Terminal() {
    std::fclose(out);
    ::close(screen);
  }
  std::string shown() const {
    std::string text(4096, '\0');
    const auto got = ::read(screen, text.data(), text.size());
    text.resize(got > 0 ? static_cast<std::size_t>(got) : 0);
    return text;
  }
  int screen = -1;
  int program = -1;
  std::FILE* out = nullptr;
};

TEST(ProgressTerminal, TheLineIsNarrowerThanTheTerminal) {
  for (const int columns : {200, 60, 20, 2}) {
    const Terminal terminal(columns);
    double now = 0.0;
    Progress progress(600, Progress::Mode::kTerminal, terminal.out, [&now] { return now; });
    now = 1.0;
    progress.report(119, 118, 2, 0.43214, 1.2345);
    ProgressView expected = view();
    expected.attempts_per_second = 1.0;
    EXPECT_EQ(terminal.shown(),
              "\r" + format_progress(expected, static_cast<std::size_t>(columns - 1)) + "\033[K")
        << columns;
  }
}

TEST(ProgressTerminal, AWidthThatIsNotKnownIsTakenFor80) {
  const Terminal terminal(0);
  double now = 0.0;
  Progress progress(600, Progress::Mode::kTerminal, terminal.out, [&now] { return now; });
  now = 1.0;
  progress.report(119, 118, 2, 0.43214, 1.2345);
  ProgressView expected = view();
  expected.attempts_per_second = 1.0;
  EXPECT_EQ(terminal.shown(), "\r" + format_progress(expected, 79) + "\033[K");
}

// Runs find_output_target() in a process whose stdout is `own`, below `between` processes of some other name,
// below one that is called `launcher` and whose stdout is `launchers`. Returns the width of the terminal that
// was found, 0 for none.
int found_width(const std::string& launcher, int launchers, int own, int between = 0) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::dup2(launchers, STDOUT_FILENO);
    ::prctl(PR_SET_NAME, launcher.c_str());
    for (int level = 0; level <= between; ++level) {
      const pid_t next = ::fork();
      if (next != 0) {
        int status = 0;
        ::waitpid(next, &status, 0);
        ::_exit(WEXITSTATUS(status));
      }
      ::prctl(PR_SET_NAME, "sh");
    }
    ::dup2(own, STDOUT_FILENO);
    const OutputTarget target = find_output_target();
    if (!target.terminal) ::_exit(0);
    winsize size{};
    const int fd = ::open(target.device.c_str(), O_RDONLY | O_NOCTTY);
    ::_exit(::ioctl(fd, TIOCGWINSZ, &size) == 0 ? size.ws_col : 255);
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  return WEXITSTATUS(status);
}

class FindOutputTarget : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_NE(file_, nullptr);
    if (const char* term = std::getenv("TERM")) saved_term_ = term;
    ::setenv("TERM", "xterm", 1);
  }
  void TearDown() override {
    std::fclose(file_);
    saved_term_ ? ::setenv("TERM", saved_term_->c_str(), 1) : ::unsetenv("TERM");
  }
  int log() const { return ::fileno(file_); }

  const Terminal screen_{100};  // of the user
  const Terminal pseudo_{33};   // which mpirun gives to each rank
  std::FILE* const file_ = std::tmpfile();
  std::optional<std::string> saved_term_;
};

TEST_F(FindOutputTarget, IsStdoutWithoutMpirun) {
  EXPECT_EQ(found_width("sh", log(), screen_.program), 100);
  EXPECT_EQ(found_width("sh", screen_.program, log()), 0);
}

TEST_F(FindOutputTarget, IsMpirunsStdoutUnderMpirun) {
  for (const std::string launcher : {"mpirun", "mpiexec", "orterun", "prterun"}) {
    EXPECT_EQ(found_width(launcher, screen_.program, pseudo_.program), 100) << launcher;
    EXPECT_EQ(found_width(launcher, log(), pseudo_.program), 0) << launcher;
    EXPECT_EQ(found_width(launcher, screen_.program, pseudo_.program, 3), 100) << launcher;
    EXPECT_EQ(found_width(launcher, log(), pseudo_.program, 3), 0) << launcher;
  }
}

TEST_F(FindOutputTarget, IsALogWhenMpirunIsOnAnotherHost) {
  EXPECT_EQ(found_width("orted", screen_.program, pseudo_.program), 0);
}

TEST_F(FindOutputTarget, IsALogWhenTheRanksOwnStdoutWasRedirected) {
  EXPECT_EQ(found_width("mpirun", screen_.program, log()), 0);
}

TEST_F(FindOutputTarget, IsALogWhenLinesAreTagged) {
  for (const char* name :
       {"OMPI_MCA_orte_tag_output", "OMPI_MCA_orte_timestamp_output", "OMPI_MCA_orte_xml_output"}) {
    ::setenv(name, "1", 1);
    EXPECT_EQ(found_width("mpirun", screen_.program, pseudo_.program), 0) << name;
    ::unsetenv(name);
  }
}

TEST_F(FindOutputTarget, IsALogOnATerminalThatCannotRewriteALine) {
  ::setenv("TERM", "dumb", 1);
  EXPECT_EQ(found_width("sh", log(), screen_.program), 0);
  EXPECT_EQ(found_width("mpirun", screen_.program, pseudo_.program), 0);
}

}  // namespace
}  // namespace holdfast::train
