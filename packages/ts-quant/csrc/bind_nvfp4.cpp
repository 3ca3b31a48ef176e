// nvfp4: check, set the device, take the stream, dispatch. Python allocates every output.
#include "bindings.h"
#include "nvfp4.h"

namespace ts::quant {
namespace {

struct Matrix {
  int64_t rows, columns;
};

Matrix matrix_of(const char* op, const TensorView& dense, const char* name, const TensorView& codes,
                 const TensorView& scales, const TensorView& tensor_scale) {
  if (!dense.is_contiguous()) fail_value(op, name, "a contiguous tensor", dense.describe());
  const int dims = dense.ndim();
  Matrix m{1, dims > 0 ? dense.shape(dims - 1) : 1};
  for (int i = 0; i + 1 < dims; ++i) m.rows *= dense.shape(i);
  expect(codes, op, "codes", DType::kU8);
  expect_numel(codes, op, "codes", m.rows * (m.columns / 2 + m.columns % 2));
  expect(scales, op, "scale", DType::kU8);
  expect_numel(scales, op, "scale", m.rows * (m.columns / 16 + (m.columns % 16 != 0)));
  expect(tensor_scale, op, "tensor_scale", DType::kF32);
  expect_numel(tensor_scale, op, "tensor_scale", 1);
  expect_same_device(codes, dense, op, "codes");
  expect_same_device(scales, dense, op, "scale");
  expect_same_device(tensor_scale, dense, op, "tensor_scale");
  expect_no_cuda_missing(dense, op);
  return m;
}

void quantize(TensorView x, TensorView codes, TensorView scales, TensorView tensor_scale,
              TensorView peak, int threads) {
  const char* op = "quantize_nvfp4";
  const Matrix m = matrix_of(op, x, "x", codes, scales, tensor_scale);
  expect(peak, op, "peak", DType::kI32);
  expect_numel(peak, op, "peak", 1);
  expect_same_device(peak, x, op, "peak");
  auto* most = reinterpret_cast<uint32_t*>(peak.data<int32_t>());
  run(
      x, op, "x", threads,
      [&](void* stream) {
        launch_quantize_nvfp4(x.data(), x.dtype(), codes.data<uint8_t>(), scales.data<uint8_t>(),
                              tensor_scale.data<float>(), most, m.rows, m.columns, stream);
      },
      [&](auto* data, int workers) {
        TS_ISA_CALL(ts::quant, quantize_nvfp4, data, codes.data<uint8_t>(), scales.data<uint8_t>(),
                    tensor_scale.data<float>(), most, m.rows, m.columns, workers);
      });
}

void dequantize(TensorView codes, TensorView scales, TensorView tensor_scale, TensorView out,
                int threads) {
  const char* op = "dequantize_nvfp4";
  const Matrix m = matrix_of(op, out, "out", codes, scales, tensor_scale);
  run(
      out, op, "out", threads,
      [&](void* stream) {
        if (m.rows * m.columns == 0) return;
        launch_dequantize_nvfp4(codes.data<uint8_t>(), scales.data<uint8_t>(),
                                tensor_scale.data<float>(), out.data(), out.dtype(), m.rows,
                                m.columns, stream);
      },
      [&](auto* data, int workers) {
        if (m.rows * m.columns == 0) return;
        TS_ISA_CALL(ts::quant, dequantize_nvfp4, codes.data<uint8_t>(), scales.data<uint8_t>(),
                    tensor_scale.data<float>(), data, m.rows, m.columns, workers);
      });
}

}  // namespace

void bind_nvfp4(nb::module_& m) {
  m.def("quantize_nvfp4", &quantize, nb::arg("x"), nb::arg("codes"), nb::arg("scale"),
        nb::arg("tensor_scale"), nb::arg("peak"), nb::arg("threads") = 0);
  m.def("dequantize_nvfp4", &dequantize, nb::arg("codes"), nb::arg("scale"),
        nb::arg("tensor_scale"), nb::arg("out"), nb::arg("threads") = 0);
}

}  // namespace ts::quant
