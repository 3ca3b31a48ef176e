// Checks of packed scales, for the bindings; each returns what the kernels take.
#pragma once

#include "bindings.h"
#include "nested.h"

namespace ts::quant {

inline int64_t pieces(int64_t n, int64_t size) { return n / size + (n % size != 0); }

// `dense` is the float tensor of either direction, named `name` in messages.
inline void check_codes(const BlockLayout& layout, const TensorView& dense, const char* name,
                        const TensorView& codes, int64_t block_size) {
  ts::check(block_size >= 2 && block_size % 2 == 0, layout.op, "block_size", "an even integer >= 2",
            std::to_string(block_size));
  if (!dense.is_contiguous()) fail_value(layout.op, name, "a contiguous tensor", dense.describe());
  expect(codes, layout.op, "codes", layout.codes);
  expect_numel(codes, layout.op, "codes", pieces(dense.numel(), layout.elements_per_byte));
  expect_same_device(codes, dense, layout.op, "codes");
  expect_no_cuda_missing(dense, layout.op);
}

// One value per block, and one fp32 per 256 blocks.
inline void check_nested(const char* op, const TensorView& dense, const TensorView& absmax,
                         const TensorView& groups, int64_t block_size) {
  const int64_t blocks = pieces(dense.numel(), block_size);
  expect(absmax, op, "absmax", DType::kU8);
  expect_numel(absmax, op, "absmax", blocks);
  expect_same_device(absmax, dense, op, "absmax");
  expect(groups, op, "nested_absmax", DType::kF32);
  expect_numel(groups, op, "nested_absmax", pieces(blocks, int64_t{1} << kNestedShift));
  expect_same_device(groups, dense, op, "nested_absmax");
}

inline LogScaleData log_scales(const char* op, const TensorView& dense, const TensorView& absmax,
                               const TensorView& groups, int64_t block_size) {
  check_nested(op, dense, absmax, groups, block_size);
  return {absmax.data<uint8_t>(), groups.data<float>()};
}

inline MapScaleData map_scales(const char* op, const TensorView& dense, const TensorView& absmax,
                               const TensorView& groups, const TensorView& map,
                               int64_t block_size) {
  check_nested(op, dense, absmax, groups, block_size);
  expect(map, op, "nested_map", DType::kF32);
  expect_numel(map, op, "nested_map", kMapSize);
  expect_same_device(map, dense, op, "nested_map");
  return {absmax.data<uint8_t>(), groups.data<float>(), map.data<float>()};
}

}  // namespace ts::quant
