// fp8: check, set the device, take the stream, dispatch. Python allocates every output.
#include "bindings.h"
#include "fp8.h"

namespace ts::quant {
namespace {

enum Layout : int { kMx = 0, kRow = 1, kBlock = 2 };

// The last dimension makes the columns, the one before the rows, all others batches.
Fp8Tiles tiles_of(const char* op, const TensorView& dense, const char* name,
                  const TensorView& codes, const TensorView& scales, int layout) {
  ts::check(layout >= kMx && layout <= kBlock, op, "layout", "0 (mx32), 1 (row) or 2 (128x128)",
            std::to_string(layout));
  if (!dense.is_contiguous()) fail_value(op, name, "a contiguous tensor", dense.describe());
  const int dims = dense.ndim();
  Fp8Tiles m{1, 1, dims > 0 ? dense.shape(dims - 1) : 1, 1, 32, layout == kMx};
  for (int i = 0; i + 1 < dims; ++i)
    (i + 2 == dims && layout == kBlock ? m.rows : m.batches) *= dense.shape(i);
  if (layout == kRow) m.tile_columns = m.columns > 0 ? m.columns : 1;
  if (layout == kBlock) m.tile_rows = m.tile_columns = 128;
  expect(codes, op, "codes", DType::kU8);
  expect_numel(codes, op, "codes", dense.numel());
  expect(scales, op, "scale", m.e8m0 ? DType::kU8 : DType::kF32);
  expect_numel(scales, op, "scale", m.batches * m.down() * m.across());
  expect_same_device(codes, dense, op, "codes");
  expect_same_device(scales, dense, op, "scale");
  expect_no_cuda_missing(dense, op);
  return m;
}

void quantize(TensorView x, TensorView codes, TensorView scales, int layout, int threads) {
  const char* op = "quantize_fp8";
  const Fp8Tiles m = tiles_of(op, x, "x", codes, scales, layout);
  run(
      x, op, "x", threads,
      [&](void* stream) {
        if (m.numel() == 0) return;
        launch_quantize_fp8(x.data(), x.dtype(), codes.data<uint8_t>(), scales.data(), m, stream);
      },
      [&](auto* data, int workers) {
        if (m.numel() == 0) return;
        TS_ISA_CALL(ts::quant, quantize_fp8, data, codes.data<uint8_t>(), scales.data(), m,
                    workers);
      });
}

void dequantize(TensorView codes, TensorView scales, TensorView out, int layout, int threads) {
  const char* op = "dequantize_fp8";
  const Fp8Tiles m = tiles_of(op, out, "out", codes, scales, layout);
  run(
      out, op, "out", threads,
      [&](void* stream) {
        if (m.numel() == 0) return;
        launch_dequantize_fp8(codes.data<uint8_t>(), scales.data(), out.data(), out.dtype(), m,
                              stream);
      },
      [&](auto* data, int workers) {
        if (m.numel() == 0) return;
        TS_ISA_CALL(ts::quant, dequantize_fp8, codes.data<uint8_t>(), scales.data(), data, m,
                    workers);
      });
}

}  // namespace

void bind_fp8(nb::module_& m) {
  m.def("quantize_fp8", &quantize, nb::arg("x"), nb::arg("codes"), nb::arg("scale"),
        nb::arg("layout"), nb::arg("threads") = 0);
  m.def("dequantize_fp8", &dequantize, nb::arg("codes"), nb::arg("scale"), nb::arg("out"),
        nb::arg("layout"), nb::arg("threads") = 0);
}

}  // namespace ts::quant
