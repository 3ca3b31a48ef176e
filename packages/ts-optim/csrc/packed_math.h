// How moments are packed, the only copy: host (every instruction set) and CUDA compile this text.
//
// bf16: the 16 bits that are cut off decide with 16 random ones, so that the mean is exact.
//
// int8, in blocks of 256 elements, one byte for each moment:
//   s = sqrt(v)   8 bits: a small float without sign, relative to the largest s in the block
//   r = |m| / s   7 bits and the sign of m: a small float, relative to the largest r in the block
// where quotients and products are differences and sums of the bits of floats, which is close to
// them, cheaper, and undone exactly. The fp32 maxima are what a block shares. Decoded: v = s^2,
// m = r s with the s that was stored, so that rounding s leaves m / s alone. A code of s has 32
// values an octave for 4 octaves below the largest and 16 for 8 more, one of r has 32 for 3 octaves
// and 8 for 4 more; both hold 0 and the largest. s is rounded with 16 random bits, but never to 0
// unless it is 0; r is rounded to nearest, or with the same random bits where nearest would stop
// its decay; below its smallest value it is 0. m is 0 wherever s is, and |m| / s is never more than
// about what the step that wrote it found: a coordinate whose gradient stops cannot blow up.
//
// Packing what was unpacked gives the same bytes: the largest s and r are codes, so that the maxima
// are found again; sqrt(s^2) = s for correctly rounded operations; s stays above 2^-63, where s^2
// is exact to the last bit.
//
// Block-wise 8-bit states: Dettmers et al., arXiv:2110.02861; unbiased rounding: Gupta et al.,
// arXiv:1502.02551.
#pragma once

#include "adamw_math.h"

namespace ts::optim {
namespace {

constexpr uint32_t kNaNBits = 0x7FC00000u;
constexpr uint32_t kInfBits = 0x7F800000u;
constexpr uint32_t kOneBits = 127u << 23;
constexpr float kSmallestRoot = 2.168404344971009e-19f;  // 2^-62, of a step
constexpr float kLoadedRoot = 1.355252715606881e-19f;  // 1.25 * 2^-63: below all that a step leaves
// Ratios as signed differences of bits: below the first moments are 0, from the second on, 2^64,
// they are not finite; and what stands for none, so that no difference of two leaves 32 bits.
constexpr int32_t kSmallestRatio = -(40 << 23);
constexpr int32_t kInfiniteRatio = 64 << 23;
constexpr uint32_t kNoRatio = 0u - 0x60000000u;

// Codes with their fraction: 18 bits, of which rounding draws 16.
constexpr int kPoint = 18;

// A small float: codes up to TOP, which is the largest of the block. From BEND up a code is 2^18 of
// the bits of a float, 1/32 octave; below it is 2^WIDE times as much.
template <int TOP, int BEND, int WIDE>
struct Code {
  static constexpr uint32_t kBend = static_cast<uint32_t>(BEND) << kPoint;
  static constexpr uint32_t kHalf = kBend + (1u << (kPoint - 1));  // rounds to nearest

