// AdamW, sums of squares and bf16 forms of tensors on the device: many tensors a launch, the table
// of pointers travels in the kernel's parameter space. Same text and summation tree as the CPU.
#include "cuda/wide.h"
#include "ts/cuda.h"

namespace ts::optim {
namespace {

constexpr int kThreads = 256;
constexpr int kPerThread = 8;
constexpr int64_t kPerBlock = kThreads * kPerThread;
// 4 KiB of parameters are available on every architecture and driver.
constexpr int kAdamWTable = 40;
constexpr int kSumTable = 120;
constexpr int64_t kMaxBlocks = int64_t{1} << 30;

struct AdamWTable {
  AdamWItem items[kAdamWTable];
  int block_begins[kAdamWTable + 1];
  int count;
};
static_assert(sizeof(AdamWTable) <= 4096, "kernel parameters");

struct SumTable {
  GradItem items[kSumTable];
  int chunk_begins[kSumTable + 1];
  int count;
  double* partials;
};
static_assert(sizeof(SumTable) <= 4096, "kernel parameters");

struct NarrowTable {
  NarrowItem items[kSumTable];
  int chunk_begins[kSumTable + 1];
  int count;
  double* partials;
  uint8_t* lost;
};
static_assert(sizeof(NarrowTable) <= 4096, "kernel parameters");

struct FoldTable {
  int64_t begins[kSumTable + 1];
  const double* partials;
  double* out;
};

template <Kind G, Kind L>
__device__ inline void adamw8(const AdamWItem& t, int64_t i, const Spread<ScalarOps>& s) {
  float p[8], g[8], m[8], v[8];
  load8<Kind::kF32>(t.param, i, p);
  load8<G>(t.grad, i, g);
  load8<Kind::kF32>(t.exp_avg, i, m);
  load8<Kind::kF32>(t.exp_avg_sq, i, v);
  if constexpr (L != Kind::kNone) {
    if (t.reconcile) {
      const Words w = *reinterpret_cast<const Words*>(static_cast<uint16_t*>(t.low) + i);
      for (int k = 0; k < 8; ++k) {
        const uint32_t now = k % 2 ? w.word[k / 2] >> 16 : w.word[k / 2] & 0xFFFFu;
        p[k] = reconciled<ScalarOps, L>(p[k], now);
      }
    }
  }
  for (int k = 0; k < 8; ++k) adamw_element<ScalarOps>(p[k], g[k], m[k], v[k], s);
  store8(t.param, i, p);
  store8(t.exp_avg, i, m);
  store8(t.exp_avg_sq, i, v);
  if constexpr (L != Kind::kNone) adamw_low8<L>(t, i, p);
}

struct BlockRange {
  const AdamWItem& item;
  int64_t begin;
  template <Kind G, Kind L>
  __device__ inline void run() const {
    const Spread<ScalarOps> s = spread<ScalarOps>(item.scalars);
    const int64_t i = begin + threadIdx.x * kPerThread;
    const bool wide = aligned(item.param, 16) && aligned(item.exp_avg, 16) &&
                      aligned(item.exp_avg_sq, 16) && aligned(item.grad, 16) &&
                      aligned(item.low, 16);
    if (wide && i + kPerThread <= item.numel) {
      adamw8<G, L>(item, i, s);
      return;
    }
    for (int64_t j = i; j < i + kPerThread && j < item.numel; ++j)
      adamw_at<ScalarOps, G, L>(item, j, s);
  }
};

__global__ void __launch_bounds__(kThreads) adamw_kernel(const __grid_constant__ AdamWTable table) {
  const int which = find_item(table.block_begins, table.count, static_cast<int>(blockIdx.x));
  const AdamWItem& item = table.items[which];
  const int64_t block = static_cast<int>(blockIdx.x) - table.block_begins[which];
  dispatch_kinds(item.grad_kind, item.low_kind, BlockRange{item, block * kPerBlock});
}

// One warp per piece of kSumChunk elements, one lane per lane of the tree.
template <Kind K>
__device__ inline double piece_sum(const GradItem& t, int64_t begin, int64_t end, int lane) {
  double sum = 0.0;
#pragma unroll 8
  for (int64_t i = begin + lane; i < end; i += kSumLanes) {
    const double x = load_as_float<ScalarOps, K>(t.grad, i);
    sum = __fma_rn(x, x, sum);
  }
  return sum;
}

__global__ void __launch_bounds__(kThreads) sumsq_kernel(const __grid_constant__ SumTable table) {
  const int lane = threadIdx.x % kSumLanes;
  const int turn = static_cast<int>(blockIdx.x) * (kThreads / kSumLanes) + threadIdx.x / kSumLanes;
  if (turn >= table.chunk_begins[table.count]) return;
  const int which = find_item(table.chunk_begins, table.count, turn);
  const GradItem& t = table.items[which];
  const int64_t begin = int64_t{turn - table.chunk_begins[which]} * kSumChunk;
  const int64_t end = begin + kSumChunk < t.numel ? begin + kSumChunk : t.numel;
  double sum;
  if (t.kind == Kind::kF32)
    sum = piece_sum<Kind::kF32>(t, begin, end, lane);
  else if (t.kind == Kind::kBF16)
    sum = piece_sum<Kind::kBF16>(t, begin, end, lane);
  else
    sum = piece_sum<Kind::kFP16>(t, begin, end, lane);
  sum = fold_warp(sum);
  if (lane == 0) table.partials[turn] = sum;
}

// Returns the next sum of a lane, and adds to `lost` whether bf16 has this value.
__device__ inline double narrow_value(float x, uint16_t* low, bool& lost, double sum) {
  const uint32_t bits = round_low<ScalarOps, Kind::kBF16>(x);
  *low = static_cast<uint16_t>(bits);
  lost |= !(widen<ScalarOps, Kind::kBF16>(bits) == x);  // a NaN differs from itself
  return __fma_rn(static_cast<double>(x), static_cast<double>(x), sum);
}

// Pieces and lanes as in sumsq_kernel.
__global__ void __launch_bounds__(kThreads)
    narrow_kernel(const __grid_constant__ NarrowTable table) {
  constexpr int kAhead = 8;  // loads under way: the compiler moves none across a store
  const int lane = threadIdx.x % kSumLanes;
  const int turn = static_cast<int>(blockIdx.x) * (kThreads / kSumLanes) + threadIdx.x / kSumLanes;
  if (turn >= table.chunk_begins[table.count]) return;
  const int which = find_item(table.chunk_begins, table.count, turn);
  const NarrowItem& t = table.items[which];
  const float* grad = t.grad;
  uint16_t* low = t.low;
  const int64_t begin = int64_t{turn - table.chunk_begins[which]} * kSumChunk;
  const int64_t end = begin + kSumChunk < t.numel ? begin + kSumChunk : t.numel;
  int64_t i = begin + lane;
  double sum = 0.0;
  bool lost = false;
  for (; i + (kAhead - 1) * kSumLanes < end; i += kAhead * kSumLanes) {
    float x[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) x[k] = grad[i + k * kSumLanes];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) sum = narrow_value(x[k], low + i + k * kSumLanes, lost, sum);
  }
  for (; i < end; i += kSumLanes) sum = narrow_value(grad[i], low + i, lost, sum);
  if (end == t.numel && lane < (kLowAlign - end % kLowAlign) % kLowAlign) low[end + lane] = 0;
  if (lost) table.lost[which] = 1;
  sum = fold_warp(sum);
  if (lane == 0) table.partials[turn] = sum;
}

// One warp per tensor.
__global__ void fold_kernel(const __grid_constant__ FoldTable table) {
  double sum = 0.0;
  for (int64_t c = table.begins[blockIdx.x] + threadIdx.x; c < table.begins[blockIdx.x + 1];
       c += kSumLanes)
    sum = __dadd_rn(sum, table.partials[c]);
  sum = fold_warp(sum);
  if (threadIdx.x == 0) table.out[blockIdx.x] = sum;
}

// Cuts a list into tables, launches each with `launch(table, first item, blocks)` and folds its
// pieces.
template <typename Table, typename Item, typename Launch>
void each_table(const Item* items, const int64_t* chunk_begins, int64_t count, double* partials,
                double* out, cudaStream_t s, const char* op, const Launch& launch) {
  constexpr int kWarps = kThreads / kSumLanes;
  for (int64_t i = 0; i < count;) {
    Table table{};
    FoldTable fold{};
    const int64_t first = i;
    for (; i < count && table.count < kSumTable; ++i) {
      const int64_t end = chunk_begins[i + 1] - chunk_begins[first];
      if (end > kMaxBlocks && i > first) break;
      if (end > kMaxBlocks) cuda_check(cudaErrorInvalidValue, op);
      table.items[table.count++] = items[i];
      table.chunk_begins[table.count] = static_cast<int>(end);
      fold.begins[table.count] = end;
    }
    table.partials = partials + chunk_begins[first];
    fold.partials = table.partials;
    fold.out = out + first;
    const int chunks = table.chunk_begins[table.count];
    if (chunks > 0) {
      launch(table, first, (chunks + kWarps - 1) / kWarps);
      cuda_check_launch(op);
    }
    fold_kernel<<<table.count, kSumLanes, 0, s>>>(fold);
    cuda_check_launch(op);
  }
}

}  // namespace

