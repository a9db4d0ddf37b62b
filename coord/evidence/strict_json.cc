#include <fmt/format.h>

#include <set>

#include "incident_contract.h"

namespace holdfast::incident_contract {
namespace {

using Json = nlohmann::ordered_json;

// Only looks: the library itself keeps the last of two equal keys, and knows no limits.
class Inspector final : public nlohmann::json_sax<Json> {
 public:
  explicit Inspector(const std::string& text) : text_(text) {}
  const std::string& fault() const { return fault_; }

  bool null() override { return count(); }
  bool boolean(bool) override { return count(); }
  bool number_integer(number_integer_t) override { return count(); }
  bool number_unsigned(number_unsigned_t) override { return count(); }
  bool number_float(number_float_t, const string_t&) override { return count(); }
  bool string(string_t&) override { return count(); }
  bool binary(binary_t&) override { return fail("is not JSON"); }
  bool start_object(std::size_t) override { return enter(); }
  bool start_array(std::size_t) override { return enter(); }
  bool end_object() override { return leave(); }
  bool end_array() override { return leave(); }

  bool key(string_t& name) override {
    if (!keys_.back().insert(name).second) return fail("has the key \"" + text_of(name) + "\" twice");
    return count();
  }

  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception& error) override {
    const std::string_view rest = std::string_view(text_).substr(position > 0 ? position - 1 : 0);
    if (rest.starts_with("NaN") || rest.starts_with("Inf")) {
      return fail("has NaN or Infinity for a number, which JSON has not");
    }
    // The library's number for a number that no double holds.
    constexpr int kOutOfRange = 406;
    if (error.id == kOutOfRange) return fail("has a number beyond what a double holds");
    return fail(fmt::format("is not JSON in UTF-8, at byte {}", position));
  }

 private:
  bool enter() {
    if (keys_.size() >= static_cast<std::size_t>(kDeepest)) {
      return fail(fmt::format("is deeper than {} levels", kDeepest));
    }
    keys_.emplace_back();
    return count();
  }
  bool leave() {
    keys_.pop_back();
    return true;
  }
  bool count() {
    return ++values_ <= kMostValues || fail(fmt::format("has more than {} keys and values", kMostValues));
  }
  bool fail(std::string fault) {
    if (fault_.empty()) fault_ = std::move(fault);
    return false;
  }

  const std::string& text_;
  std::vector<std::set<std::string>> keys_;
  std::size_t values_ = 0;
  std::string fault_;
};

}  // namespace

std::string parse_strict_json(const std::string& text, Json* out) {
  *out = nullptr;
  if (text.size() > kLargestReport) return fmt::format("is larger than {} bytes", kLargestReport);
  // The library takes a NUL for the end of the text, and skips a byte order mark.
  if (text.find('\0') != std::string::npos) return "holds a NUL";
  if (text.starts_with("\xef\xbb\xbf")) return "begins with a byte order mark";
  Inspector inspector(text);
  if (!Json::sax_parse(text, &inspector)) return inspector.fault();
  *out = Json::parse(text, nullptr, false);
  return "";
}

}  // namespace holdfast::incident_contract
