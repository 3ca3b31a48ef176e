// Checks of packed scales, for the bindings; each returns what the kernels take.
#pragma once

#include "bindings.h"
#include "nested.h"

namespace ts::quant {

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