void launch_adamw(const AdamWItem* items, int64_t count, void* stream) {
  auto* s = static_cast<cudaStream_t>(stream);
  for (int64_t i = 0; i < count;) {
    AdamWTable table{};
    const int64_t first = i;
    for (int64_t total = 0; i < count && table.count < kAdamWTable; ++i) {
      const int64_t blocks = (items[i].numel + kPerBlock - 1) / kPerBlock;
      if (total + blocks > kMaxBlocks && i > first) break;
      if (blocks > kMaxBlocks) cuda_check(cudaErrorInvalidValue, "adamw_step_");
      table.items[table.count] = items[i];
      table.block_begins[++table.count] = static_cast<int>(total += blocks);
    }
    const int blocks = table.block_begins[table.count];
    if (blocks == 0) continue;
    adamw_kernel<<<blocks, kThreads, 0, s>>>(table);
    cuda_check_launch("adamw_step_");
  }
}

void launch_sumsq(const GradItem* items, const int64_t* chunk_begins, int64_t count,
                  double* partials, double* out, void* stream) {
  auto* s = static_cast<cudaStream_t>(stream);
  each_table<SumTable>(items, chunk_begins, count, partials, out, s, "grad_sumsq",
                       [&](const SumTable& table, int64_t, int blocks) {
                         sumsq_kernel<<<blocks, kThreads, 0, s>>>(table);
                       });
}

void launch_narrow(const NarrowItem* items, const int64_t* chunk_begins, int64_t count,
                   double* partials, double* out, uint8_t* lost, void* stream) {
  auto* s = static_cast<cudaStream_t>(stream);
  cuda_check(cudaMemsetAsync(lost, 0, static_cast<size_t>(count), s), "grad_narrow");
  each_table<NarrowTable>(items, chunk_begins, count, partials, out, s, "grad_narrow",
                          [&](NarrowTable& table, int64_t first, int blocks) {
                            table.lost = lost + first;
                            narrow_kernel<<<blocks, kThreads, 0, s>>>(table);
                          });
}

}  // namespace ts::optim
