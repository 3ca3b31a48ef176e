// nf4 and int8 with packed scales: check, set the device, take the stream, dispatch.
#include "bindings.h"
#include "nested.h"
#include "scale_checks.h"

namespace ts::quant {
namespace {

void dequantize_nf4_dq(TensorView codes, TensorView absmax, TensorView nested_absmax,
                       TensorView nested_map, TensorView out, int64_t block_size, int threads) {
  const char* op = "dequantize_nf4_dq";
  check_codes({op, DType::kU8, 2}, out, "out", codes, block_size);
  const MapScaleData scales = map_scales(op, out, absmax, nested_absmax, nested_map, block_size);
  run(
      out, op, "out", threads,
      [&](void* stream) {
        launch_dequantize_nf4_dq(codes.data<uint8_t>(), scales, out.data(), out.dtype(),
                                 out.numel(), block_size, stream);
      },
      [&](auto* data, int workers) {
        TS_ISA_CALL(ts::quant, dequantize_nf4_dq, codes.data<uint8_t>(), scales, data, out.numel(),
                    block_size, workers);
      });
}

void encode_int8_dq(TensorView x, TensorView absmax, TensorView nested_absmax, TensorView codes,
                    int64_t block_size, int threads) {
  const char* op = "encode_int8_dq";
  check_codes({op, DType::kI8, 1}, x, "x", codes, block_size);
  const LogScaleData scales = log_scales(op, x, absmax, nested_absmax, block_size);
  run(
      x, op, "x", threads,
      [&](void* stream) {
        launch_encode_int8_dq(x.data(), x.dtype(), scales, codes.data<int8_t>(), x.numel(),
                              block_size, stream);
      },
      [&](auto* data, int workers) {
        TS_ISA_CALL(ts::quant, encode_int8_dq, data, scales, codes.data<int8_t>(), x.numel(),
                    block_size, workers);
      });
}

void dequantize_int8_dq(TensorView codes, TensorView absmax, TensorView nested_absmax,
                        TensorView out, int64_t block_size, int threads) {
  const char* op = "dequantize_int8_dq";
  check_codes({op, DType::kI8, 1}, out, "out", codes, block_size);
  const LogScaleData scales = log_scales(op, out, absmax, nested_absmax, block_size);
  run(
      out, op, "out", threads,
      [&](void* stream) {
        launch_dequantize_int8_dq(codes.data<int8_t>(), scales, out.data(), out.dtype(),
                                  out.numel(), block_size, stream);
      },
      [&](auto* data, int workers) {
        TS_ISA_CALL(ts::quant, dequantize_int8_dq, codes.data<int8_t>(), scales, data, out.numel(),
                    block_size, workers);
      });
}

}  // namespace

void bind_nested(nb::module_& m) {
  m.def("dequantize_nf4_dq", &dequantize_nf4_dq, nb::arg("codes"), nb::arg("absmax"),
        nb::arg("nested_absmax"), nb::arg("nested_map"), nb::arg("out"), nb::arg("block_size"),
        nb::arg("threads") = 0);
  m.def("encode_int8_dq", &encode_int8_dq, nb::arg("x"), nb::arg("absmax"),
        nb::arg("nested_absmax"), nb::arg("codes"), nb::arg("block_size"), nb::arg("threads") = 0);
  m.def("dequantize_int8_dq", &dequantize_int8_dq, nb::arg("codes"), nb::arg("absmax"),
        nb::arg("nested_absmax"), nb::arg("out"), nb::arg("block_size"), nb::arg("threads") = 0);
}

}  // namespace ts::quant
