#include "shared_folder.h"

#include <fmt/format.h>

#include <chrono>
#include <random>
#include <thread>

#include "holdfast/coord/printable.h"
#include "holdfast/coord/storage/publication.h"

namespace holdfast {
namespace {

constexpr std::chrono::seconds kPatience{5};
constexpr std::chrono::milliseconds kPause{50};

// Found on no other host by chance.
std::string unlikely_name() {
  std::random_device random;
  return fmt::format("seen-by-all-{:08x}{:08x}", random(), random());
}

bool appears(FileSystem& files, const std::string& path) {
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (!files.exists(path)) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(kPause);
  }
  return true;
}

}  // namespace

Status agree_that_all_see(Collective& collective, FileSystem& files, const std::string& folder) {
  if (collective.size() == 1) return Status();
  const bool first = collective.rank() == 0;
  Bytes path = first ? partial_path(folder, unlikely_name()) : Bytes();
  Status mine = first ? write_synced(files, path, "") : Status();
  if (Status s = agree_on_status(collective, mine.ok() ? mine : Status::usage(mine.message())); !s.ok())
    return s;
  if (Status s = collective.broadcast(&path); !s.ok()) return s;
  if (!first && !appears(files, path)) {
    mine = Status::usage("what rank 0 writes into " + printable(folder) +
                         " is not seen here: checkpoints need a file system that all hosts share");
  }
  const Status seen = agree_on_status(collective, mine);
  if (first) (void)files.remove_file(path);
  return seen;
}

}  // namespace holdfast
