// Kernels of ts-fused: plain functions over pointers and sizes. Rows are contiguous and follow one
// another without gaps; element types are given as ts::DType (float32, bfloat16 or float16).
#pragma once

#include <cstdint>

#include "ts/dtype.h"
#include "ts/isa.h"

namespace ts::fused {

// The element types of one RMSNorm call. y has the type of `out`: that of x with an offset (Gemma
// form), else the promotion of x's and weight's.
struct NormTypes {
  DType x, weight, out;
};

struct NormForward {
  const void* x;       // [rows, hidden]
  const void* weight;  // [hidden]
  void* y;             // [rows, hidden], written
  float* rstd;         // [rows], written
  int64_t rows, hidden;
  float eps, offset;
  bool gemma;            // multiply by offset + weight in fp32, cast after
  const void* residual;  // [rows, hidden], type of x, or null; x + residual is what is normalized
  void* sum;             // [rows, hidden], written: x + residual rounded to the type of x; or null
};

struct NormBackward {
  const void* grad_y;  // [rows, hidden], type `out`
  const void* x;
  const void* weight;
  const float* rstd;
  void* grad_x;       // [rows, hidden], type of x, or null
  float* partial;     // [chunks, hidden], scratch, or null: no weight gradient
  void* grad_weight;  // [hidden], type of weight, or null
  int64_t rows, hidden;
  int64_t rows_per_chunk;  // chunks = ceil(rows / rows_per_chunk)
  float offset;
  bool gemma;
  const void* grad_sum;  // [rows, hidden], type of x, added to grad_x; or null
};

struct CrossEntropyRows {
  void* logits;            // [rows, vocab]; becomes d(sum of losses)/d(logits) if with_grad
  const int64_t* targets;  // [rows]
  float* losses;           // [rows], written
  int64_t rows, vocab;
  int64_t ignore_index;
  float softcap;  // 0: none
  float scale, smoothing;
  bool with_grad;
};

// One tensor of a list that is copied: float32, bfloat16 or float16 each, rounded to nearest, even.
struct CopyEach {
  const void* src;
  void* dst;
  int64_t count;
  DType from, to;
};

// Heads of one tensor of (batch, tokens, heads, dim), the last dimension without gaps.
struct RotaryHeads {
  const void* x;
  void* y;  // written; same type as x
  int64_t heads;
  int64_t x_stride[3], y_stride[3];  // of batch, token, head; in elements
};

constexpr int64_t kMaxRotaryDim = 1024;

// Pairs (a, b) of the first `rotary_dim` elements of a head become (a cos - b sin, b cos + a sin),
// each result with the angle at its own place; the transpose of that map if `inverse`.
struct Rotary {
  RotaryHeads q, k;  // k.heads may be 0
  const void* cos;   // [batch, tokens, width], last dimension without gaps
  const void* sin;
  int64_t cos_stride[2], sin_stride[2];  // of batch, token; in elements
  int64_t batch, tokens, dim, rotary_dim;
  bool half_width;   // one angle a pair: width = rotary_dim / 2, not rotary_dim
  bool interleaved;  // pairs are (2i, 2i + 1), else (i, i + rotary_dim / 2)
  bool inverse;
};

// y = act(gate) * up over rows of `width` elements; strides are of rows, in elements.
struct GatedForward {
  const void* gate;
  const void* up;
  void* y;  // [rows, width] without gaps, written; one type for all
  int64_t rows, width, gate_stride, up_stride;
  bool gelu;  // tanh form of gelu, else silu
};

struct GatedBackward {
  const void* grad_y;
  const void* gate;
  const void* up;
  void* grad_gate;  // written, or null
  void* grad_up;    // written, or null
  int64_t rows, width, grad_stride, gate_stride, up_stride;
  int64_t out_stride;  // of both results
  bool gelu;
};

// `mean_lanes`: the summation order of the mean (see rms_norm.cpp), 8 or 4.
TS_DECLARE_ISA(void rms_norm_forward(const NormForward& a, NormTypes types, int mean_lanes,
                                     int threads))
TS_DECLARE_ISA(void rms_norm_backward(const NormBackward& a, NormTypes types, int threads))
TS_DECLARE_ISA(void rotary(const Rotary& a, DType dtype, DType angles, int threads))
TS_DECLARE_ISA(void gated_forward(const GatedForward& a, DType dtype, int threads))
TS_DECLARE_ISA(void gated_backward(const GatedBackward& a, DType dtype, int threads))
TS_DECLARE_ISA(void cross_entropy_rows(const CrossEntropyRows& a, DType dtype, int threads))
// out[i] = cast(float(src[i]) * scale[0])
TS_DECLARE_ISA(void scale_cast(const void* src, DType src_type, const float* scale, void* out,
                               DType out_type, int64_t n, int threads))
// counts[0] = targets that count, counts[1] = targets neither in [0, vocab) nor ignore_index.
TS_DECLARE_ISA(void label_counts(const int64_t* targets, int64_t n, int64_t ignore_index,
                                 int64_t vocab, int64_t* counts))
// total[0] = sum of the losses in float64, in a fixed order.
TS_DECLARE_ISA(void loss_total(const float* losses, int64_t n, double* total))

void launch_rms_norm_forward(const NormForward& a, NormTypes types, void* stream);
void launch_rms_norm_backward(const NormBackward& a, NormTypes types, void* stream);
void launch_rotary(const Rotary& a, DType dtype, DType angles, void* stream);
void launch_gated_forward(const GatedForward& a, DType dtype, void* stream);
void launch_gated_backward(const GatedBackward& a, DType dtype, void* stream);
void launch_cross_entropy_rows(const CrossEntropyRows& a, DType dtype, void* stream);
void launch_scale_cast(const void* src, DType src_type, const float* scale, void* out,
                       DType out_type, int64_t n, void* stream);
void launch_copy_each(const CopyEach* copies, int64_t tensors, void* stream);
void launch_label_counts(const int64_t* targets, int64_t n, int64_t ignore_index, int64_t vocab,
                         int64_t* counts, void* stream);
void launch_loss_total(const float* losses, int64_t n, double* total, void* stream);

}  // namespace ts::fused
