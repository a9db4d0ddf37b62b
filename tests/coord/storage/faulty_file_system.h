// A file system that fails, fills up, tears, dies or loses power where a test says.
//
//   FaultyFileSystem files;            // wraps the real one
//   files.die_at(7, When::kTorn);      // calls are numbered from 1, see log()
//   ... run what is tested; it sees failures only from there on ...
//   ASSERT_TRUE(files.cut_power().ok());
//   ... look at the disk through real_file_system() ...
//
// Counted are the calls of FileSystem and of the files that it opened, but for kind(), free_bytes() and
// size().
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "holdfast/coord/storage/file_system.h"

namespace holdfast {

// When the process dies: before the call takes effect, in the middle of it (an append writes half of its
// bytes, another call nothing), or after it, without the caller learning of it.
enum class When { kBefore, kTorn, kAfter };

// Any thread; calls are made one after another. Outlives the files that it opened.
class FaultyFileSystem final : public FileSystem {
 public:
  explicit FaultyFileSystem(FileSystem& disk = real_file_system()) : disk_(disk) {}

  int calls() const;
  std::vector<std::string> log() const;  // "append /tmp/x/file", in order
  std::uint64_t appended_bytes() const;

  // Call n does nothing and fails; of several fail_at() the last counts.
  void fail_at(int n, std::string reason = "Input/output error");
  void fail_from(int n, std::string reason = "Input/output error");
  // Of what is appended from now on, `bytes` fit; an append that does not writes what still fits and fails.
  void full_after(std::uint64_t bytes);
  void space_is_back();
  // What free_bytes() says; the disk's own figure until then.
  void report_free(std::uint64_t bytes);
  // At call n all ends as far as the caller can see: that call and all later ones fail.
  void die_at(int n, When when);
  // The same for real, in a child process of the test: exit code 137.
  void exit_at(int n, When when);
  bool dead() const;

  // Dead now, and the disk is left as a power cut may leave it at worst: files lose the bytes that were not
  // synced; names that were made, renamed or removed in a folder that was not synced since are as they were
  // before.
  Status cut_power();

  Status create_folder(const std::string& path) override;
  Status create_file(const std::string& path, std::unique_ptr<WritableFile>* out) override;
  Status open_file(const std::string& path, std::unique_ptr<ReadableFile>* out) override;
  Status rename(const std::string& from, const std::string& to) override;
  Status sync_folder(const std::string& path) override;
  Status list(const std::string& path, std::vector<std::string>* names) override;
  FileKind kind(const std::string& path) override { return disk_.kind(path); }
  Status remove_file(const std::string& path) override;
  Status remove_folder(const std::string& path) override;
  Status free_bytes(const std::string& path, std::uint64_t* bytes) override;

 private:
  class Written;
  class Read;

  // A file that was made here, wherever it has been renamed to.
  struct File {
    std::string path;
    std::uint64_t size = 0;
    std::uint64_t synced = 0;
  };

  // What a power cut undoes, until the folders that it is about are synced.
  struct Change {
    enum Kind { kMade, kRenamed, kFileRemoved, kFolderRemoved } kind;
    std::string path;
    std::string from;                    // of kRenamed
    std::optional<std::string> content;  // of what was removed or replaced, as far as it was on disk
    std::set<std::string> unsynced;
  };

  static constexpr std::uint64_t kNoLimit = std::numeric_limits<std::uint64_t>::max();

  Status call(const std::string& name, const std::string& path, const std::function<Status()>& run,
              const std::function<Status()>& torn = {});
  Status die(const std::string& name, const std::string& path);
  Status append(WritableFile& file, File& state, std::string_view bytes);
  void folder_synced(const std::string& path);
  void moved(const std::string& from, const std::string& to);
  Status undo(const Change& change);
  std::optional<std::string> durable_content(const std::string& path);
  void forget(const std::string& path);
  Status put(const std::string& path, std::string_view bytes);

  FileSystem& disk_;
  mutable std::mutex mutex_;  // guards the rest
  std::vector<std::string> log_;
  int fail_at_ = 0;
  int fail_from_ = std::numeric_limits<int>::max();
  std::string reason_;
  std::uint64_t fits_ = kNoLimit;
  std::uint64_t appended_ = 0;
  std::optional<std::uint64_t> reported_free_;
  int die_at_ = 0;
  When when_ = When::kBefore;
  bool exits_ = false;
  bool dead_ = false;
  std::vector<std::shared_ptr<File>> files_;
  std::vector<Change> changes_;  // in order
};

}  // namespace holdfast
