// GGUF blocks: check, set the device, take the stream, dispatch. Python allocates every output.
#include "bindings.h"
#include "gguf.h"

namespace ts::quant {
namespace {

struct GgufSize {
  int64_t bytes, values;
};

GgufSize size_of_type(const char* op, int type) {
  switch (static_cast<GgufType>(type)) {
    case GgufType::kQ4_0:
      return {18, 32};
    case GgufType::kQ4_1:
      return {20, 32};
    case GgufType::kQ5_0:
      return {22, 32};
    case GgufType::kQ5_1:
      return {24, 32};
    case GgufType::kQ8_0:
      return {34, 32};
    case GgufType::kQ4_K:
      return {144, 256};
    case GgufType::kQ5_K:
      return {176, 256};
    case GgufType::kQ6_K:
      return {210, 256};
  }
  fail_value(op, "type", "ggml's number of a type that is decoded: 2, 3, 6, 7, 8, 12, 13 or 14",
             std::to_string(type));
}

void dequantize_gguf(TensorView blocks, TensorView out, int type, int threads) {
  const char* op = "dequantize_gguf";
  const GgufSize size = size_of_type(op, type);
  if (!out.is_contiguous()) fail_value(op, "out", "a contiguous tensor", out.describe());
  const int64_t count = out.numel() / size.values;
  ts::check(out.numel() % size.values == 0, op, "out", "whole blocks", out.describe());
  expect(blocks, op, "blocks", DType::kU8);
  expect_numel(blocks, op, "blocks", count * size.bytes);
  expect_same_device(blocks, out, op, "blocks");
  expect_no_cuda_missing(out, op);
  run(
      out, op, "out", threads,
      [&](void* stream) {
        launch_dequantize_gguf(blocks.data<uint8_t>(), out.data(), out.dtype(), count,
                               static_cast<GgufType>(type), stream);
      },
      [&](auto* data, int workers) {
        TS_ISA_CALL(ts::quant, dequantize_gguf, blocks.data<uint8_t>(), data, count, type, workers);
      });
}

}  // namespace

void bind_gguf(nb::module_& m) {
  m.def("dequantize_gguf", &dequantize_gguf, nb::arg("blocks"), nb::arg("out"), nb::arg("type"),
        nb::arg("threads") = 0);
}

}  // namespace ts::quant
