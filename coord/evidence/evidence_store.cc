#include "holdfast/coord/evidence/evidence_store.h"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <filesystem>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <utility>

#include "bundle_writer.h"
#include "holdfast/coord/evidence/evidence.pb.h"
#include "holdfast/coord/printable.h"
#include "holdfast/coord/storage/background_writer.h"
#include "holdfast/coord/storage/outcome_queue.h"
#include "holdfast/coord/storage/publication.h"

namespace holdfast {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kMostPending = 16;
// One that is written and one that waits: so much of the ranks' tensors is in memory at most.
constexpr int kMostHolding = 2;

// What a bundle was promised when it was submitted, and gives back when it is written.
struct Claim {
  bool full = false;
  bool holds = false;  // tensors, in memory
  TensorAllowance tensors;
};

// In memory: tensors without elements hold nothing.
bool holds_tensors(const std::vector<EvidencePart>& parts) {
  return std::ranges::any_of(parts, [](const EvidencePart& part) {
    return std::ranges::any_of(part.tensors(), [](const EvidenceTensor& t) { return !t.data().empty(); });
  });
}

struct Job {
  GenerationId id;
  BundleManifest about;
  std::vector<EvidencePart> parts;
  Claim claim;
  Clock::time_point submitted;
};

}  // namespace

class EvidenceStore::Impl {
 public:
  Impl(FileSystem& files, const std::string& incidents, const EvidenceOptions& options)
      : files_(files), incidents_(incidents), options_(options) {}

  Status open();
  TensorAllowance next() const;
  void submit(BundleManifest about, std::vector<EvidencePart> parts);
  std::vector<BundleOutcome> take_outcomes() { return outcomes_.take(); }
  bool wait_for(std::chrono::milliseconds most) { return writer_.wait_for(most); }

 private:
  struct Count {
    std::uint64_t bundles = 0;
    std::uint64_t full = 0;   // of them, with tensors
    std::uint64_t bytes = 0;  // of all files; of what is pending, those that it may have of tensors
  };

  void count(const std::string& name);
  Status start_thread();
  std::uint64_t left() const;
  TensorAllowance allowance() const;
  std::string why_refused(bool holds) const;
  void settle(const Claim& claim, BundleOutcome outcome);
  void tell(BundleOutcome outcome) noexcept;
  void run(Job& job);
  void write(Job& job, BundleOutcome* outcome);

  FileSystem& files_;
  const std::string incidents_;
  const EvidenceOptions options_;

  mutable std::mutex mutex_;  // guards the next three
  Count used_;                // on disk
  Count pending_;             // submitted, and neither on disk nor given up
  int holding_ = 0;           // of them

  OutcomeQueue<BundleOutcome> outcomes_{2 * kMostPending};

  BackgroundWriter writer_{kMostPending};  // last: its jobs use all of the above
};

Status EvidenceStore::Impl::open() {
  if (Status s = files_.create_folder(incidents_); !s.ok()) return s;
  const auto parent = std::filesystem::path(incidents_).parent_path();
  if (Status s = files_.sync_folder(parent.empty() ? "." : parent.string()); !s.ok()) return s;
  if (Status s = remove_partials(files_, incidents_); !s.ok()) return s;
  std::vector<std::string> names;
  if (Status s = files_.list(incidents_, &names); !s.ok()) return s;
  for (const std::string& name : names) count(name);
  return start_thread();
}

// What of a damaged one cannot be looked at is left out: that is no reason to keep nothing of the next
// incident.
void EvidenceStore::Impl::count(const std::string& name) {
  GenerationId id;
  const std::string path = incidents_ + "/" + name;
  if (!parse_generation_name(name, &id) || files_.kind(path) != FileKind::kFolder) return;
  std::vector<std::string> inside;
  std::uint64_t bytes = 0;
  (void)files_.list(path, &inside);
  (void)tree_bytes(files_, path, &bytes);
  ++used_.bundles;
  used_.bytes += bytes;
  const auto has_tensors = [](const std::string& file) { return file.ends_with(".safetensors"); };
  used_.full += std::ranges::any_of(inside, has_tensors) ? 1 : 0;
}

// Without a thread of its own the writer would do its work in submit(), and a file system that hangs would
// hold up the training.
Status EvidenceStore::Impl::start_thread() {
  std::thread::id other = std::this_thread::get_id();
  writer_.submit([&other] { other = std::this_thread::get_id(); });
  writer_.wait();
  if (other != std::this_thread::get_id()) return Status();
  return Status::internal("no thread can be started to write evidence");
}

std::uint64_t EvidenceStore::Impl::left() const {
  const std::uint64_t taken = used_.bytes + pending_.bytes;
  const std::uint64_t of_run = options_.run_quota_bytes > taken ? options_.run_quota_bytes - taken : 0;
  return std::min(options_.bundle_quota_bytes, of_run);
}

TensorAllowance EvidenceStore::Impl::allowance() const {
  if (used_.full + pending_.full >= options_.full_incidents)
    return {0, fmt::format("the first {} incidents are kept in full", options_.full_incidents)};
  const std::uint64_t bytes = left();
  if (bytes == 0) return {0, "the run's quota is used up"};
  return {bytes, bytes == options_.bundle_quota_bytes ? "the quota of a bundle" : "the quota of the run"};
}

