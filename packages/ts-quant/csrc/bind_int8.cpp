// int8: check, set the device, take the stream, dispatch. Python allocates every output.
#include "bindings.h"
#include "kernels.h"

namespace ts::quant {
namespace {

void quantize_int8(TensorView x, TensorView codes, TensorView absmax, int64_t block_size,
                   int threads) {
  const char* op = "quantize_int8";
  check_blocks({op, DType::kI8, 1}, x, "x", codes, absmax, block_size);
  with_float_type(x, op, "x", [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
#if defined(TS_WITH_CUDA)
    if (x.is_cuda()) {
      DeviceGuard guard(x.device_id());
      launch_quantize_int8(x.data(), x.dtype(), codes.data<int8_t>(), absmax.data<float>(),
                           x.numel(), block_size, x.current_stream());
      return;
    }
#endif
    const int count = thread_count(threads);
    nb::gil_scoped_release released;
    TS_ISA_CALL(ts::quant, quantize_int8, x.data<const T>(), codes.data<int8_t>(),
                absmax.data<float>(), x.numel(), block_size, count);
  });
}

void dequantize_int8(TensorView codes, TensorView absmax, TensorView out, int64_t block_size,
                     int threads) {
  const char* op = "dequantize_int8";
  check_blocks({op, DType::kI8, 1}, out, "out", codes, absmax, block_size);
  with_float_type(out, op, "out", [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
#if defined(TS_WITH_CUDA)
    if (out.is_cuda()) {
      DeviceGuard guard(out.device_id());
      launch_dequantize_int8(codes.data<int8_t>(), absmax.data<float>(), out.data(), out.dtype(),
                             out.numel(), block_size, out.current_stream());
      return;
    }
#endif
    const int count = thread_count(threads);
    nb::gil_scoped_release released;
    TS_ISA_CALL(ts::quant, dequantize_int8, codes.data<int8_t>(), absmax.data<float>(),
                out.data<T>(), out.numel(), block_size, count);
  });
}

}  // namespace

void bind_int8(nb::module_& m) {
  m.def("quantize_int8", &quantize_int8, nb::arg("x"), nb::arg("codes"), nb::arg("absmax"),
        nb::arg("block_size"), nb::arg("threads") = 0);
  m.def("dequantize_int8", &dequantize_int8, nb::arg("codes"), nb::arg("absmax"), nb::arg("out"),
        nb::arg("block_size"), nb::arg("threads") = 0);
}

}  // namespace ts::quant
