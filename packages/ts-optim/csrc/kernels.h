// Launch functions of ts_optim: plain pointers, sizes and a stream; no torch, no Python.
#pragma once

#include <stdint.h>

#include "ts/isa.h"

namespace ts::optim {

// What one element of AdamW needs besides the tensors; made in double on the host, rounded once.
struct AdamWScalars {
  float decay;         // 1 - lr * weight_decay
  float w1;            // 1 - beta1
  float w2;            // 1 - beta2
  float step_size;     // lr / (1 - beta1^t)
  float inv_sqrt_bc2;  // 1 / sqrt(1 - beta2^t)
  float eps;
  float grad_scale;  // multiplies each gradient first: clipping and loss scale
};

enum class Moments : uint8_t { kF32 = 0, kBF16 = 1, kInt8 = 2 };

enum class Kind : uint8_t { kNone = 0, kF32 = 1, kBF16 = 2, kFP16 = 3 };

// One tensor of a step. `low` is the 16-bit copy of the weights that is written beside the fp32
// ones. With `reconcile` it is read first, and an element that is not the rounding of its fp32
// weight was edited since and wins. `low` may be the same memory as `grad` (not with `reconcile`).
struct AdamWItem {
  float* param;       // [numel] fp32, read and written
  const void* grad;   // [numel] of grad_kind, read
  float* exp_avg;     // [numel] read and written
  float* exp_avg_sq;  // [numel] read and written
  void* low;          // [numel] of low_kind, written; null for Kind::kNone
  int64_t numel;
  AdamWScalars scalars;
  Kind grad_kind;
  Kind low_kind;
  uint8_t reconcile;
};

// One tensor of a step whose moments are packed, averaged or measured. It is worked on in blocks of
// kBlock elements, counted from its own start.
struct BlockItem : AdamWItem {  // exp_avg and exp_avg_sq of the base are not used
  void* m;                      // [numel] first moments: fp32, bf16 or one byte each
  void* v;                      // [numel] second moments
  float* m_scale;               // [blocks] kInt8 only, read and written
  float* v_scale;               // [blocks] kInt8 only, read and written
  float* ema;                   // [numel] moving average of the weights, read and written; or null
  uint64_t seed;                // key of the random numbers
  uint64_t number;              // of the tensor
  uint32_t turn;  // added to random words: goes round by the golden ratio with the step
  double* sums;   // partial sums of this item: kSums rows of sum_stride; or null
  int64_t sum_stride;
  float ema_weight;            // 1 - decay
  uint32_t m_random, m_fixed;  // what rounds the ratios: (what rounds the roots & random) | fixed
};

// Rounding of packed moments without a step, when they are loaded.
struct PackItem {
  float* m;         // [numel] read by pack, written by unpack
  float* v;         // [numel]
  uint8_t* m_code;  // [numel] written by pack, read by unpack
  uint8_t* v_code;  // [numel]
  float* m_scale;   // [blocks]
  float* v_scale;   // [blocks]
  int64_t numel;
};

struct GradItem {
  const void* grad;  // [numel] of kind, read
  int64_t numel;
  Kind kind;
};

// A gradient on the device and the bf16 form that it is given. `low` has room for a whole number of
// kLowAlign elements; what is beyond the last one is written with zeros.
struct NarrowItem {
  const float* grad;  // [numel] read
  uint16_t* low;      // [numel] written
  int64_t numel;
};
constexpr int64_t kLowAlign = 8;  // 16 bytes, for the copies that follow

// Sums of squares: a tensor is cut into pieces of kSumChunk elements; inside a piece element i goes
// to lane i % kSumLanes, in order; lanes are folded in halves; pieces are summed the same way
// again.
constexpr int64_t kSumChunk = 4096;
constexpr int kSumLanes = 32;

// Elements that share a scale, and one unit of work of a BlockItem.
constexpr int64_t kBlock = 256;
// Sums of a measured step: squares of gradients, of the update, of the new weights.
constexpr int kSums = 3;

// begins[i]: number of elements in items [0, i), count + 1 entries.
TS_DECLARE_ISA(void adamw(const AdamWItem* items, const int64_t* begins, int64_t count,
                          int threads))
// begins[i]: number of blocks in items [0, i). All items have the same format of moments.
TS_DECLARE_ISA(void adamw_blocks(const BlockItem* items, const int64_t* begins, int64_t count,
                                 Moments moments, int threads))
TS_DECLARE_ISA(void pack_moments(const PackItem& item, int threads))
TS_DECLARE_ISA(void unpack_moments(const PackItem& item, int threads))
// chunk_begins[i]: number of pieces in items [0, i), count + 1 entries. partials: one per piece,
// written; out: one per item, written.
TS_DECLARE_ISA(void sumsq(const GradItem* items, const int64_t* chunk_begins, int64_t count,
                          double* partials, double* out, int threads))
// Same memory traffic as an fp32 step (4 reads, 3 writes) with almost no arithmetic: the ruler.
TS_DECLARE_ISA(void stream_probe(float* a, const float* b, float* c, float* d, int64_t n,
                                 int threads))
// The same for packed moments: c and d hold `bytes` bytes an element.
TS_DECLARE_ISA(void stream_probe_bytes(float* a, const float* b, uint8_t* c, uint8_t* d, int64_t n,
                                       int64_t bytes, int threads))

void launch_adamw(const AdamWItem* items, int64_t count, void* stream);
void launch_adamw_blocks(const BlockItem* items, const int64_t* begins, int64_t count,
                         Moments moments, double* out, void* stream);
// The address under which kernels reach page-locked host memory; null if they cannot.
void* mapped_pointer(void* host);
// partials and out are device memory, sized as for the CPU.
void launch_sumsq(const GradItem* items, const int64_t* chunk_begins, int64_t count,
                  double* partials, double* out, void* stream);
// Each value read once: rounded to bf16, compared, its square added in the order of launch_sumsq.
// lost: one byte per item, written: 1 where a value differs from its bf16 form or is NaN.
void launch_narrow(const NarrowItem* items, const int64_t* chunk_begins, int64_t count,
                   double* partials, double* out, uint8_t* lost, void* stream);

}  // namespace ts::optim
