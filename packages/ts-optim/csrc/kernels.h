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

struct GradItem {
  const void* grad;  // [numel] of kind, read
  int64_t numel;
  Kind kind;
};

// Sums of squares: a tensor is cut into pieces of kSumChunk elements; inside a piece element i goes
// to lane i % kSumLanes, in order; lanes are folded in halves; pieces are summed the same way
// again.
constexpr int64_t kSumChunk = 4096;
constexpr int kSumLanes = 32;

// begins[i]: number of elements in items [0, i), count + 1 entries.
TS_DECLARE_ISA(void adamw(const AdamWItem* items, const int64_t* begins, int64_t count,
                          int threads))
// chunk_begins[i]: number of pieces in items [0, i), count + 1 entries. partials: one per piece,
// written; out: one per item, written.
TS_DECLARE_ISA(void sumsq(const GradItem* items, const int64_t* chunk_begins, int64_t count,
                          double* partials, double* out, int threads))
// Same memory traffic as an fp32 step (4 reads, 3 writes) with almost no arithmetic: the ruler.
TS_DECLARE_ISA(void stream_probe(float* a, const float* b, float* c, float* d, int64_t n,
                                 int threads))

void launch_adamw(const AdamWItem* items, int64_t count, void* stream);
// partials and out are device memory, sized as for the CPU.
void launch_sumsq(const GradItem* items, const int64_t* chunk_begins, int64_t count,
                  double* partials, double* out, void* stream);

}  // namespace ts::optim
