// How moments are packed, the only copy: host (every instruction set) and CUDA compile this text.
//
// bf16: the 16 bits that are cut off decide with 16 random ones, so that the mean is exact.
//
// int8, in blocks of 256 elements, one byte for each moment:
//   s = sqrt(v)   8 bits: a small float without sign, times the fp32 maximum of s in the block
//   r = |m| / s   7 bits and the sign of m: a small float, times the maximum of r in the block
// where the quotient and the products of r are differences and sums of the bits of floats, which is
// close to it, cheaper, and undone exactly. Decoded: v = s^2, m = r s with the s that was stored,
// so that rounding s leaves m / s alone. A code of s has 32 values an octave down to 2^-4 and 16
// down to 2^-12, one of r has 32 down to 2^-3 and 8 down to 2^-7; both hold 0 and 1. s is rounded
// with 16 random bits, but never to 0 unless it is 0; r is rounded to nearest, or with the same
// random bits where nearest would stop its decay; below its smallest value it is 0. m is 0 wherever
// s is, and |m| / s is never more than about what the step that wrote it found: a coordinate whose
// gradient stops cannot blow up.
//
// Packing what was unpacked gives the same bytes: the largest s and r are code 1 exactly, so that
// the maxima are found again; sqrt(s^2) = s for correctly rounded operations; s stays above 2^-63,
// where s^2 is exact to the last bit, and is far closer to its code than to the next.
//
// Block-wise 8-bit states: Dettmers et al., arXiv:2110.02861; unbiased rounding: Gupta et al.,
// arXiv:1502.02551.
#pragma once

#include "adamw_math.h"

