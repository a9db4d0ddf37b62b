// A disk that is full.
#pragma once

#include <signal.h>
#include <sys/resource.h>

namespace holdfast {

// No file of this process can grow beyond `bytes` while this lives: a disk that is full from there on.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : handler_(signal(SIGXFSZ, SIG_IGN)) {
    getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit small = {bytes, before_.rlim_max};
    setrlimit(RLIMIT_FSIZE, &small);
  }
  ~FileSizeLimit() {
    setrlimit(RLIMIT_FSIZE, &before_);
    signal(SIGXFSZ, handler_);
  }

 private:
  rlimit before_ = {};
  void (*const handler_)(int);
};

}  // namespace holdfast
