// What every NB_MODULE of the project calls first, and the thread count its operations use.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <chrono>

#include "ts/isa.h"
#include "ts/tensor_view.h"
#include "ts/thread_pool_impl.h"

namespace ts {

// Takes the process's pool from ts_core.runtime, or makes it and leaves it there.
inline void share_thread_pool() {
  nanobind::object runtime = nanobind::module_::import_("ts_core.runtime");
  nanobind::object capsule = runtime.attr("thread_pool_capsule");
  if (capsule.is_none()) {
    PyObject* made =
        PyCapsule_New(const_cast<PoolTable*>(&detail::own_pool_table()), kPoolCapsule, nullptr);
    if (!made) throw nanobind::python_error();
    runtime.attr("thread_pool_capsule") = nanobind::steal(made);
    shared_pool_table = &detail::own_pool_table();
    return;
  }
  auto* table = static_cast<const PoolTable*>(PyCapsule_GetPointer(capsule.ptr(), kPoolCapsule));
  if (!table) throw nanobind::python_error();
  if (table->version != kPoolVersion)
    throw std::runtime_error("thread pool version " + std::to_string(table->version) +
                             " is not the one this module was built for; reinstall all packages");
  shared_pool_table = table;
}

// ts_core.cores.usable_cores(), asked again after a second: affinity and quotas change rarely.
inline int usable_cores() {
  using Clock = std::chrono::steady_clock;
  static PyObject* count =
      nanobind::object(nanobind::module_::import_("ts_core.cores").attr("usable_cores"))
          .release()
          .ptr();
  static int cores = 0;
  static Clock::time_point next;
  const Clock::time_point now = Clock::now();
  if (cores == 0 || now >= next) {
    next = now + std::chrono::seconds(1);
    cores = nanobind::cast<int>(nanobind::handle(count)());
  }
  return cores;
}

// requested > 0 as given; 0: torch.get_num_threads(), but no more than the usable cores.
inline int thread_count(int requested) {
  if (requested > 0) return requested;
  static PyObject* get =
      nanobind::object(nanobind::module_::import_("torch").attr("get_num_threads")).release().ptr();
  return std::min(nanobind::cast<int>(nanobind::handle(get)()), usable_cores());
}

// Errors, pool, and the functions that every native module offers.
inline void init_module(nanobind::module_& m) {
  register_errors();
  share_thread_pool();
  m.def("isa", [] { return name_of(isa()); }, "Instruction set of the CPU kernels now in use.");
  m.def(
      "set_isa", [](const std::string& name) { set_isa(name); }, nanobind::arg("name"),
      "Select portable, avx2 or avx512 (for tests).");
  m.def(
      "pool_address", [] { return reinterpret_cast<uintptr_t>(shared_pool_table); },
      "Address of the shared thread-pool table (one per process).");
  m.def(
      "pool_workers", [] { return shared_pool_table->workers(); },
      "Worker threads started so far, the callers' own not counted.");
  m.def("thread_count", &thread_count, nanobind::arg("threads") = 0,
        "Threads that an operation asked for this many uses; 0: those of torch, at most "
        "usable_cores().");
#if defined(TS_WITH_CUDA)
  m.attr("with_cuda") = true;
#else
  m.attr("with_cuda") = false;
#endif
}

}  // namespace ts
