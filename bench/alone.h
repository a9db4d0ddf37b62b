// One rank without others, in a run folder of its own: what is left is what the guard itself costs.
#pragma once

#include <stdlib.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "holdfast/collectives/collective.h"

namespace holdfast::bench {

class AloneCollective final : public Collective {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  Status reduce(Record&) override { return {}; }
  using Collective::gather;
  Status gather(const Bytes& mine, std::vector<Bytes>* all, int) override {
    all->assign(1, mine);
    return {};
  }
  Status broadcast(Bytes*) override { return {}; }
};

// In `parent`, or in the temporary folder; removed at the end.
class RunDir {
 public:
  explicit RunDir(const std::filesystem::path& parent = std::filesystem::temp_directory_path()) {
    std::string name = (parent / "holdfast_bench_XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) std::abort();
    folder_ = name;
  }
  ~RunDir() {
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }
  RunDir(const RunDir&) = delete;
  RunDir& operator=(const RunDir&) = delete;
  std::string path() const { return folder_ + "/run"; }

 private:
  std::string folder_;
};

}  // namespace holdfast::bench