TensorAllowance EvidenceStore::Impl::next() const {
  const std::lock_guard lock(mutex_);
  std::string refused = why_refused(true);
  return refused.empty() ? allowance() : TensorAllowance{0, std::move(refused)};
}

// "" when one that holds tensors, or none, is taken.
std::string EvidenceStore::Impl::why_refused(bool holds) const {
  if (holds && holding_ >= kMostHolding)
    return "one bundle with tensors is still being written and another waits";
  if (pending_.bundles >= kMostPending) return fmt::format("{} bundles wait to be written", kMostPending);
  if (used_.bundles + pending_.bundles >= options_.most_bundles) {
    return fmt::format("there are {} bundles already, the most that are kept of a run",
                       options_.most_bundles);
  }
  return "";
}

void EvidenceStore::Impl::submit(BundleManifest about, std::vector<EvidencePart> parts) {
  BundleOutcome outcome;
  outcome.id = {about.epoch(), about.attempt()};
  Claim claim;
  bool claimed = false;
  try {
    auto job = std::make_shared<Job>();
    job->id = outcome.id;
    job->about.Swap(&about);
    job->parts.swap(parts);
    job->submitted = Clock::now();
    {
      const std::lock_guard lock(mutex_);
      claim.holds = holds_tensors(job->parts);
      outcome.reason = why_refused(claim.holds);
      if (outcome.reason.empty()) {
        claim.tensors =
            job->about.compact() ? TensorAllowance{0, "the bundle is to be compact"} : allowance();
        claim.full = claim.tensors.bytes > 0;
        job->claim = claim;
        ++pending_.bundles;
        holding_ += claim.holds ? 1 : 0;
        pending_.full += claim.full ? 1 : 0;
        pending_.bytes += claim.tensors.bytes;
        claimed = true;
      }
    }
    if (claimed) {
      writer_.submit([this, job] { run(*job); });
      return;
    }
    outcome.reason = outcome.id.name() + " refused: " + outcome.reason;
  } catch (const std::bad_alloc&) {
    outcome.reason = "out of memory";
  }
  if (claimed) {
    settle(claim, std::move(outcome));
  } else {
    tell(std::move(outcome));
  }
}

void EvidenceStore::Impl::run(Job& job) {
  BundleOutcome outcome;
  outcome.id = job.id;
  try {
    write(job, &outcome);
  } catch (const std::bad_alloc&) {
    outcome.reason = "out of memory";
  } catch (const std::exception& e) {
    outcome.reason = "failed";
    try {
      outcome.reason = job.id.name() + ": " + printable(e.what());
    } catch (const std::bad_alloc&) {
    }
  }
  outcome.seconds = std::chrono::duration<double>(Clock::now() - job.submitted).count();
  settle(job.claim, std::move(outcome));
}

void EvidenceStore::Impl::write(Job& job, BundleOutcome* outcome) {
  const std::string path = incidents_ + "/" + job.id.name();
  if (files_.exists(path)) {
    outcome->reason = job.id.name() + " refused: it is there already";
    return;
  }
  BundleWriter bundle(files_, incidents_, std::move(job.about), std::move(job.parts));
  Status status;
  try {
    status = bundle.write(job.claim.tensors);
  } catch (...) {
    bundle.discard();
    throw;
  }
  if (!status.ok()) bundle.discard();
  outcome->published = status.ok();
  outcome->compact = bundle.compact();
  outcome->content_id = status.ok() ? bundle.content_id() : "";
  outcome->reason = status.ok() ? bundle.left_out() : job.id.name() + ": " + printable(status.message());
  // After a failure, too, it may be there, and only not known to be on disk.
  outcome->bytes = status.ok() || files_.exists(path) ? bundle.bytes() : 0;
}

// A bundle that takes bytes is there.
void EvidenceStore::Impl::settle(const Claim& claim, BundleOutcome outcome) {
  {
    const std::lock_guard lock(mutex_);
    --pending_.bundles;
    holding_ -= claim.holds ? 1 : 0;
    pending_.full -= claim.full ? 1 : 0;
    pending_.bytes -= claim.tensors.bytes;
    used_.bundles += outcome.bytes > 0 ? 1 : 0;
    used_.full += outcome.bytes > 0 && !outcome.compact ? 1 : 0;
    used_.bytes += outcome.bytes;
  }
  tell(std::move(outcome));
}

void EvidenceStore::Impl::tell(BundleOutcome outcome) noexcept {
  try {
    outcomes_.put(std::move(outcome));
  } catch (const std::bad_alloc&) {
  }
}

// ---- the public face

EvidenceStore::EvidenceStore(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
EvidenceStore::~EvidenceStore() = default;

Status EvidenceStore::create(FileSystem& files, const std::string& incidents, const EvidenceOptions& options,
                             std::unique_ptr<EvidenceStore>* out) {
  auto impl = std::make_unique<Impl>(files, incidents, options);
  if (Status s = impl->open(); !s.ok()) return s;
  out->reset(new EvidenceStore(std::move(impl)));
  return Status();
}

TensorAllowance EvidenceStore::next() const { return impl_->next(); }
void EvidenceStore::submit(BundleManifest about, std::vector<EvidencePart> parts) {
  impl_->submit(std::move(about), std::move(parts));
}
std::vector<BundleOutcome> EvidenceStore::take_outcomes() { return impl_->take_outcomes(); }
bool EvidenceStore::wait_for(std::chrono::milliseconds most) { return impl_->wait_for(most); }

}  // namespace holdfast
