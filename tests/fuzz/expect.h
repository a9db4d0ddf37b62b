// A property that holds for any input, in a fuzz target and when its corpus is replayed.
#pragma once

#include <cstdio>
#include <cstdlib>

#define EXPECT(property)                                                                 \
  do {                                                                                   \
    if (!(property)) {                                                                   \
      std::fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #property); \
      std::abort();                                                                      \
    }                                                                                    \
  } while (false)
