// AdamW in blocks of 256 elements: packed moments, moving average of the weights, measured steps.
#include "cpu/sum_lanes.h"
#include "packed_math.h"
#include "ts/philox.h"
#include "ts/thread_pool.h"

namespace ts::optim::TS_ISA {

// 16,384 elements a piece of work.
constexpr int64_t kGrainBlocks = 64;

struct alignas(64) Scratch {
  float m[kBlock];
  float root[kBlock];
  float ratio[kBlock];         // bits of signed numbers
  float weights[kBlock];       // old ones, where they are not those of the item
  float moved[kBlock];         // new weights less old ones
  float rounding[2 * kBlock];  // bits: what rounding adds, for two blocks
};

// Puts what rounding adds from one of the four turns of a random word, and 64 elements on from that
// with the top bit flipped.
template <typename O, Moments M, int TURN>
static inline void put_rounding(float* to, typename O::I word) {
  constexpr int kUp = M == Moments::kInt8 ? kPoint - 16 : 0;
  typename O::I x;
  if constexpr (8 * TURN + 16 > 32)
    x = O::either(O::template shl<32 - 8 * TURN + kUp>(word),
                  O::template shr<8 * TURN - kUp>(word));
  else if constexpr (8 * TURN > kUp)
    x = O::template shr<8 * TURN - kUp>(word);
  else
    x = O::template shl<kUp - 8 * TURN>(word);
  x = O::both(x, O::seti(0xFFFFu << kUp));
  if constexpr (M == Moments::kInt8) x = O::either(x, O::seti(RootCode::kBend));
  O::store(to + 16 * TURN, O::floats(x));
  O::store(to + 16 * TURN + 64, O::floats(O::exclusive(x, O::seti(kOtherHalf << kUp))));
}

#if defined(TS_ISA_portable)

static inline void philox_lanes(uint64_t seed, uint64_t low, uint64_t high, Ops::I* c) {
  const Philox p = philox4x32(seed, low, high);
  memcpy(c, p.out, sizeof(p.out));
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

#endif

template <Moments M>
static void draw(const BlockItem& t, int64_t pair, Scratch& x) {
  for (int lane = 0; lane < 16; lane += Ops::kWidth) {
    Ops::I c[4];
    philox_lanes(t.seed, random_counter(pair, lane), t.number, c);
    for (int w = 0; w < 4; ++w) {
      const Ops::I word = Ops::add(c[w], Ops::seti(t.turn));
      float* to = x.rounding + 128 * w + lane;
      put_rounding<Ops, M, 0>(to, word);
      put_rounding<Ops, M, 1>(to, word);
      put_rounding<Ops, M, 2>(to, word);
      put_rounding<Ops, M, 3>(to, word);
    }
  }
}

// Calls f.template group<Ops>(i) for KTogether vectors, f.template at<Ops>(i) and, for the rest,
// f.template at<ScalarOps>(i).
template <int KTogether, typename F>
static inline void for_elements(int64_t n, F&& f) {
  int64_t i = 0;
  for (; i + KTogether * Ops::kWidth <= n; i += KTogether * Ops::kWidth) f.template group<Ops>(i);
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
  Ops::I root = Ops::seti(0), ratio = Ops::seti(kNoRatio);
  uint32_t one_root = 0, one_ratio = kNoRatio;
  template <typename O>
  TS_ALWAYS_INLINE void take(int64_t k, typename O::V m, typename O::V s, float smallest) {
    const typename O::I r = storable<O>(m, s, smallest);
    O::store(x.m + k, m);
    O::store(x.root + k, s);
    O::store(x.ratio + k, O::floats(r));
    auto& most_root = Choose<O>::from(root, one_root);
    auto& most_ratio = Choose<O>::from(ratio, one_ratio);
    most_root = O::max_u(most_root, O::bits(s));
    most_ratio = O::max_s(most_ratio, r);
  }
  inline BlockScales scales() const {
    return block_scales(ScalarOps::max_u(Ops::largest_u(root), one_root),
                        ScalarOps::max_s(Ops::largest_s(ratio), one_ratio));
  }
};

// Second pass of int8.
struct Encode {
  const Scratch& x;
  const float* roundings;
  uint8_t *m, *v;
  Coding coding;
  uint32_t random, fixed;
  template <typename O>
  TS_ALWAYS_INLINE typename O::I root(int64_t i) const {
    return encode_root<O>(O::load(x.root + i), coding, O::bits(O::load(roundings + i)));
  }
  template <typename O>
  TS_ALWAYS_INLINE typename O::I moment(int64_t i) const {
    const typename O::I rounding =
        ratio_rounding<O>(O::bits(O::load(roundings + i)), random, fixed);
    return encode_ratio<O>(O::load(x.m + i), O::bits(O::load(x.ratio + i)), coding, rounding);
  }
  template <typename O>
  TS_ALWAYS_INLINE void at(int64_t i) const {
    O::store8(v + i, root<O>(i));
    O::store8(m + i, moment<O>(i));
  }
  template <typename O>
  TS_ALWAYS_INLINE void group(int64_t i) const {
    constexpr int W = O::kWidth;
    O::store8(v + i, root<O>(i), root<O>(i + W), root<O>(i + 2 * W), root<O>(i + 3 * W));
    O::store8(m + i, moment<O>(i), moment<O>(i + W), moment<O>(i + 2 * W), moment<O>(i + 3 * W));
  }
};

static inline void encode_block(const Found& found, const float* rounding, int64_t n, uint8_t* m,
                                uint8_t* v, float* m_scale, float* v_scale, uint32_t random,
                                uint32_t fixed) {
  const BlockScales scales = found.scales();
  *v_scale = scales.root;
  *m_scale = scales.ratio;
  if (scales.some_roots)
    for_elements<4>(n, Encode{found.x, rounding, m, v, encoding(scales), random, fixed});
  else
    memset(v, 0, static_cast<size_t>(n));
  if (!scales.some_ratios) memset(m, 0, static_cast<size_t>(n));
}

template <typename O>
static inline typename O::V widen_or_load(const void* base, int64_t i, Moments moments) {
  if (moments == Moments::kF32) return O::load(static_cast<const float*>(base) + i);
  return O::widen_bf16(O::load16(static_cast<const uint16_t*>(base) + i));
}

// Weights that were edited in their 16-bit copy.
template <Kind L>
struct Reconcile {
  const BlockItem& t;
  Scratch& x;
  int64_t begin;
  template <typename O>
  TS_ALWAYS_INLINE void at(int64_t k) const {
    O::store(x.weights + k, load_weight<O, L>(t, begin + k));
  }
  template <typename O>
  TS_ALWAYS_INLINE void group(int64_t k) const {
    at<O>(k);
  }
};

// The 16-bit copy.
template <Kind L>
struct Narrow {
  const float* from;
  uint16_t* to;
  template <typename O>
  TS_ALWAYS_INLINE void at(int64_t k) const {
    O::store16(to + k, round_low<O, L>(O::load(from + k)));
  }
  template <typename O>
  TS_ALWAYS_INLINE void group(int64_t k) const {
    O::store16(to + k, round_low<O, L>(O::load(from + k)),
               round_low<O, L>(O::load(from + k + O::kWidth)));
  }
};

// The moments of an updated element, or of a vector of them.
template <typename O>
struct Updated {
  typename O::V m, v;
};

// First pass: the update; moments that are not packed in blocks are stored.
template <Kind G, Moments M>
struct Update {
  const BlockItem& t;
  Scratch& x;
  int64_t begin;
  const float *weights, *rounding;  // of this block
  Coding coding;
  Spread<Ops> wide_terms;
  Spread<ScalarOps> one_terms;
  Found found{x};

  template <typename O>
  TS_ALWAYS_INLINE void prefetch_next(int64_t i) const {
    constexpr int kBytes = M == Moments::kF32 ? 4 : M == Moments::kBF16 ? 2 : 1;
    prefetch<O, 4>(t.param, i, kBlock);
    prefetch<O, G == Kind::kF32 ? 4 : 2>(t.grad, i, kBlock);
    prefetch<O, kBytes>(t.m, i, kBlock);
    prefetch<O, kBytes>(t.v, i, kBlock);
  }

  template <typename O>
  TS_ALWAYS_INLINE Updated<O> update(int64_t k) {
    using V = typename O::V;
    const int64_t i = begin + k;
    prefetch_next<O>(i);
    V p = O::load(weights + k);
    const V before = p;
    const V g = load_as_float<O, G>(t.grad, i);
    V m, v;
    if constexpr (M == Moments::kInt8) {
      const V root = decode_root<O>(O::load8(static_cast<const uint8_t*>(t.v) + i), coding);
      m = decode_moment<O>(O::load8s(static_cast<const uint8_t*>(t.m) + i), root, coding);
      v = O::mul(root, root);
    } else {
      m = widen_or_load<O>(t.m, i, M);
      v = widen_or_load<O>(t.v, i, M);
    }
    const V root = adamw_element<O>(p, g, m, v, Choose<O>::from(wide_terms, one_terms));
    O::store(t.param + i, p);
    if constexpr (M == Moments::kF32) {
      O::store(static_cast<float*>(t.m) + i, m);
      O::store(static_cast<float*>(t.v) + i, v);
    } else if constexpr (M == Moments::kInt8) {
      found.template take<O>(k, m, root, kSmallestRoot);
    }
    if (t.ema != nullptr) {
      const V e = O::load(t.ema + i);
      O::store(t.ema + i, O::fma(O::set(t.ema_weight), O::sub(p, e), e));
    }
    if (t.sums != nullptr) O::store(x.moved + k, O::sub(p, before));
    return Updated<O>{m, v};
  }

  template <typename O>
  TS_ALWAYS_INLINE typename O::I packed(int64_t k, typename O::V value) const {
    return round_random_bf16<O>(value, O::bits(O::load(rounding + k)));
  }

  template <typename O>
  TS_ALWAYS_INLINE void at(int64_t k) {
    const Updated<O> a = update<O>(k);
    if constexpr (M == Moments::kBF16) {
      O::store16(static_cast<uint16_t*>(t.m) + begin + k, packed<O>(k, a.m));
      O::store16(static_cast<uint16_t*>(t.v) + begin + k, packed<O>(k, a.v));
    }
  }

  template <typename O>
  TS_ALWAYS_INLINE void group(int64_t k) {
    const int64_t j = k + O::kWidth;
    const Updated<O> a = update<O>(k), b = update<O>(j);
    if constexpr (M == Moments::kBF16) {
      O::store16(static_cast<uint16_t*>(t.m) + begin + k, packed<O>(k, a.m), packed<O>(j, b.m));
      O::store16(static_cast<uint16_t*>(t.v) + begin + k, packed<O>(k, a.v), packed<O>(j, b.v));
    }
  }
};

// One block, the 16-bit copy apart.
template <Kind G, Moments M>
static void update_block(const BlockItem& t, int64_t b, int64_t n, const float* weights,
                         Scratch& x) {
  const int64_t first = b * kBlock;
  constexpr bool kPacked = M == Moments::kInt8;
  const float* rounding = x.rounding + b % 2 * kBlock;
  const Coding coding = kPacked ? decoding(t.v_scale[b], t.m_scale[b]) : Coding{};
  Update<G, M> update{
      t, x, first, weights, rounding, coding, spread<Ops>(t.scalars), spread<ScalarOps>(t.scalars)};
  for_elements<2>(n, update);
  if constexpr (kPacked)
    encode_block(update.found, rounding, n, static_cast<uint8_t*>(t.m) + first,
                 static_cast<uint8_t*>(t.v) + first, t.m_scale + b, t.v_scale + b, t.m_random,
                 t.m_fixed);
}

template <Moments M>
struct Blocks {
  const BlockItem& t;
  int64_t begin, end;
  template <Kind G, Kind L>
  inline void run() const {
    Scratch x;
    for (int64_t b = begin; b < end; ++b) {
      const int64_t first = b * kBlock;
      const int64_t n = t.numel - first < kBlock ? t.numel - first : kBlock;
      if constexpr (M != Moments::kF32)
        if (b == begin || b % 2 == 0) draw<M>(t, b / 2, x);
      // The gradient may be the memory of the 16-bit weights.
      if (t.sums != nullptr) t.sums[b] = chunk_sum<G>(t.grad, first, first + n);
      const bool edited = L != Kind::kNone && t.reconcile;
      if (edited) for_elements<1>(n, Reconcile<L>{t, x, first});
      update_block<G, M>(t, b, n, edited ? x.weights : t.param + first, x);
      if constexpr (L != Kind::kNone)
        for_elements<2>(n, Narrow<L>{t.param + first, low_at<L>(t, first)});
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
  TS_ALWAYS_INLINE void at(int64_t k) {
    const typename O::V root = O::sqrt(O::load(t.v + begin + k));
    found.template take<O>(k, O::load(t.m + begin + k), root, kLoadedRoot);
  }
  template <typename O>
  TS_ALWAYS_INLINE void group(int64_t k) {
    at<O>(k);
  }
};

struct GiveMoments {
  const PackItem& t;
  int64_t begin;
  Coding coding;
  template <typename O>
  TS_ALWAYS_INLINE void at(int64_t k) const {
    const int64_t i = begin + k;
    const typename O::V root = decode_root<O>(O::load8(t.v_code + i), coding);
    O::store(t.m + i, decode_moment<O>(O::load8s(t.m_code + i), root, coding));
    O::store(t.v + i, O::mul(root, root));
  }
  template <typename O>
  TS_ALWAYS_INLINE void group(int64_t k) const {
    at<O>(k);
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
    for (float& bits : x.rounding) bits = bits_float(RootCode::kHalf);
    TakeMoments take{t, x, first};
    for_elements<1>(n, take);
    encode_block(take.found, x.rounding, n, t.m_code + first, t.v_code + first, t.m_scale + b,
                 t.v_scale + b, 0, RatioCode::kHalf);
  });
}

void unpack_moments(const PackItem& t, int threads) {
  for_blocks(t.numel, threads, [&](int64_t b, int64_t first, int64_t n) {
    for_elements<1>(n, GiveMoments{t, first, decoding(t.v_scale[b], t.m_scale[b])});
  });
}

}  // namespace ts::optim::TS_ISA
