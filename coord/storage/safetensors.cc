// What is refused of a file that others wrote, beside what is not JSON (RFC 8259, in UTF-8) at all:
//
//   the length    beyond the end of the file, or above 100 MB, as in the reference implementation
//   the text      that begins with anything but '{' or is followed by anything but spaces; a NUL; a name that
//   is there
//                 twice, of a tensor, of a field or in "__metadata__"; "__metadata__" that holds anything but
//                 strings
//   a tensor      with a field missing or one too many; an unknown dtype; sizes that are no whole numbers
//   from 0 to
//                 2^64 - 1; more than 64 dimensions, which no program has; a size that overflows; offsets
//                 that are not two, or not as far apart as dtype and shape say
//   all of them   that leave gaps, overlap, do not begin at 0 or do not end with the file
//
// So there are exactly four levels of nesting and everything that is kept takes no more than a few times the
// bytes of the header. Tensors without elements and scalars are fine. Names may hold control characters: who
// shows them escapes them.
#include "holdfast/coord/storage/safetensors.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>
#include <span>
#include <utility>

namespace holdfast {
namespace {

constexpr std::uint64_t kLengthBytes = 8;
constexpr std::uint64_t kLargestHeader = 100'000'000;
constexpr std::size_t kMostDimensions = 64;
constexpr std::string_view kMetadata = "__metadata__";

static_assert(std::endian::native == std::endian::little, "tensors are written as they are in memory");

struct DtypeSize {
  std::string_view name;
  std::uint64_t bytes;
};
// The format's types of less than a byte (F4, F6) are not among them.
constexpr auto kDtypes = std::to_array<DtypeSize>({
    {"F64", 8},
    {"F32", 4},
    {"F16", 2},
    {"BF16", 2},
    {"F8_E4M3", 1},
    {"F8_E5M2", 1},
    {"F8_E8M0", 1},
    {"C64", 8},
    {"I64", 8},
    {"I32", 4},
    {"I16", 2},
    {"I8", 1},
    {"U64", 8},
    {"U32", 4},
    {"U16", 2},
    {"U8", 1},
    {"BOOL", 1},
});

// A name in a message: the beginning of one that is too long to be read.
std::string shown(std::string_view name) {
  constexpr std::size_t kMost = 200;
  return "\"" + std::string(name.substr(0, kMost)) + (name.size() > kMost ? "...\"" : "\"");
}

// False when it overflows.
bool bytes_of(const SafetensorsEntry& tensor, std::uint64_t* bytes) {
  *bytes = safetensors_dtype_size(tensor.dtype);
  for (const std::uint64_t extent : tensor.shape) {
    if (__builtin_mul_overflow(*bytes, extent, bytes)) return false;
  }
  return true;
}

// Why this one cannot be a tensor of `bytes` bytes.
std::string fault_of(const SafetensorsEntry& tensor, std::uint64_t* bytes) {
  if (safetensors_dtype_size(tensor.dtype) == 0) return "has the unknown dtype " + shown(tensor.dtype);
  if (tensor.shape.size() > kMostDimensions) return "has more than 64 dimensions";
  if (!bytes_of(tensor, bytes)) return "has a size that overflows";
  return "";
}

// The first name that is there twice; nullptr when none is.
const std::string* repeated_name(const std::vector<SafetensorsEntry>& tensors) {
  std::vector<const std::string*> names;
  names.reserve(tensors.size());
  for (const SafetensorsEntry& tensor : tensors) names.push_back(&tensor.name);
  const auto text = [](const std::string* name) -> const std::string& { return *name; };
  std::ranges::sort(names, {}, text);
  const auto twice = std::ranges::adjacent_find(names, {}, text);
  return twice == names.end() ? nullptr : *twice;
}

// Takes the header apart as it is parsed, so that nothing is kept that the format does not have.
class HeaderReader final : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit HeaderReader(SafetensorsHeader* out) : out_(out) {}
  const std::string& fault() const { return fault_; }

  bool null() override { return unexpected(); }
  bool boolean(bool) override { return unexpected(); }
  bool number_integer(number_integer_t) override { return fail(where() + "has a negative size"); }
  bool number_float(number_float_t, const string_t&) override {
    return fail(where() + "has a size that is no whole number below 2^64");
  }
  bool binary(binary_t&) override { return unexpected(); }

  bool number_unsigned(number_unsigned_t value) override {
    if (place_ == Place::kShape) {
      entry().shape.push_back(value);
      return true;
    }
    if (place_ != Place::kOffsets) return unexpected();
    if (offsets_ == 2) return fail(where() + "has more than two offsets");
    (offsets_++ == 0 ? entry().begin : entry().end) = value;
    return true;
  }

