#include "part_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <limits>
#include <new>
#include <system_error>
#include <thread>

#include "holdfast/coord/printable.h"
#include "holdfast/coord/storage/sha256.h"

namespace holdfast {
namespace {

// Between memory and file: small enough for a cache, large enough for a file system.
constexpr std::int64_t kBlockBytes = 1 << 20;

struct StoredDtype {
  DType dtype;
  std::string_view name;
};
// complex128 comes behind the type whose name it shares.
constexpr auto kStored = std::to_array<StoredDtype>({
    {DType::kFloat64, "F64"},
    {DType::kFloat32, "F32"},
    {DType::kFloat16, "F16"},
    {DType::kBFloat16, "BF16"},
    {DType::kFloat8E4M3FN, "F8_E4M3"},
    {DType::kFloat8E5M2, "F8_E5M2"},
    {DType::kComplex64, "C64"},
    {DType::kBool, "BOOL"},
    {DType::kUInt8, "U8"},
    {DType::kInt8, "I8"},
    {DType::kInt16, "I16"},
    {DType::kInt32, "I32"},
    {DType::kInt64, "I64"},
    {DType::kComplex128, "F64"},
});

std::int64_t block_elements(DType dtype) {
  return std::max(kBlockBytes / dtype_size(dtype), ScanAndDigest::kPieceElements);
}

// What the values are scanned as: of what need not be finite, only the digest is of interest.
DType scanned_as(DType stored, bool must_be_finite) { return must_be_finite ? stored : DType::kUInt8; }

std::string_view class_of(const BadCounts& one) {
  return one.nan > 0 ? "NaN" : one.pos_inf > 0 ? "+Inf" : "-Inf";
}

// `element` is the first bad one that the probe tells of.
NonFinite finding_of(const std::string& name, DType dtype, const Probe& probe, const void* element) {
  const Probe one = scan(TensorView::contiguous(element, dtype, 1));
  return {name, probe.first_bad, class_of(one.bad)};
}

Status not_finite(const NonFinite& finding) { return Status::internal(finding.to_string()); }

SafetensorsEntry header_entry(const TensorEntry& tensor) {
  SafetensorsEntry entry;
  entry.name = tensor.name();
  entry.dtype = tensor.dtype();
  entry.shape.assign(tensor.shape().begin(), tensor.shape().end());
  return entry;
}

bool same(const SafetensorsEntry& in_file, const TensorEntry& told) {
  return in_file.name == told.name() && in_file.dtype == told.dtype() && in_file.begin == told.begin() &&
         in_file.end - in_file.begin == told.bytes() && std::ranges::equal(in_file.shape, told.shape());
}

// Scans and digests tensors, on a thread of its own while the caller writes them: it takes about half as long
// as the writing, which mostly waits for the disk.
class Judge {
 public:
  // Fills the digests of `part`, whose entries are those of `tensors`. Both are its own until finish().
  Judge(std::span<const PartTensor* const> tensors, Part* part) : tensors_(tensors), part_(part) {
    std::uint64_t bytes = 0;
    for (const TensorEntry& entry : part->tensors()) bytes += entry.bytes();
    try {
      if (bytes >= kWorthAThread) thread_ = std::thread([this] { run(); });
    } catch (const std::system_error&) {
      // No thread is to be had.
    }
    if (!thread_.joinable()) run();
  }
  ~Judge() {
    stop_ = true;
    if (thread_.joinable()) thread_.join();
  }
  Judge(const Judge&) = delete;
  Judge& operator=(const Judge&) = delete;

  // There will be no part: what is still to be written need not be.
  bool refuses() const { return stop_; }
  // `*finding`: the first value that must not be there.
  Status finish(std::optional<NonFinite>* finding) {
    if (thread_.joinable()) thread_.join();
    *finding = finding_;
    if (finding_) return not_finite(*finding_);
    return stop_ ? Status::internal("no memory to look through the state") : Status();
  }

 private:
  static constexpr std::uint64_t kWorthAThread = 1 << 20;

  void run() {
    try {
      for (std::size_t i = 0; i < tensors_.size() && !stop_; ++i) {
        judge(*tensors_[i], part_->mutable_tensors(static_cast<int>(i)));
      }
    } catch (const std::bad_alloc&) {
      stop_ = true;
    }
  }
  void judge(const PartTensor& tensor, TensorEntry* entry) {
    const DType dtype = scanned_as(tensor.dtype, tensor.must_be_finite);
    const auto width = static_cast<std::uint64_t>(dtype_size(dtype));
    const auto elements = static_cast<std::int64_t>(entry->bytes() / width);
    const std::int64_t step = block_elements(dtype);
    const auto* data = static_cast<const char*>(tensor.data);
    ScanAndDigest both(dtype);
    for (std::int64_t at = 0; at < elements && !stop_; at += step) {
      both.add(data + static_cast<std::uint64_t>(at) * width, std::min(step, elements - at));
      if (const Probe& probe = both.so_far(); !probe.finite()) {
        const char* bad = data + static_cast<std::uint64_t>(probe.first_bad) * width;
        finding_ = finding_of(tensor.name, dtype, probe, bad);
        stop_ = true;
      }
    }
    Digest128 digest;
    both.finish(&digest);
    entry->set_digest_high(digest.high);
    entry->set_digest_low(digest.low);
  }

