// What bitsandbytes publishes besides nf4: check, set the device, take the stream, dispatch.
#include "bindings.h"
#include "nested.h"
#include "scale_checks.h"

namespace ts::quant {
namespace {

void dequantize_fp4(TensorView codes, TensorView absmax, TensorView out, int64_t block_size,
                    int threads) {
  const char* op = "dequantize_fp4";
  check_blocks({op, DType::kU8, 2}, out, "out", codes, absmax, block_size);
  run(
      out, op, "out", threads,
      [&](void* stream) {
        launch_dequantize_fp4(codes.data<uint8_t>(), absmax.data<float>(), out.data(), out.dtype(),
                              out.numel(), block_size, stream);
      },
      [&](auto* data, int workers) {
        TS_ISA_CALL(ts::quant, dequantize_fp4, codes.data<uint8_t>(), absmax.data<float>(), data,
                    out.numel(), block_size, workers);
      });
}

void dequantize_fp4_dq(TensorView codes, TensorView absmax, TensorView nested_absmax,
                       TensorView nested_map, TensorView out, int64_t block_size, int threads) {
  const char* op = "dequantize_fp4_dq";
  check_codes({op, DType::kU8, 2}, out, "out", codes, block_size);
  const MapScaleData scales = map_scales(op, out, absmax, nested_absmax, nested_map, block_size);
  run(
      out, op, "out", threads,
      [&](void* stream) {
        launch_dequantize_fp4_dq(codes.data<uint8_t>(), scales, out.data(), out.dtype(),
                                 out.numel(), block_size, stream);
      },
      [&](auto* data, int workers) {
        TS_ISA_CALL(ts::quant, dequantize_fp4_dq, codes.data<uint8_t>(), scales, data, out.numel(),
                    block_size, workers);
      });
}

void dequantize_int8_rows(TensorView codes, TensorView row_absmax, TensorView out, int64_t columns,
                          int threads) {
  const char* op = "dequantize_int8_rows";
  ts::check(columns >= 1, op, "columns", "an integer >= 1", std::to_string(columns));
  if (!out.is_contiguous()) fail_value(op, "out", "a contiguous tensor", out.describe());
  expect(codes, op, "codes", DType::kI8);
  expect_numel(codes, op, "codes", out.numel());
  expect(row_absmax, op, "row_absmax", DType::kF32);
  ts::check(out.numel() == 0 ||
                (out.numel() % columns == 0 && row_absmax.numel() == out.numel() / columns &&
                 row_absmax.is_contiguous()),
            op, "row_absmax", "one contiguous value per row of " + std::to_string(columns),
            row_absmax.describe());
  expect_same_device(codes, out, op, "codes");
  expect_same_device(row_absmax, out, op, "row_absmax");
  expect_no_cuda_missing(out, op);
  run(
      out, op, "out", threads,
      [&](void* stream) {
        launch_dequantize_int8_rows(codes.data<int8_t>(), row_absmax.data<float>(), out.data(),
                                    out.dtype(), out.numel(), columns, stream);
      },
      [&](auto* data, int workers) {
        TS_ISA_CALL(ts::quant, dequantize_int8_rows, codes.data<int8_t>(), row_absmax.data<float>(),
                    data, out.numel(), columns, workers);
      });
}

}  // namespace

void bind_bnb(nb::module_& m) {
  m.def("dequantize_fp4", &dequantize_fp4, nb::arg("codes"), nb::arg("absmax"), nb::arg("out"),
        nb::arg("block_size"), nb::arg("threads") = 0);
  m.def("dequantize_fp4_dq", &dequantize_fp4_dq, nb::arg("codes"), nb::arg("absmax"),
        nb::arg("nested_absmax"), nb::arg("nested_map"), nb::arg("out"), nb::arg("block_size"),
        nb::arg("threads") = 0);
  m.def("dequantize_int8_rows", &dequantize_int8_rows, nb::arg("codes"), nb::arg("row_absmax"),
        nb::arg("out"), nb::arg("columns"), nb::arg("threads") = 0);
}

}  // namespace ts::quant
