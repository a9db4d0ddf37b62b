// Calls what is not ours, and must not throw through us.
#pragma once

#include <exception>

#include "holdfast/collectives/status.h"

namespace holdfast {

// What `call` returns; its exception is INTERNAL.
template <typename Call>
Status caught(Call&& call) {
  try {
    return call();
  } catch (const std::exception& error) {
    return Status::internal(error.what());
  } catch (...) {
    return Status::internal("exception of unknown type");
  }
}

}  // namespace holdfast
