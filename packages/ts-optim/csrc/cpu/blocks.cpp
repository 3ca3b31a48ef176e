// AdamW in blocks of 256 elements: packed moments, moving average of the weights, measured steps.
#include "cpu/sum_lanes.h"
#include "packed_math.h"
#include "ts/philox.h"
#include "ts/thread_pool.h"

namespace ts::optim::TS_ISA {

// 16,384 elements a piece of work.
constexpr int64_t kGrainBlocks = 64;

#if defined(TS_ISA_portable)

static void fill_random(const BlockItem& t, int64_t block, uint16_t* out) {
  for (int i = 0; i < 16; ++i) {
    const Philox p = philox4x32(t.seed, random_counter(block, i), t.number);
    for (int k = 0; k < 8; ++k) {
      const uint32_t word = p.out[k / 2] + t.turn;
      out[16 * k + i] = static_cast<uint16_t>(word >> (16 * (k % 2)));
      out[16 * k + i + 128] = static_cast<uint16_t>((word ^ kOtherHalf) >> (16 * (k % 2)));
    }
  }
}

#else

// ts::philox4x32 on Ops::kWidth counters.
static inline void philox_lanes(uint64_t seed, uint64_t low, uint64_t high, Ops::I* c) {
  c[0] = Ops::add(Ops::seti(static_cast<uint32_t>(low)), Ops::first_lanes());
  c[1] = Ops::seti(static_cast<uint32_t>(low >> 32));
  c[2] = Ops::seti(static_cast<uint32_t>(high));
  c[3] = Ops::seti(static_cast<uint32_t>(high >> 32));
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  const Ops::I m0 = Ops::seti(0xD2511F53u), m1 = Ops::seti(0xCD9E8D57u);
  for (int round = 0; round < 10; ++round) {
    Ops::I low0, low1;
    const Ops::I high0 = Ops::multiply(c[0], m0, &low0), high1 = Ops::multiply(c[2], m1, &low1);
    c[0] = Ops::exclusive(Ops::exclusive(high1, c[1]), Ops::seti(k0));
    c[2] = Ops::exclusive(Ops::exclusive(high0, c[3]), Ops::seti(k1));
    c[1] = low1;
    c[3] = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
}

static void fill_random(const BlockItem& t, int64_t block, uint16_t* out) {
  for (int i = 0; i < 16; i += Ops::kWidth) {
    Ops::I c[4];
    philox_lanes(t.seed, random_counter(block, i), t.number, c);
    for (int w = 0; w < 4; ++w) {
      const Ops::I word = Ops::add(c[w], Ops::seti(t.turn));
      const Ops::I other = Ops::exclusive(word, Ops::seti(kOtherHalf));
      uint16_t* to = out + 32 * w + i;
      Ops::store16(to, Ops::both(word, Ops::seti(0xFFFFu)));
      Ops::store16(to + 16, Ops::shr<16>(word));
      Ops::store16(to + 128, Ops::both(other, Ops::seti(0xFFFFu)));
      Ops::store16(to + 144, Ops::shr<16>(other));
    }
  }
}

#endif

struct alignas(64) Scratch {
  float m[kBlock];
  float root[kBlock];
  float ratio[kBlock];  // bits of signed numbers
  float moved[kBlock];  // new weights less old ones
  uint16_t random[kBlock];
};

// Largest of 32-bit words.
template <typename O>
struct Largest {
  typename O::I lanes = O::seti(kNoRatio);
  inline void take(typename O::I x) { lanes = O::max_s(lanes, x); }
};

static inline uint32_t largest_of(const Largest<Ops>& wide, const Largest<ScalarOps>& one) {
  alignas(64) float lanes[Ops::kWidth];
  Ops::store(lanes, Ops::floats(wide.lanes));
  uint32_t most = one.lanes;
  for (float x : lanes) most = ScalarOps::max_s(most, float_bits(x));
  return most;
}

// Calls f.template at<Ops>(i) and, for the rest, f.template at<ScalarOps>(i).
template <typename F>
static inline void for_elements(int64_t n, F&& f) {
  int64_t i = 0;
  for (; i + Ops::kWidth <= n; i += Ops::kWidth) f.template at<Ops>(i);
  for (; i < n; ++i) f.template at<ScalarOps>(i);
}

template <typename O>
struct Choose;
template <>
struct Choose<Ops> {
  template <typename T, typename S>
  static inline T& from(T& wide, S&) {
    return wide;
  }
};
#if !defined(TS_ISA_portable)
template <>
struct Choose<ScalarOps> {
  template <typename T, typename S>
  static inline S& from(T&, S& one) {
    return one;
  }
};
#endif

// What int8 needs of a block before it can be packed.
struct Found {
  Scratch& x;
  Largest<Ops> wide_m{}, wide_root{}, wide_ratio{};
  Largest<ScalarOps> one_m{}, one_root{}, one_ratio{};
  template <typename O>
  inline void take(int64_t k, typename O::V m, typename O::V root) {
    const typename O::V kept = storable_moment<O>(m, root);
    const typename O::I r = ratio<O>(kept, root);
    O::store(x.m + k, kept);
    O::store(x.root + k, root);
    O::store(x.ratio + k, O::floats(r));
    Choose<O>::from(wide_m, one_m).take(magnitude<O>(kept));
    Choose<O>::from(wide_root, one_root).take(magnitude<O>(root));
    Choose<O>::from(wide_ratio, one_ratio).take(r);
  }
};

// Second pass of int8.
struct Encode {
  const Scratch& x;
  uint8_t *m, *v;
  float m_scale, v_inverse;
  uint32_t random, half;
  template <typename O>
  inline void at(int64_t i) {
    const typename O::I bits = O::load16(x.random + i);
    O::store8(v + i, encode_root<O>(O::load(x.root + i), v_inverse, bits));
    const typename O::I chosen = O::either(O::both(bits, O::seti(random)), O::seti(half));
    const typename O::I r = O::bits(O::load(x.ratio + i));
    O::store8(m + i, encode_ratio<O>(O::load(x.m + i), r, m_scale, chosen));
  }
};

static inline void encode_block(const Found& found, int64_t n, uint8_t* m, uint8_t* v,
                                float* m_scale, float* v_scale, uint32_t random, uint32_t half) {
  const uint32_t largest = largest_of(found.wide_ratio, found.one_ratio);
  const BlockScale root = root_scale(largest_of(found.wide_root, found.one_root),
                                     largest_of(found.wide_m, found.one_m), largest);
  const BlockScale ratio = ratio_scale(largest, root);
  *v_scale = root.scale;
  *m_scale = ratio.scale;
  Encode encode{found.x, m, v, ratio.scale, root.inverse, random, half};
  if (root.present) for_elements(n, encode);
  if (!root.present) memset(v, 0, static_cast<size_t>(n));
  if (!ratio.present) memset(m, 0, static_cast<size_t>(n));
}

template <typename O>
static inline typename O::V widen_or_load(const void* base, int64_t i, Moments moments) {
  if (moments == Moments::kF32) return O::load(static_cast<const float*>(base) + i);
  return O::widen_bf16(O::load16(static_cast<const uint16_t*>(base) + i));
}

// First step: the update; moments that are not packed in blocks are stored.
template <Kind G, Kind L, Moments M>
struct Update {
  const BlockItem& t;
  Scratch& x;
  int64_t begin;
  float m_scale, v_scale;
  Spread<Ops> wide_terms;
  Spread<ScalarOps> one_terms;
  Found found{x};

  template <typename O>
  inline void at(int64_t k) {
    using V = typename O::V;
    const int64_t i = begin + k;
    V p = load_weight<O, L>(t, i);
    const V before = p;
    const V g = load_as_float<O, G>(t.grad, i);
    V m, v;
    if constexpr (M == Moments::kInt8) {
      const V root = decode_root<O>(O::load8(static_cast<const uint8_t*>(t.v) + i), v_scale);
      m = decode_moment<O>(O::load8(static_cast<const uint8_t*>(t.m) + i), root, m_scale);
      v = O::mul(root, root);
    } else {
      m = widen_or_load<O>(t.m, i, M);
      v = widen_or_load<O>(t.v, i, M);
    }
    const V root = adamw_element<O>(p, g, m, v, Choose<O>::from(wide_terms, one_terms));
    O::store(t.param + i, p);
    if constexpr (L != Kind::kNone) O::store16(low_at<L>(t, i), round_low<O, L>(p));
    if constexpr (M == Moments::kF32) {
      O::store(static_cast<float*>(t.m) + i, m);
      O::store(static_cast<float*>(t.v) + i, v);
    } else if constexpr (M == Moments::kBF16) {
      const typename O::I random = O::load16(x.random + k);
      O::store16(static_cast<uint16_t*>(t.m) + i, round_random_bf16<O>(m, random));
      O::store16(static_cast<uint16_t*>(t.v) + i, round_random_bf16<O>(v, random));
    } else {
      found.template take<O>(k, m, storable_root<O>(root, kSmallestRoot));
    }
    if (t.ema != nullptr) {
      const V e = O::load(t.ema + i);
      O::store(t.ema + i, O::fma(O::set(t.ema_weight), O::sub(p, e), e));
    }
    if (t.sums != nullptr) O::store(x.moved + k, O::sub(p, before));
  }
};

template <Moments M>
struct Blocks {
  const BlockItem& t;
  int64_t begin, end;
  template <Kind G, Kind L>
  inline void run() const {
    Scratch x;
    const Spread<Ops> wide = spread<Ops>(t.scalars);
    const Spread<ScalarOps> one = spread<ScalarOps>(t.scalars);
    for (int64_t b = begin; b < end; ++b) {
      const int64_t first = b * kBlock;
      const int64_t n = t.numel - first < kBlock ? t.numel - first : kBlock;
      constexpr bool kPacked = M == Moments::kInt8;
      if (M != Moments::kF32) fill_random(t, b, x.random);
      // The gradient may be the memory of the 16-bit weights.
      if (t.sums != nullptr) t.sums[b] = chunk_sum<G>(t.grad, first, first + n);
      Update<G, L, M> update{
          t, x, first, kPacked ? t.m_scale[b] : 0.0f, kPacked ? t.v_scale[b] : 0.0f, wide, one};
      for_elements(n, update);
      if constexpr (kPacked)
        encode_block(update.found, n, static_cast<uint8_t*>(t.m) + first,
                     static_cast<uint8_t*>(t.v) + first, t.m_scale + b, t.v_scale + b, t.m_random,
                     t.m_half);
      if (t.sums != nullptr) {
        t.sums[t.sum_stride + b] = chunk_sum<Kind::kF32>(x.moved, 0, n);
        t.sums[2 * t.sum_stride + b] = chunk_sum<Kind::kF32>(t.param, first, first + n);
      }
    }
  }
};

template <Moments M>
static void run_blocks(const BlockItem* items, const int64_t* begins, int64_t count, int threads) {
  parallel_for(begins[count], kGrainBlocks, threads, [&](int64_t b, int64_t e) {
    const FloatMode mode;
    for (int64_t i = find_item(begins, count, b); b < e; ++i) {
      const int64_t stop = e < begins[i + 1] ? e : begins[i + 1];
      dispatch_kinds(items[i].grad_kind, items[i].low_kind,
                     Blocks<M>{items[i], b - begins[i], stop - begins[i]});
      b = stop;
    }
  });
}

void adamw_blocks(const BlockItem* items, const int64_t* begins, int64_t count, Moments moments,
                  int threads) {
  if (moments == Moments::kF32)
    run_blocks<Moments::kF32>(items, begins, count, threads);
  else if (moments == Moments::kBF16)
    run_blocks<Moments::kBF16>(items, begins, count, threads);
  else
    run_blocks<Moments::kInt8>(items, begins, count, threads);
}

struct TakeMoments {
  const PackItem& t;
  Scratch& x;
  int64_t begin;
  Found found{x};
  template <typename O>
  inline void at(int64_t k) {
    const typename O::V root = storable_root<O>(O::sqrt(O::load(t.v + begin + k)), kLoadedRoot);
    found.template take<O>(k, O::load(t.m + begin + k), root);
  }
};

struct GiveMoments {
  const PackItem& t;
  int64_t begin;
  float m_scale, v_scale;
  template <typename O>
  inline void at(int64_t k) {
    const int64_t i = begin + k;
    const typename O::V root = decode_root<O>(O::load8(t.v_code + i), v_scale);
    O::store(t.m + i, decode_moment<O>(O::load8(t.m_code + i), root, m_scale));
    O::store(t.v + i, O::mul(root, root));
  }
};

// Calls body(block, begin, length).
template <typename F>
static void for_blocks(int64_t numel, int threads, F&& body) {
  parallel_for((numel + kBlock - 1) / kBlock, kGrainBlocks, threads, [&](int64_t b, int64_t e) {
    const FloatMode mode;
    for (; b < e; ++b) {
      const int64_t first = b * kBlock;
      body(b, first, numel - first < kBlock ? numel - first : kBlock);
    }
  });
}

void pack_moments(const PackItem& t, int threads) {
  for_blocks(t.numel, threads, [&](int64_t b, int64_t first, int64_t n) {
    Scratch x;
    for (uint16_t& bits : x.random) bits = kNearest;
    TakeMoments take{t, x, first};
    for_elements(n, take);
    encode_block(take.found, n, t.m_code + first, t.v_code + first, t.m_scale + b, t.v_scale + b, 0,
                 kNearest);
  });
}

void unpack_moments(const PackItem& t, int threads) {
  for_blocks(t.numel, threads, [&](int64_t b, int64_t first, int64_t n) {
    GiveMoments give{t, first, t.m_scale[b], t.v_scale[b]};
    for_elements(n, give);
  });
}

}  // namespace ts::optim::TS_ISA
