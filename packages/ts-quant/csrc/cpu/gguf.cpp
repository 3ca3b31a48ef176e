// GGUF blocks on the CPU: a stretch of values is unpacked in fp32, then rounded once.
// The loops over constant counts are what the compiler vectorizes, for each instruction set.
#include <stdint.h>

#include "gguf_blocks.h"
#include "spread.h"
#include "ts/numeric.h"
#include "ts/thread_pool.h"

namespace ts::quant::TS_ISA {

template <typename Block, typename T>
static void decode(const uint8_t* blocks, T* out, int64_t count, int threads) {
  parallel_for(count, kDecodeGrain / Block::kValues, threads, [=](int64_t first, int64_t last) {
    float v[Block::kRun];
    for (int64_t b = first; b < last; ++b) {
      for (int run = 0; run < Block::kValues; run += Block::kRun) {
        Block::template run<Block::kRun>(blocks + b * Block::kBytes, run, v);
        spread(out + b * Block::kValues + run, v, Block::kRun);
      }
    }
  });
}

template <typename T>
static void decode_type(const uint8_t* blocks, T* out, int64_t count, int type, int threads) {
  switch (type) {  // ggml's numbers; the bindings let no other through
    case 2:
      return decode<GgufQ4_0>(blocks, out, count, threads);
    case 3:
      return decode<GgufQ4_1>(blocks, out, count, threads);
    case 6:
      return decode<GgufQ5_0>(blocks, out, count, threads);
    case 7:
      return decode<GgufQ5_1>(blocks, out, count, threads);
    case 8:
      return decode<GgufQ8_0>(blocks, out, count, threads);
    case 12:
      return decode<GgufQ4_K>(blocks, out, count, threads);
    case 13:
      return decode<GgufQ5_K>(blocks, out, count, threads);
    case 14:
      return decode<GgufQ6_K>(blocks, out, count, threads);
  }
}

#define TS_QUANT_GGUF(T)                                                                      \
  void dequantize_gguf(const uint8_t* blocks, T* out, int64_t count, int type, int threads) { \
    decode_type(blocks, out, count, type, threads);                                           \
  }

TS_QUANT_GGUF(float)
TS_QUANT_GGUF(bf16)
TS_QUANT_GGUF(fp16)

}  // namespace ts::quant::TS_ISA
