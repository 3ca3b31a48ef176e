// One CPU thread pool per process, shared by every native module of the project: the part kernels
// see. The pool itself is in thread_pool_impl.h, which only module.h includes: kernels are compiled
// for several instruction sets, and code shared by the linker must not come from one of them.
#pragma once

#include <stdint.h>

namespace ts {

// The table in the capsule "ts_core.thread_pool.v1". Plain C types: modules built at different
// times must agree on it. `run` calls fn(context, i) once for every i in [0, chunks) on at most
// `threads` threads, the calling one included, and returns when all are done. fn must not throw.
struct PoolTable {
  uint32_t version;
  void (*run)(int64_t chunks, void (*fn)(void*, int64_t), void* context, int threads);
  int (*workers)();
};

// Set when the module is loaded; data only, so no instruction set leaks through it.
inline const PoolTable* shared_pool_table = nullptr;

// Calls body(begin, end) over [0, n) in pieces of `grain` (the last one shorter) on `threads`
// threads. Pieces depend on n and grain alone, never on the thread count, so per-piece results are
// stable.
template <typename Body>
void parallel_for(int64_t n, int64_t grain, int threads, Body&& body) {
  if (n <= 0) return;
  const int64_t chunks = (n + grain - 1) / grain;
  if (threads > chunks) threads = static_cast<int>(chunks);
  const PoolTable* table = shared_pool_table;
  if (threads <= 1 || !table) {
    for (int64_t i = 0; i < chunks; ++i) body(i * grain, (i + 1) * grain < n ? (i + 1) * grain : n);
    return;
  }
  struct Context {
    Body* body;
    int64_t n, grain;
  } context{&body, n, grain};
  table->run(
      chunks,
      [](void* c, int64_t i) {
        auto* x = static_cast<Context*>(c);
        const int64_t end = (i + 1) * x->grain;
        (*x->body)(i * x->grain, end < x->n ? end : x->n);
      },
      &context, threads);
}

}  // namespace ts
