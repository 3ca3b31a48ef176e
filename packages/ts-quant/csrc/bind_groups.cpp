// GPTQ and AWQ: check, set the device, take the stream, dispatch. Python allocates every output.
#include "bindings.h"
#include "groups.h"

namespace ts::quant {
namespace {

ScaleType scale_type(const TensorView& scales, const char* op) {
  switch (scales.dtype()) {
    case DType::kF32:
      return ScaleType::kF32;
    case DType::kF16:
      return ScaleType::kF16;
    case DType::kBF16:
      return ScaleType::kBF16;
    default:
      fail_type(op, "scales", "float16, bfloat16 or float32", scales.describe());
  }
}

// An empty g_idx: column k is in group k / group_size.
void dequantize_groups(TensorView codes, TensorView zeros, TensorView scales, TensorView g_idx,
                       TensorView out, int64_t group_size, int bits, bool awq, int zero_offset,
                       int threads) {
  const char* op = "dequantize_groups";
  ts::check(out.ndim() == 2 && out.is_contiguous(), op, "out", "a contiguous matrix",
            out.describe());
  ts::check((bits == 2 && !awq) || bits == 4 || (bits == 8 && !awq), op, "bits",
            "4, or for GPTQ also 2 or 8", std::to_string(bits));
  const int64_t rows = out.shape(0), columns = out.shape(1), per = 32 / bits;
  ts::check(rows % per == 0 && (awq || columns % per == 0), op, "out",
            "rows, and for GPTQ columns, that fill words of 32 bits", out.describe());
  ts::check(group_size >= 1, op, "group_size", "an integer >= 1", std::to_string(group_size));
  ts::check(rows > 0, op, "out", "at least one row", out.describe());
  const int64_t groups = scales.numel() / rows;
  ts::check(groups > 0 && scales.numel() == groups * rows && scales.is_contiguous(), op, "scales",
            "contiguous (groups, rows)", scales.describe());
  ts::check(g_idx.numel() || groups >= columns / group_size + (columns % group_size != 0), op,
            "scales", "a row for every group", scales.describe());
  expect(codes, op, "codes", DType::kI32);
  expect_numel(codes, op, "codes", rows * columns / per);
  expect(zeros, op, "zeros", DType::kI32);
  expect_numel(zeros, op, "zeros", groups * rows / per);
  expect(g_idx, op, "g_idx", DType::kI32);
  if (g_idx.numel()) expect_numel(g_idx, op, "g_idx", columns);
  expect_same_device(codes, out, op, "codes");
  expect_same_device(zeros, out, op, "zeros");
  expect_same_device(scales, out, op, "scales");
  if (g_idx.numel()) expect_same_device(g_idx, out, op, "g_idx");
  expect_no_cuda_missing(out, op);
  const Groups m{codes.data<int32_t>(),
                 zeros.data<int32_t>(),
                 scales.data(),
                 g_idx.numel() ? g_idx.data<int32_t>() : nullptr,
                 rows,
                 columns,
                 groups,
                 group_size,
                 scale_type(scales, op),
                 awq ? GroupOrder::kAwq : GroupOrder::kGptq,
                 bits,
                 zero_offset};
  run(
      out, op, "out", threads,
      [&](void* stream) { launch_dequantize_groups(m, out.data(), out.dtype(), stream); },
      [&](auto* data, int workers) {
        TS_ISA_CALL(ts::quant, dequantize_groups, m, data, workers);
      });
}

}  // namespace

void bind_groups(nb::module_& m) {
  m.def("dequantize_groups", &dequantize_groups, nb::arg("codes"), nb::arg("zeros"),
        nb::arg("scales"), nb::arg("g_idx"), nb::arg("out"), nb::arg("group_size"), nb::arg("bits"),
        nb::arg("awq"), nb::arg("zero_offset"), nb::arg("threads") = 0);
}

}  // namespace ts::quant
