// What the files that bind functions share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "job.h"
#include "ts/module.h"

namespace ts::paging {

namespace nb = nanobind;
using namespace nb::literals;

// Raises a failure as the error of ts_core.errors that it is.
[[noreturn]] inline void raise(const Failure& failure) {
  const nb::module_ errors = nb::module_::import_("ts_core.errors");
  nb::object error;
  if (failure.kind == Failure::kStorage)
    error = errors.attr("StorageError")(failure.code, failure.text, failure.path);
  else
    error =
        errors.attr(failure.kind == Failure::kDevice ? "DeviceError" : "StateError")(failure.text);
  PyErr_SetObject(error.type().ptr(), error.ptr());
  throw nb::python_error();
}

// Waits in slices without the GIL, so that Ctrl-C is seen in between.
template <typename Slice>
void wait_with_signals(Slice slice) {
  while (true) {
    {
      const nb::gil_scoped_release release;
      if (slice()) return;
    }
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
}

constexpr int64_t kSliceUs = 50000;

inline const dl::ExchangeApi* torch_api() {
  static const dl::ExchangeApi* api = [] {
    const nb::object tensor = nb::module_::import_("torch").attr("Tensor");
    return detail::exchange_api(tensor.ptr());
  }();
  return api;
}

// Host memory: ordinary, page-locked and mapped.
void bind_look(nb::module_& m);
void bind_memory(nb::module_& m);

}  // namespace ts::paging