  const std::span<const PartTensor* const> tensors_;
  Part* const part_;
  std::atomic<bool> stop_{false};
  std::optional<NonFinite> finding_;  // the thread's until finish()
  std::thread thread_;                // last: it uses all of the above
};

Status append_tensor(WritableFile* file, const PartTensor& tensor, std::uint64_t bytes, const Judge& judge) {
  const std::string_view all(static_cast<const char*>(tensor.data), bytes);
  for (std::uint64_t at = 0; at < bytes && !judge.refuses(); at += kBlockBytes) {
    if (Status s = file->append(all.substr(at, kBlockBytes)); !s.ok()) return s;
  }
  return Status();
}

}  // namespace

std::string part_file_name(int rank, int group) {
  if (rank >= 0) return fmt::format("rank-{:05}.safetensors", rank);
  return group < 0 ? "replicated.safetensors" : fmt::format("group-{:05}.safetensors", group);
}

std::string_view stored_dtype(DType dtype) {
  const auto found = std::ranges::find(kStored, dtype, &StoredDtype::dtype);
  return found == kStored.end() ? "" : found->name;
}

bool parse_stored_dtype(std::string_view name, DType* dtype) {
  const auto found = std::ranges::find(kStored, name, &StoredDtype::name);
  if (found == kStored.end()) return false;
  *dtype = found->dtype;
  return true;
}

std::string NonFinite::to_string() const {
  return fmt::format("{}[{}] is {}", printable(tensor), index, value);
}

PartTensor PartTensor::of(const StateTensor& tensor, const void* copy) {
  return {.name = tensor.name,
          .data = copy,
          .dtype = tensor.dtype,
          .shape = tensor.shape,
          .must_be_finite = tensor.must_be_finite,
          .sharded = tensor.held == Held::kSharded,
          .shard_offset = tensor.shard_offset,
          .shard_total = tensor.shard_total};
}

PartTensor PartTensor::of_bytes(const std::string& name, std::string_view bytes, bool renewable) {
  return {.name = name,
          .data = bytes.data(),
          .dtype = DType::kUInt8,
          .shape = {static_cast<std::int64_t>(bytes.size())},
          .renewable = renewable,
          .is_bytes = true};
}

Status describe(const PartTensor& tensor, TensorEntry* entry) {
  entry->Clear();
  const std::string_view dtype = stored_dtype(tensor.dtype);
  const auto refused = [&](const char* why) {
    return Status::usage("\"" + printable(tensor.name) + "\" cannot be kept in a checkpoint: " + why);
  };
  if (dtype.empty()) return refused("its dtype is unknown");
  std::int64_t bytes = dtype_size(tensor.dtype);
  for (const std::int64_t extent : tensor.shape) {
    if (extent < 0 || __builtin_mul_overflow(bytes, extent, &bytes))
      return refused("its size is negative or overflows");
    entry->add_shape(static_cast<std::uint64_t>(extent));
  }
  const std::uint64_t stored_per_element = tensor.dtype == DType::kComplex128 ? 2 : 1;
  if (stored_per_element > 1) entry->add_shape(stored_per_element);
  entry->set_name(tensor.name);
  entry->set_dtype(std::string(dtype));
  entry->set_bytes(static_cast<std::uint64_t>(bytes));
  if (!tensor.must_be_finite) entry->set_may_be_non_finite(true);
  if (tensor.is_bytes) entry->set_is_bytes(true);
  if (tensor.renewable) entry->set_renewable(true);
  if (tensor.sharded) {
    entry->set_shard_offset(static_cast<std::uint64_t>(tensor.shard_offset) * stored_per_element);
    entry->set_shard_total(static_cast<std::uint64_t>(tensor.shard_total) * stored_per_element);
  }
  return Status();
}

Status write_part(FileSystem& files, const std::string& folder, int rank, std::span<const PartTensor> tensors,
                  Part* out, std::optional<NonFinite>* finding, int group) {
  finding->reset();
  out->Clear();
  std::vector<const PartTensor*> order;
  for (const PartTensor& tensor : tensors) order.push_back(&tensor);
  const auto width = [](const PartTensor* tensor) {
    return safetensors_dtype_size(stored_dtype(tensor->dtype));
  };
  std::ranges::stable_sort(order, std::greater(), width);

  Part part;
  part.set_file(part_file_name(rank, group));
  if (rank >= 0) part.set_rank(rank);
  if (group >= 0) part.set_group(static_cast<std::uint32_t>(group));
  std::vector<SafetensorsEntry> entries;
  for (const PartTensor* tensor : order) {
    TensorEntry* entry = part.add_tensors();
    if (Status s = describe(*tensor, entry); !s.ok()) return s;
    entries.push_back(header_entry(*entry));
  }
  std::string header;
  if (Status s = write_safetensors_header(&entries, {{"format", "pt"}}, &header); !s.ok()) return s;
  part.set_header_sha256(sha256(header));
  part.set_file_bytes(header.size() + (entries.empty() ? 0 : entries.back().end));

  for (std::size_t i = 0; i < entries.size(); ++i) {
    part.mutable_tensors(static_cast<int>(i))->set_begin(entries[i].begin);
  }

  std::unique_ptr<WritableFile> file;
  if (Status s = files.create_file(folder + "/" + part.file(), &file); !s.ok()) return s;
  if (Status s = file->append(header); !s.ok()) return s;
  Judge judge(order, &part);
  for (std::size_t i = 0; i < order.size(); ++i) {
    const std::uint64_t bytes = entries[i].end - entries[i].begin;
    if (Status s = append_tensor(file.get(), *order[i], bytes, judge); !s.ok()) return s;
  }
  if (!judge.refuses()) {
    if (Status s = file->sync(); !s.ok()) return s;
    if (Status s = file->close(); !s.ok()) return s;
  }
  if (Status s = judge.finish(finding); !s.ok()) return s;
  out->Swap(&part);
  return Status();
}

Status PartReader::open(FileSystem& files, const std::string& folder, const Part& part, bool* size_is_right) {
  if (size_is_right != nullptr) *size_is_right = false;
  file_.reset();
  part_ = part;
  path_ = folder + "/" + part.file();
  std::unique_ptr<ReadableFile> file;
  if (Status s = files.open_file(path_, &file); !s.ok()) return s;
  if (file->size() != part.file_bytes()) {
    return Status::internal(
        fmt::format("{} has {} bytes, and was written with {}", path_, file->size(), part.file_bytes()));
  }
  if (size_is_right != nullptr) *size_is_right = true;
  SafetensorsHeader header;
  std::string raw;
  if (Status s = read_safetensors_header(*file, &header, &raw); !s.ok()) {
    return Status::internal(path_ + " is damaged: " + s.message());
  }
  const bool as_told =
      sha256(raw) == part.header_sha256() && std::ranges::equal(header.tensors, part.tensors(), same);
  if (!as_told) return Status::internal(path_ + " is damaged: its header is not what the manifest says");
  data_begins_ = header.bytes;
  file_ = std::move(file);
  return Status();
}

// `place(begin, bytes)` is where bytes [begin, begin + bytes) of the tensor are put.
template <typename Place>
Status PartReader::judge(int i, Place place, std::optional<NonFinite>* finding) {
  finding->reset();
  const TensorEntry& told = tensor(i);
  DType stored = DType::kUInt8;
  if (file_ == nullptr || !parse_stored_dtype(told.dtype(), &stored))
    return Status::internal("no part is open");
  const DType dtype = scanned_as(stored, !told.may_be_non_finite());
  const auto width = static_cast<std::uint64_t>(dtype_size(dtype));
  const std::uint64_t step = static_cast<std::uint64_t>(block_elements(dtype)) * width;
  ScanAndDigest judge(dtype);
  std::optional<NonFinite> found;
  for (std::uint64_t at = 0; at < told.bytes(); at += step) {
    const std::span<std::byte> block = place(at, std::min(step, told.bytes() - at));
    if (Status s = file_->read(data_begins_ + told.begin() + at, block); !s.ok()) return s;
    judge.add(block.data(), static_cast<std::int64_t>(block.size() / width));
    if (const Probe& probe = judge.so_far(); !probe.finite() && !found) {
      found = finding_of(told.name(), dtype, probe,
                         block.data() + (static_cast<std::uint64_t>(probe.first_bad) * width - at));
    }
  }
  Digest128 digest;
  judge.finish(&digest);
  if (digest != Digest128{told.digest_low(), told.digest_high()}) {
    return Status::internal(path_ + " is damaged: \"" + printable(told.name()) +
                            "\" is not what was written");
  }
  *finding = found;
  return found ? not_finite(*found) : Status();
}

Status PartReader::read_tensor(int i, std::span<std::byte> to, std::optional<NonFinite>* finding) {
  if (to.size() != tensor(i).bytes()) {
    return Status::internal("\"" + printable(tensor(i).name()) +
                            "\" does not have the size of the memory for it");
  }
  return judge(
      i, [&](std::uint64_t begin, std::uint64_t bytes) { return to.subspan(begin, bytes); }, finding);
}

Status PartReader::check_tensor(int i, std::optional<NonFinite>* finding) {
  const auto place = [&](std::uint64_t, std::uint64_t bytes) {
    if (block_.size() < bytes) block_.resize(bytes);
    return std::span(block_).first(bytes);
  };
  return judge(i, place, finding);
}

}  // namespace holdfast