  // Bits of the float that code BEND, or the one that code 0 of the upper part would stand for.
  TS_HOST_DEVICE static inline uint32_t bend_of(uint32_t largest) {
    return largest - (static_cast<uint32_t>(TOP - BEND) << kPoint);
  }
  TS_HOST_DEVICE static inline uint32_t zero_of(uint32_t largest) {
    return largest - (static_cast<uint32_t>(TOP) << kPoint);
  }
  // The code less BEND of bits relative to bend_of. Steps get wider downwards: it is the larger of
  // what the two parts say, and a value is the smaller.
  template <typename O>
  TS_HOST_DEVICE static inline typename O::I encode(typename O::I x) {
    return O::max_s(x, O::template sar<WIDE>(x));
  }
  // Bits relative to zero_of; not for code 0.
  template <typename O>
  TS_HOST_DEVICE static inline typename O::I decode(typename O::I code) {
    constexpr uint32_t kLess = kBend * ((1u << WIDE) - 1);
    return O::min_s(O::template shl<kPoint>(code),
                    O::minus(O::template shl<kPoint + WIDE>(code), O::seti(kLess)));
  }
};

using RootCode = Code<255, 128, 1>;
using RatioCode = Code<127, 31, 2>;

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

// What a block shares: 0 where every code is 0, NaN where something was not finite.
struct BlockScales {
  float root, ratio;
  bool some_roots, some_ratios;  // whether there is anything to encode
};

// From the bits of the largest root in a block (unsigned, so that every NaN is larger than all
// else) and its largest ratio (signed).
TS_HOST_DEVICE static inline BlockScales block_scales(uint32_t root, uint32_t ratio) {
  if (root >= kInfBits || static_cast<int32_t>(ratio) >= kInfiniteRatio) {
    const float nan = bits_float(kNaNBits);
    return BlockScales{nan, nan, false, false};
  }
  if (root == 0) return BlockScales{0.0f, 0.0f, false, false};
  const bool some = static_cast<int32_t>(ratio) >= kSmallestRatio;
  return BlockScales{bits_float(root), some ? bits_float(ratio + kOneBits) : 0.0f, true, some};
}

// The constants of a block in encode_root and encode_ratio, and in their inverses.
struct Coding {
  uint32_t root, ratio;
  uint32_t nothing;  // bits of a root whose code is 0
};

TS_HOST_DEVICE static inline Coding encoding(const BlockScales& s) {
  return Coding{RootCode::bend_of(float_bits(s.root)),
                RatioCode::bend_of(float_bits(s.ratio) - kOneBits), 0};
}

TS_HOST_DEVICE static inline Coding decoding(float root_scale, float ratio_scale) {
  const uint32_t root = float_bits(root_scale);
  return Coding{RootCode::zero_of(root), RatioCode::zero_of(float_bits(ratio_scale) - kOneBits),
                root > kInfBits ? root : 0u};
}

// sqrt(v) as it may be stored, and the bits of |m| / s less those of 1, as a signed number.
template <typename O>
TS_HOST_DEVICE static inline typename O::I storable(typename O::V m, typename O::V& root,
                                                    float smallest) {
  const typename O::Zeros none = O::zeros(root);
  root = O::at_least(root, O::set(smallest), none);
  return O::keep(none, O::minus(magnitude<O>(m), O::bits(root)), O::seti(kNoRatio));
}

// What encode_root adds to a code, from 16 random bits, and encode_ratio, from that.
template <typename O>
TS_HOST_DEVICE static inline typename O::I root_rounding(typename O::I random) {
  return O::either(O::template shl<kPoint - 16>(random), O::seti(RootCode::kBend));
}

template <typename O>
TS_HOST_DEVICE static inline typename O::I ratio_rounding(typename O::I rounding, uint32_t random,
                                                          uint32_t fixed) {
  return O::either(O::both(rounding, O::seti(random)), O::seti(fixed));
}

template <typename O>
TS_HOST_DEVICE static inline typename O::I encode_root(typename O::V root, const Coding& c,
                                                       typename O::I rounding) {
  const typename O::I x = O::minus(O::bits(root), O::seti(c.root));
  const typename O::I code = O::add(RootCode::encode<O>(x), rounding);
  return O::keep(O::zeros(root), O::template shr<kPoint>(O::max_s(code, O::seti(1u << kPoint))));
}

template <typename O>
TS_HOST_DEVICE static inline typename O::V decode_root(typename O::I code, const Coding& c) {
  const typename O::I bits = O::add(RootCode::decode<O>(code), O::seti(c.root));
  return O::floats(O::keep(O::zeros(code, O::seti(0xFFu)), bits, O::seti(c.nothing)));
}

template <typename O>
TS_HOST_DEVICE static inline typename O::I encode_ratio(typename O::V m, typename O::I ratio,
                                                        const Coding& c, typename O::I rounding) {
  const typename O::I x = O::minus(ratio, O::seti(c.ratio));
  const typename O::I code = O::max_s(O::add(RatioCode::encode<O>(x), rounding), O::seti(0));
  const typename O::I sign = O::both(O::template shr<24>(O::bits(m)), O::seti(0x80u));
  return O::either(sign, O::template shr<kPoint>(code));
}

template <typename O>
TS_HOST_DEVICE static inline typename O::V decode_moment(typename O::I code, typename O::V root,
                                                         const Coding& c) {
  const typename O::I size = O::both(code, O::seti(0x7Fu));
  const typename O::I base = O::add(O::bits(root), O::seti(c.ratio));
  const typename O::I bits = O::add(RatioCode::decode<O>(size), base);
  const typename O::I sign = O::both(code, O::seti(0x80000000u));
  return O::floats(O::either(sign, O::keep(O::zeros(code, O::seti(0x7Fu)), bits)));
}

// 16 random bits for each element. 512 elements share 16 counters: element 16 k + lane takes the
// low 16 bits of word k / 8 of counter lane, turned right by k % 4 bytes, with the top bit flipped
// where k % 8 is 4 or more; key and counter are seed, tensor and element. From step to step each
// byte of a word, and with it each turned word, goes round by 0.38, near the golden section: so
// that it is uniform in every step, and over the steps spreads more evenly than chance: a change
// that is 1 % of a gap moves the code once in about 100 steps, which leaves a half to a quarter of
// the noise.
constexpr uint32_t kOtherHalf = 0x8000u;
TS_HOST_DEVICE static inline uint32_t random_turn(uint32_t step) { return step * 0x61616161u; }
// For the two blocks 2 pair and 2 pair + 1; words 0 and 1 are the first one's.
TS_HOST_DEVICE static inline uint64_t random_counter(int64_t pair, int lane) {
  return static_cast<uint64_t>(pair) * 16 + static_cast<uint64_t>(lane);
}

}  // namespace
}  // namespace ts::optim
