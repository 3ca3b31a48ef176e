// What bitsandbytes publishes besides nf4, on the GPU: fp4, and int8 with one scale a row. Bit for
// bit the results of csrc/cpu/bnb.cpp.
#include "blocks.cuh"
#include "eight_bit.cuh"
#include "four_bit.cuh"
#include "nested.h"

namespace ts::quant {
namespace {

struct Tables {
  float levels[16];
};
constexpr Tables make_tables() {
  Tables t{};
  for (int i = 0; i < 16; ++i) t.levels[i] = kFp4Levels[i];
  return t;
}
__constant__ const Tables kTables = make_tables();

struct Fp4Levels {
  __device__ static __forceinline__ float level(int code) { return kTables.levels[code]; }
};

// Two roundings, in bitsandbytes' order: the scale of the row, then 1 / 127.
struct TimesRow {
  float scale;
  __device__ __forceinline__ explicit TimesRow(float row_scale) : scale(row_scale) {}
  __device__ __forceinline__ float operator()(float code) const {
    return __fmul_rn(__fmul_rn(code, scale), kInverse127);
  }
};

}  // namespace

void launch_dequantize_fp4(const uint8_t* codes, const float* absmax, void* out, DType dtype,
                           int64_t n, int64_t block_size, void* stream) {
  launch_decode_four_bit<Fp4Levels>(codes, PlainScales{absmax}, out, dtype, n, block_size, stream,
                                    "dequantize_fp4");
}

void launch_dequantize_fp4_dq(const uint8_t* codes, MapScaleData scales, void* out, DType dtype,
                              int64_t n, int64_t block_size, void* stream) {
  launch_decode_four_bit<Fp4Levels>(codes, MapScales{scales}, out, dtype, n, block_size, stream,
                                    "dequantize_fp4_dq");
}

void launch_dequantize_int8_rows(const int8_t* codes, const float* row_scales, void* out,
                                 DType dtype, int64_t n, int64_t columns, void* stream) {
  launch_decode_eight_bit<TimesRow>(codes, PlainScales{row_scales}, out, dtype, n, columns, stream,
                                    "dequantize_int8_rows");
}

}  // namespace ts::quant