  bool string(string_t& value) override {
    if (place_ == Place::kTexts) {
      out_->metadata[key_] = std::move(value);
      return true;
    }
    if (place_ != Place::kTensor || key_ != "dtype") return unexpected();
    entry().dtype = std::move(value);
    return true;
  }

  bool start_object(std::size_t) override {
    switch (place_) {
      case Place::kStart: place_ = Place::kTop; return true;
      case Place::kTop:
        place_ = key_ == kMetadata ? Place::kTexts : Place::kTensor;
        if (place_ == Place::kTensor) out_->tensors.emplace_back().name = std::move(key_);
        fields_ = 0;
        return true;
      default: return unexpected();
    }
  }

  bool key(string_t& name) override {
    if (place_ == Place::kTop && name == kMetadata && std::exchange(has_metadata_, true)) {
      return fail("has \"__metadata__\" twice");
    }
    if (place_ == Place::kTexts && out_->metadata.contains(name)) {
      return fail("has " + shown(name) + " twice in \"__metadata__\"");
    }
    if (place_ == Place::kTensor && !take_field(name)) return false;
    key_ = std::move(name);
    return true;
  }

  bool end_object() override {
    if (place_ == Place::kTensor && fields_ != kAllFields) {
      return fail(where() + "lacks its dtype, shape or data_offsets");
    }
    place_ = place_ == Place::kTop ? Place::kEnd : Place::kTop;
    return true;
  }

  bool start_array(std::size_t) override {
    if (place_ != Place::kTensor || key_ == "dtype") return unexpected();
    place_ = key_ == "shape" ? Place::kShape : Place::kOffsets;
    offsets_ = 0;
    return true;
  }

  bool end_array() override {
    if (place_ == Place::kOffsets && offsets_ != 2) return fail(where() + "has less than two offsets");
    place_ = Place::kTensor;
    return true;
  }

  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception&) override {
    return fail("is not JSON in UTF-8 at byte " + std::to_string(position));
  }

 private:
  enum class Place { kStart, kTop, kTexts, kTensor, kShape, kOffsets, kEnd };
  static constexpr unsigned kAllFields = 7;

  SafetensorsEntry& entry() { return out_->tensors.back(); }

  bool take_field(const std::string& name) {
    const unsigned field = name == "dtype" ? 1 : name == "shape" ? 2 : name == "data_offsets" ? 4 : 0;
    if (field == 0) return fail(where() + "has the unknown field " + shown(name));
    if ((fields_ & field) != 0) return fail(where() + "has the field " + shown(name) + " twice");
    fields_ |= field;
    return true;
  }

  std::string where() {
    const bool of_tensor = place_ == Place::kTensor || place_ == Place::kShape || place_ == Place::kOffsets;
    return of_tensor ? "says that tensor " + shown(entry().name) + " " : "";
  }
  bool unexpected() {
    return fail(where() + "holds a value where another kind belongs, after " + shown(key_));
  }
  bool fail(std::string fault) {
    if (fault_.empty()) fault_ = std::move(fault);
    return false;
  }

  SafetensorsHeader* const out_;
  Place place_ = Place::kStart;
  std::string key_;
  bool has_metadata_ = false;
  unsigned fields_ = 0;  // of the tensor, seen so far
  int offsets_ = 0;
  std::string fault_;
};

// Of tensors that are in the order of their bytes.
std::string fault_in_layout(const std::vector<SafetensorsEntry>& tensors, std::uint64_t data_bytes) {
  std::uint64_t at = 0;
  for (const SafetensorsEntry& tensor : tensors) {
    const auto fails = [&](const std::string& how) {
      return "says that tensor " + shown(tensor.name) + " " + how;
    };
    std::uint64_t bytes = 0;
    if (const std::string fault = fault_of(tensor, &bytes); !fault.empty()) return fails(fault);
    if (tensor.begin > tensor.end) return fails("ends before it begins");
    if (tensor.begin != at) return fails(tensor.begin > at ? "leaves a gap before it" : "overlaps another");
    if (tensor.end - tensor.begin != bytes) return fails("has another size than its dtype and shape have");
    at = tensor.end;
  }
  if (at == data_bytes) return "";
  return "tells of " + std::to_string(at) + " bytes of tensors, and there are " + std::to_string(data_bytes);
}

Status refused(const std::string& what) {
  return Status::internal("no safetensors file: the header " + what);
}

// Whether `length` can be that of the header of such a file.
Status check_length(std::uint64_t length, std::uint64_t file_bytes) {
  if (length > kLargestHeader) return refused("would be longer than 100 MB");
  if (length > file_bytes - kLengthBytes) return refused("would be longer than the file");
  return Status();
}

