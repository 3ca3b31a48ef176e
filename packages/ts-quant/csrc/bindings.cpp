#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include "kernels.h"
#include "ts/module.h"
namespace nb = nanobind;
using namespace ts;
NB_MODULE(_C, m) {
  init_module(m);
  m.def("probe", [](TensorView x, TensorView y, int threads) {
    expect(x, "probe", "x", DType::kF32); expect(y, "probe", "y", DType::kF32); expect_numel(y, "probe", "y", x.numel()); expect_same_device(y, x, "probe", "y");
    expect_no_cuda_missing(x, "probe");
#if defined(TS_WITH_CUDA)
    if (x.is_cuda()) { DeviceGuard g(x.device_id()); quant::launch_probe(x.data<float>(), y.data<float>(), x.numel(), x.current_stream()); return; }
#endif
    TS_ISA_CALL(quant, probe, x.data<float>(), y.data<float>(), x.numel(), thread_count(threads));
  }, nb::arg("x"), nb::arg("y"), nb::arg("threads") = 0);
}
