// int8: check, set the device, take the stream, dispatch. Python allocates every output.
#include "bindings.h"
#include "kernels.h"

namespace ts::quant {
namespace {

void quantize_int8(TensorView x, TensorView codes, TensorView absmax, int64_t block_size,
                   int threads) {
  const char* op = "quantize_int8";
  check_blocks({op, DType::kI8, 1}, x, "x", codes, absmax, block_size);
  run(
      x, op, "x", threads,
      [&](void* stream) {
        launch_quantize_int8(x.data(), x.dtype(), codes.data<int8_t>(), absmax.data<float>(),
                             x.numel(), block_size, stream);
      },
      [&](auto* data, int workers) {
        TS_ISA_CALL(ts::quant, quantize_int8, data, codes.data<int8_t>(), absmax.data<float>(),
                    x.numel(), block_size, workers);
      });
}

void dequantize_int8(TensorView codes, TensorView absmax, TensorView out, int64_t block_size,
                     int threads) {
  const char* op = "dequantize_int8";
  check_blocks({op, DType::kI8, 1}, out, "out", codes, absmax, block_size);
  run(
      out, op, "out", threads,
      [&](void* stream) {
        launch_dequantize_int8(codes.data<int8_t>(), absmax.data<float>(), out.data(), out.dtype(),
                               out.numel(), block_size, stream);
      },
      [&](auto* data, int workers) {
        TS_ISA_CALL(ts::quant, dequantize_int8, codes.data<int8_t>(), absmax.data<float>(), data,
                    out.numel(), block_size, workers);
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
