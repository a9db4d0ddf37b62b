// What every Collective does when its transport fails, whatever it runs over. A backend's test makes one
// operation fail, in each way that its transport can.
#pragma once

#include <gtest/gtest.h>

#include <ostream>
#include <string>
#include <vector>

#include "collectives/conformance.h"

namespace holdfast::conformance {

// One of the operations, with arguments that must be as they were when it fails: half a result is none.
struct Operation {
  const char* name;
  Status (*call)(Collective&);
};
inline void PrintTo(const Operation& operation, std::ostream* out) { *out << operation.name; }

inline Status failing_reduce(Collective& collective) {
  Record record = contribution(collective.rank(), 1);
  const Status status = collective.reduce(record);
  if (!status.ok()) {
    EXPECT_EQ(record, contribution(collective.rank(), 1));
  }
  return status;
}

inline Status failing_gather(Collective& collective) {
  std::vector<Bytes> all = {"left", "over"};
  const Status status = collective.gather("mine", &all);
  if (!status.ok()) {
    EXPECT_EQ(all, (std::vector<Bytes>{"left", "over"}));
  }
  return status;
}

inline Status failing_broadcast(Collective& collective) {
  Bytes bytes = "mine";
  const Status status = collective.broadcast(&bytes);
  if (!status.ok()) {
    EXPECT_EQ(bytes, "mine");
  }
  return status;
}

inline Status failing_agreement(Collective& collective) { return agree_on_status(collective, Status()); }

inline const std::vector<Operation>& operations() {
  static const std::vector<Operation> all = {{"reduce", failing_reduce},
                                             {"gather", failing_gather},
                                             {"broadcast", failing_broadcast},
                                             {"agree_on_status", failing_agreement}};
  return all;
}

// `operation` fails on this rank, and then everything does: the ranks may have seen different results. `text`
// gets that of the failure.
inline void expect_failure(Collective& collective, const Operation& operation, std::string* text = nullptr) {
  const Status first = operation.call(collective);
  EXPECT_EQ(first.code(), StatusCode::kRankMissing) << first.to_string();
  EXPECT_FALSE(first.message().empty());
  if (text != nullptr) *text = first.message();
  for (const Operation& later : operations()) {
    EXPECT_EQ(later.call(collective).code(), StatusCode::kRankMissing) << later.name;
  }
}

// The same on a rank whose own part in `operation` may have been complete when another rank failed: it finds
// out in its next one.
inline void expect_failure_by_the_next(Collective& collective, const Operation& operation) {
  const Status first = operation.call(collective);
  if (first.ok()) {
    expect_failure(collective, operations().front());
  } else {
    EXPECT_EQ(first.code(), StatusCode::kRankMissing) << first.to_string();
    expect_failure(collective, operation);
  }
}

}  // namespace holdfast::conformance