std::uint64_t read_length(std::string_view start) {
  std::uint64_t length = 0;
  std::memcpy(&length, start.data(), kLengthBytes);
  return length;
}

Status too_short() { return Status::internal("no safetensors file: it is shorter than 8 bytes"); }

}  // namespace

std::uint64_t safetensors_dtype_size(std::string_view dtype) {
  const auto found = std::ranges::find(kDtypes, dtype, &DtypeSize::name);
  return found == kDtypes.end() ? 0 : found->bytes;
}

Status parse_safetensors_header(std::string_view start, std::uint64_t file_bytes, SafetensorsHeader* out) {
  *out = {};
  if (start.size() < kLengthBytes || file_bytes < kLengthBytes) return too_short();
  const std::uint64_t length = read_length(start);
  if (Status s = check_length(length, file_bytes); !s.ok()) return s;
  if (length > start.size() - kLengthBytes) return refused("is not all there");
  const std::string_view text = start.substr(kLengthBytes, length);
  // The JSON library takes a NUL for the end of the text, and more kinds of space than the format has.
  if (text.find('\0') != std::string_view::npos) return refused("holds a NUL");
  const std::size_t last = text.find_last_not_of(' ');
  if (last == std::string_view::npos || text.front() != '{' || text[last] != '}')
    return refused("is not {...}");

  SafetensorsHeader header;
  HeaderReader reader(&header);
  if (!nlohmann::json::sax_parse(text.begin(), text.end(), &reader)) return refused(reader.fault());
  if (const std::string* twice = repeated_name(header.tensors))
    return refused("has " + shown(*twice) + " twice");
  std::ranges::stable_sort(header.tensors, [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  header.bytes = kLengthBytes + length;
  const std::string fault = fault_in_layout(header.tensors, file_bytes - header.bytes);
  if (!fault.empty()) return refused(fault);
  *out = std::move(header);
  return Status();
}

Status read_safetensors_header(const ReadableFile& file, SafetensorsHeader* out, std::string* raw) {
  *out = {};
  std::string start(kLengthBytes, '\0');
  if (file.size() < start.size()) return too_short();
  if (Status s = file.read(0, std::as_writable_bytes(std::span(start))); !s.ok()) return s;
  const std::uint64_t length = read_length(start);
  if (Status s = check_length(length, file.size()); !s.ok()) return s;
  start.resize(kLengthBytes + length);
  const auto text = std::as_writable_bytes(std::span(start)).subspan(kLengthBytes);
  if (Status s = file.read(kLengthBytes, text); !s.ok()) return s;
  if (Status s = parse_safetensors_header(start, file.size(), out); !s.ok()) return s;
  if (raw != nullptr) *raw = std::move(start);
  return Status();
}

Status write_safetensors_header(std::vector<SafetensorsEntry>* tensors,
                                const std::map<std::string, std::string>& metadata, std::string* out) {
  const auto fails = [](std::string_view name, const std::string& how) {
    return Status::internal("cannot be written as safetensors: " + shown(name) + " " + how);
  };
  if (const std::string* twice = repeated_name(*tensors)) return fails(*twice, "is there twice");
  // The library's own order of names would be the alphabet's: the text is put together from its values.
  std::string text = "{";
  std::uint64_t at = 0;
  try {
    if (!metadata.empty()) text += "\"__metadata__\":" + nlohmann::json(metadata).dump();
    for (SafetensorsEntry& tensor : *tensors) {
      std::uint64_t bytes = 0;
      if (tensor.name == kMetadata) return fails(tensor.name, "is no tensor's name in this format");
      if (const std::string fault = fault_of(tensor, &bytes); !fault.empty())
        return fails(tensor.name, fault);
      tensor.begin = at;
      if (__builtin_add_overflow(at, bytes, &at)) return fails(tensor.name, "ends beyond 2^64 bytes");
      tensor.end = at;
      text += (text.size() > 1 ? "," : "") + nlohmann::json(tensor.name).dump() + ":{\"dtype\":\"" +
              tensor.dtype + "\",\"shape\":" + nlohmann::json(tensor.shape).dump() +
              ",\"data_offsets\":" + nlohmann::json({tensor.begin, tensor.end}).dump() + "}";
    }
  } catch (const nlohmann::json::type_error&) {
    return Status::internal("cannot be written as safetensors: a name or a text is not UTF-8");
  }
  text += "}";
  text.resize((text.size() + 7) / 8 * 8, ' ');
  if (text.size() > kLargestHeader)
    return Status::internal("cannot be written as safetensors: too many tensors");
  const std::uint64_t length = text.size();
  out->assign(reinterpret_cast<const char*>(&length), sizeof length);
  out->append(text);
  return Status();
}

}  // namespace holdfast
