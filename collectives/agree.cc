#include <cstdlib>

#include "holdfast/collectives/collective.h"

namespace holdfast {
namespace {

// A status on the wire: its code in decimal, a colon, its message. Empty when ok.
Bytes encode(const Status& status) {
  return status.ok() ? Bytes() : std::to_string(status.exit_code()) + ":" + status.message();
}

Status decode(const Bytes& bytes) {
  if (bytes.empty()) return Status();
  const auto colon = bytes.find(':');
  const int code = std::atoi(bytes.c_str());
  if (colon == Bytes::npos || code == 0) return Status::internal("malformed status from another rank");
  return {static_cast<StatusCode>(code), bytes.substr(colon + 1)};
}

}  // namespace

Status agree_on_status(Collective& collective, const Status& mine) {
  Record record;
  if (!mine.ok()) record.set_error();
  if (Status s = collective.reduce(record); !s.ok()) return s;
  if (record.errors() == 0) return Status();

  std::vector<Bytes> all;
  if (Status s = collective.gather(encode(mine), &all); !s.ok()) return s;
  Bytes first;
  for (std::size_t r = 0; r < all.size() && first.empty(); ++r) {
    const Status status = decode(all[r]);
    if (!status.ok()) {
      first = encode({status.code(), "rank " + std::to_string(r) + ": " + status.message()});
    }
  }
  if (Status s = collective.broadcast(&first); !s.ok()) return s;
  return decode(first);
}

}  // namespace holdfast
