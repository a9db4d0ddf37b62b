/* Your own transport, as C function pointers: the process group of a framework, sockets, anything that can
 * sum integers. See callback_collective.h for what is made of it. */
#ifndef HOLDFAST_COLLECTIVES_CALLBACKS_H_
#define HOLDFAST_COLLECTIVES_CALLBACKS_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The functions are collective: every rank calls the same ones in the same order, on the thread that uses the
 * guard, one at a time, and waits for them to return. They return 0 for success; after anything else, or an
 * exception, the group counts as broken, none of them is called again and nothing is applied any more. One
 * that never returns is left to the watchdog, which ends the process. `context` is passed through. */
typedef struct holdfast_callbacks {
  size_t struct_bytes; /* sizeof(holdfast_callbacks): of the version that the caller was compiled with */
  void* context;
  int32_t rank; /* 0 .. size - 1, each once */
  int32_t size;
  /* Equal on ranks that share a machine, and only there; 0: the machine is told by its host name. */
  uint64_t node;

  /* Required. Replaces values[i] by its sum over all ranks, mod 2^64, for each i < count; `count` is the same
   * on all ranks. 32 of them on each attempt. */
  int (*all_reduce)(void* context, uint64_t* values, size_t count);

  /* Optional, NULL to have it made of all_reduce. bytes[r] is the size of rank r's message, known to all
   * ranks; mine has bytes[rank] of them. On rank 0, all[r] is where the message of rank r belongs, its own
   * included; on other ranks `all` is NULL. */
  int (*gather)(void* context, const void* mine, const uint64_t* bytes, void* const* all);

  /* Optional, NULL to have it made of all_reduce. Gives every rank the `bytes` bytes that rank 0 has. */
  int (*broadcast)(void* context, void* data, uint64_t bytes);

  /* Optional. What the code that one of the others returned means; read before the next call. May return
   * NULL. */
  const char* (*describe)(void* context, int code);
} holdfast_callbacks;

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* HOLDFAST_COLLECTIVES_CALLBACKS_H_ */
