#include "posix_io.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

namespace holdfast {
namespace {

void nothing(int) {}

// write() into a pipe that is read slowly, with a signal every millisecond that does not restart it.
TEST(PosixIoTest, AWriteGoesOnWhereASignalInterruptedIt) {
  struct sigaction action = {}, before = {};
  action.sa_handler = nothing;  // without SA_RESTART
  ASSERT_EQ(sigaction(SIGUSR1, &action, &before), 0);
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  std::string sent;
  for (int i = 0; i < 400'000; ++i) sent += static_cast<char>(i % 251);
  std::atomic<bool> done = false;
  const pthread_t writer = pthread_self();
  std::thread signals([&] {
    while (!done) {
      pthread_kill(writer, SIGUSR1);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  std::string received;
  std::thread reader([&] {
    char part[8192];
    for (ssize_t n = 1; n > 0;) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      n = read(ends[0], part, sizeof part);
      if (n > 0) received.append(part, static_cast<std::size_t>(n));
    }
  });
  const bool written = write_all(ends[1], sent);
  close(ends[1]);
  done = true;
  signals.join();
  reader.join();
  close(ends[0]);
  sigaction(SIGUSR1, &before, nullptr);
  EXPECT_TRUE(written);
  EXPECT_TRUE(received == sent) << received.size() << " bytes";
}

TEST(PosixIoTest, AFailureLeavesTheReasonInErrno) {
  EXPECT_FALSE(write_all(-1, "x"));
  EXPECT_EQ(errno, EBADF);
  errno = 0;
  EXPECT_FALSE(sync_folder_at("/dev/null"));
  EXPECT_EQ(errno, ENOTDIR);
  errno = 0;
  EXPECT_FALSE(close_file(-1));
  EXPECT_EQ(errno, EBADF);
}

TEST(PosixIoTest, AFolderOnAFileSystemThatDoesNotSyncFoldersIsFine) {
  EXPECT_TRUE(sync_folder_at("/proc"));  // fsync says EINVAL there
}

}  // namespace
}  // namespace holdfast
