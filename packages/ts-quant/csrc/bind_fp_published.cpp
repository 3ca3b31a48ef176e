// Published fp4 and fp8 layouts: check, set the device, take the stream, dispatch. Python allocates
// every output.
#include "bindings.h"
#include "fp_published.h"

namespace ts::quant {
namespace {

// out is (stacks, rows, columns), or (stacks, columns, rows) if transposed.
void dequantize_fp4(TensorView codes, TensorView scales, TensorView tensor_scale, TensorView out,
                    int kind, bool transposed, int threads) {
  const char* op = "dequantize_published_fp4";
  ts::check(kind >= 0 && kind <= 2, op, "kind", "0 (e8m0), 1 (multiplied) or 2 (divided)",
            std::to_string(kind));
  ts::check(out.ndim() == 3 && out.is_contiguous(), op, "out", "a contiguous stack of matrices",
            out.describe());
  const int64_t rows = out.shape(transposed ? 2 : 1), columns = out.shape(transposed ? 1 : 2);
  const int64_t group = kind == 0 ? 32 : 16;
  ts::check(columns % group == 0, op, "out",
            "columns that are a multiple of " + std::to_string(group), out.describe());
  expect(codes, op, "codes", DType::kU8);
  expect_numel(codes, op, "codes", out.numel() / 2);
  expect(scales, op, "scales", DType::kU8);
  expect_numel(scales, op, "scales", out.numel() / group);
  expect(tensor_scale, op, "tensor_scale", DType::kF32);
  expect_numel(tensor_scale, op, "tensor_scale", kind == 0 ? 0 : 1);
  expect_same_device(codes, out, op, "codes");
  expect_same_device(scales, out, op, "scales");
  if (kind != 0) expect_same_device(tensor_scale, out, op, "tensor_scale");
  expect_no_cuda_missing(out, op);
  const Fp4 m{codes.data<uint8_t>(),
              scales.data<uint8_t>(),
              kind == 0 ? nullptr : tensor_scale.data<float>(),
              out.shape(0),
              rows,
              columns,
              static_cast<Fp4Scale>(kind),
              transposed};
  run(
      out, op, "out", threads,
      [&](void* stream) { launch_dequantize_published_fp4(m, out.data(), out.dtype(), stream); },
      [&](auto* data, int workers) {
        TS_ISA_CALL(ts::quant, dequantize_published_fp4, m, data, workers);
      });
}

void dequantize_fp8(TensorView codes, TensorView scales, TensorView out, int64_t tile_rows,
                    int64_t tile_columns, int threads) {
  const char* op = "dequantize_published_fp8";
  ts::check(out.ndim() == 2 && out.is_contiguous(), op, "out", "a contiguous matrix",
            out.describe());
  ts::check(tile_rows >= 1 && tile_columns >= 1, op, "tile_rows, tile_columns", "integers >= 1",
            std::to_string(tile_rows) + ", " + std::to_string(tile_columns));
  const int64_t rows = out.shape(0), columns = out.shape(1);
  const int64_t down = rows / tile_rows + (rows % tile_rows != 0);
  const int64_t across = columns / tile_columns + (columns % tile_columns != 0);
  expect(codes, op, "codes", DType::kU8);
  expect_numel(codes, op, "codes", rows * columns);
  expect(scales, op, "scales", DType::kF32);
  expect_numel(scales, op, "scales", down * across);
  expect_same_device(codes, out, op, "codes");
  expect_same_device(scales, out, op, "scales");
  expect_no_cuda_missing(out, op);
  const Fp8 m{codes.data<uint8_t>(), scales.data<float>(), rows, columns, tile_rows, tile_columns};
  run(
      out, op, "out", threads,
      [&](void* stream) { launch_dequantize_published_fp8(m, out.data(), out.dtype(), stream); },
      [&](auto* data, int workers) {
        TS_ISA_CALL(ts::quant, dequantize_published_fp8, m, data, workers);
      });
}

}  // namespace

void bind_fp_published(nb::module_& m) {
  m.def("dequantize_published_fp4", &dequantize_fp4, nb::arg("codes"), nb::arg("scales"),
        nb::arg("tensor_scale"), nb::arg("out"), nb::arg("kind"), nb::arg("transposed"),
        nb::arg("threads") = 0);
  m.def("dequantize_published_fp8", &dequantize_fp8, nb::arg("codes"), nb::arg("scales"),
        nb::arg("out"), nb::arg("tile_rows"), nb::arg("tile_columns"), nb::arg("threads") = 0);
}

}  // namespace ts::quant
