// nf4: check, set the device, take the stream, dispatch. Python allocates every output.
#include "bindings.h"
#include "kernels.h"

namespace ts::quant {
namespace {

void quantize_nf4(TensorView x, TensorView codes, TensorView absmax, int64_t block_size,
                  int threads) {
  const char* op = "quantize_nf4";
  check_blocks({op, DType::kU8, 2}, x, "x", codes, absmax, block_size);
  run(
      x, op, "x", threads,
      [&](void* stream) {
        launch_quantize_nf4(x.data(), x.dtype(), codes.data<uint8_t>(), absmax.data<float>(),
                            x.numel(), block_size, stream);
      },
      [&](auto* data, int workers) {
        TS_ISA_CALL(ts::quant, quantize_nf4, data, codes.data<uint8_t>(), absmax.data<float>(),
                    x.numel(), block_size, workers);
      });
}

void dequantize_nf4(TensorView codes, TensorView absmax, TensorView out, int64_t block_size,
                    int threads) {
  const char* op = "dequantize_nf4";
  check_blocks({op, DType::kU8, 2}, out, "out", codes, absmax, block_size);
  run(
      out, op, "out", threads,
      [&](void* stream) {
        launch_dequantize_nf4(codes.data<uint8_t>(), absmax.data<float>(), out.data(), out.dtype(),
                              out.numel(), block_size, stream);
      },
      [&](auto* data, int workers) {
        TS_ISA_CALL(ts::quant, dequantize_nf4, codes.data<uint8_t>(), absmax.data<float>(), data,
                    out.numel(), block_size, workers);
      });
}

}  // namespace

void bind_nf4(nb::module_& m) {
  m.def("quantize_nf4", &quantize_nf4, nb::arg("x"), nb::arg("codes"), nb::arg("absmax"),
        nb::arg("block_size"), nb::arg("threads") = 0);
  m.def("dequantize_nf4", &dequantize_nf4, nb::arg("codes"), nb::arg("absmax"), nb::arg("out"),
        nb::arg("block_size"), nb::arg("threads") = 0);
}

}  // namespace ts::quant
