// Counts this program's allocations, in `g_allocations`. To be included by one file of a program.
#pragma once

#include <atomic>
#include <cstdlib>
#include <new>

namespace {
std::atomic<long> g_allocations{0};

void* counted(std::size_t size) {
  ++g_allocations;
  if (void* memory = std::malloc(size == 0 ? 1 : size)) return memory;
  throw std::bad_alloc();
}
}  // namespace

// Where GCC inlines only one of a pair it takes malloc and delete, or new and free, for a mismatch.
#define KEPT_APART [[gnu::noinline]]
KEPT_APART void* operator new(std::size_t size) { return counted(size); }
KEPT_APART void* operator new[](std::size_t size) { return counted(size); }
KEPT_APART void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  ++g_allocations;
  return std::malloc(size == 0 ? 1 : size);
}
KEPT_APART void operator delete(void* memory) noexcept { std::free(memory); }
KEPT_APART void operator delete[](void* memory) noexcept { std::free(memory); }
KEPT_APART void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
KEPT_APART void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