namespace ts::optim {
namespace {

constexpr uint32_t kNaNBits = 0x7FC00000u;
constexpr uint32_t kInfBits = 0x7F800000u;
constexpr float kSmallestRoot = 2.168404344971009e-19f;  // 2^-62, of a step
constexpr float kLoadedRoot = 1.355252715606881e-19f;  // 1.25 * 2^-63: below all that a step leaves
constexpr int32_t kSmallestRatio = -(40 << 23);        // 2^-40: smaller moments are 0
constexpr uint32_t kSmallestBits = 0x20000000u;        // 2^-63: below all roots but 0
constexpr uint32_t kNoRatio = 0u - 0x60000000u;        // below all ratios
constexpr uint32_t kOneBits = 127u << 23;
constexpr uint32_t kNearest = 0x8000u;  // rounds to nearest in place of random bits

// Part of a code in which SHIFT bits of the float are cut off; 2^(EXPONENT - 127) is CODE.
template <int SHIFT, int EXPONENT, int CODE>
struct Segment {
  // The code with 16 bits behind the point.
  template <typename O>
  TS_HOST_DEVICE static inline typename O::I encode(typename O::I x) {
    constexpr uint32_t kZero = (static_cast<uint32_t>(EXPONENT) << (39 - SHIFT)) - (CODE << 16);
    return O::add(O::template shr<SHIFT - 16>(x), O::seti(0u - kZero));
  }
  template <typename O>
  TS_HOST_DEVICE static inline typename O::I decode(typename O::I code) {
    constexpr uint32_t kZero = (static_cast<uint32_t>(EXPONENT) << 23) - (CODE << SHIFT);
    return O::add(O::template shl<SHIFT>(code), O::seti(kZero));
  }
};

// Steps get wider downwards: a code is the larger, a value the smaller of what the two parts say.
template <typename HIGH, typename LOW>
struct Code {
  // Of the bits of a float in [0, 1], with 16 bits behind the point; negative below code 0.
  template <typename O>
  TS_HOST_DEVICE static inline typename O::I encode(typename O::I x) {
    return O::max_s(HIGH::template encode<O>(x), LOW::template encode<O>(x));
  }
  // Bits of the float that a code stands for; not for code 0.
  template <typename O>
  TS_HOST_DEVICE static inline typename O::I bits(typename O::I code) {
    return O::min_u(HIGH::template decode<O>(code), LOW::template decode<O>(code));
  }
};

using RootCode = Code<Segment<18, 127, 255>, Segment<19, 123, 127>>;
using RatioCode = Code<Segment<18, 127, 127>, Segment<20, 124, 31>>;

template <typename O>
TS_HOST_DEVICE static inline typename O::I magnitude(typename O::V x) {
  return O::both(O::bits(x), O::seti(0x7FFFFFFFu));
}

// Largest finite values are kept, infinities and NaN as they are.
template <typename O>
TS_HOST_DEVICE static inline typename O::I round_random_bf16(typename O::V x,
                                                             typename O::I random) {
  const typename O::I size = magnitude<O>(x);
  const typename O::I top = O::max_u(size, O::seti(kInfBits - 1));
  const typename O::I sign = O::both(O::bits(x), O::seti(0x80000000u));
  return O::template shr<16>(O::either(sign, O::min_u(O::add(size, random), top)));
}

// What a block shares.
struct BlockScale {
  float scale;       // 0: every code is 0; NaN: something was not finite
  float inverse;     // of the roots' scale
  uint32_t present;  // 0: nothing is to be encoded
};

// From the bits of the largest root in a block, of its largest |m|, and its largest ratio.
TS_HOST_DEVICE static inline BlockScale root_scale(uint32_t largest, uint32_t largest_m,
                                                   uint32_t largest_ratio) {
  const bool huge =
      static_cast<int32_t>(largest_ratio) >= static_cast<int32_t>(kInfBits - kOneBits);
  if (largest >= kInfBits || largest_m >= kInfBits || huge)
    return BlockScale{bits_float(kNaNBits), 0.0f, 0};
  if (largest == 0) return BlockScale{0.0f, 0.0f, 0};
  const float scale = bits_float(largest);
  // The next float above, so that the largest root times it is never below 1.
  return BlockScale{scale, bits_float(float_bits(ScalarOps::div(1.0f, scale)) + 1), 1};
}

// From the largest ratio in a block.
TS_HOST_DEVICE static inline BlockScale ratio_scale(uint32_t largest, const BlockScale& root) {
  if (root.present == 0) return root;
  if (static_cast<int32_t>(largest) < kSmallestRatio) return BlockScale{0.0f, 0.0f, 0};
  return BlockScale{bits_float(largest + kOneBits), 0.0f, 1};
}

// sqrt(v) as it may be stored.
template <typename O>
TS_HOST_DEVICE static inline typename O::V storable_root(typename O::V root, float smallest) {
  return O::floats(O::where(magnitude<O>(root), O::bits(O::at_least(root, O::set(smallest)))));
}

template <typename O>
TS_HOST_DEVICE static inline typename O::I encode_root(typename O::V root, float inverse,
                                                       typename O::I random) {
  const typename O::I x = O::bits(O::at_most_one(O::mul(root, O::set(inverse))));
  const typename O::I code = O::max_s(RootCode::encode<O>(x), O::seti(1u << 16));
  return O::where(O::bits(root), O::template shr<16>(O::add(code, random)));
}

template <typename O>
TS_HOST_DEVICE static inline typename O::V decode_root(typename O::I code, float scale) {
  return O::mul(O::floats(O::where(code, RootCode::bits<O>(code))), O::set(scale));
}

// m, or 0 where s is.
template <typename O>
TS_HOST_DEVICE static inline typename O::V storable_moment(typename O::V m, typename O::V root) {
  return O::floats(O::where(O::bits(root), O::bits(m)));
}

// The bits of |m| / s less those of 1, as a signed number; far below all others where m is 0.
template <typename O>
TS_HOST_DEVICE static inline typename O::I ratio(typename O::V m, typename O::V root) {
  return O::minus(magnitude<O>(m), O::max_s(O::bits(root), O::seti(kSmallestBits)));
}

template <typename O>
TS_HOST_DEVICE static inline typename O::I encode_ratio(typename O::V m, typename O::I r,
                                                        float scale, typename O::I random) {
  const typename O::I offset = O::seti(2 * kOneBits - float_bits(scale));
  const typename O::I x = O::max_s(O::add(r, offset), O::seti(0));
  const typename O::I code = O::max_s(RatioCode::encode<O>(x), O::seti(0));
  const typename O::I sign = O::both(O::template shr<24>(O::bits(m)), O::seti(0x80u));
  return O::either(sign, O::template shr<16>(O::add(code, random)));
}

template <typename O>
TS_HOST_DEVICE static inline typename O::V decode_moment(typename O::I code, typename O::V root,
                                                         float scale) {
  const typename O::I size = O::both(code, O::seti(0x7Fu));
  const typename O::I sign = O::template shl<24>(O::both(code, O::seti(0x80u)));
  const typename O::I offset = O::add(O::bits(root), O::seti(float_bits(scale) - 2 * kOneBits));
  const typename O::I bits = O::add(RatioCode::bits<O>(size), offset);
  return O::floats(O::either(sign, O::where(size, bits)));
}

// 16 random bits for each element of a block. Element 16 k + lane takes bits 16 (k % 2) and up of
// word k / 2 of counter lane; key and counter are seed, tensor and element. The second half of the
// block has those of the first with the top bit of each flipped. From step to step each word goes
// round by the golden ratio, in both halves, so that it is uniform in every step, and over the
// steps spreads more evenly than chance: a change that is 1 % of a gap moves the code once in about
// 100 steps, which leaves a half to a quarter of the noise.
constexpr uint32_t kOtherHalf = 0x80008000u;
TS_HOST_DEVICE static inline uint32_t random_turn(uint32_t step) { return step * 0x9E379E37u; }
TS_HOST_DEVICE static inline uint64_t random_counter(int64_t block, int lane) {
  return static_cast<uint64_t>(block) * 16 + static_cast<uint64_t>(lane);
}

}  // namespace
}  // namespace ts::optim
