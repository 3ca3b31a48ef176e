// Checks, device, stream, dispatch: the only file of ts_optim that sees Python.
#include <math.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <vector>

#include "kernels.h"
#include "packed_math.h"
#include "ts/module.h"

namespace nb = nanobind;
using namespace ts;
using optim::AdamWItem;
using optim::AdamWScalars;
using optim::BlockItem;
using optim::GradItem;
using optim::Kind;
using optim::Moments;
using optim::NarrowItem;
using optim::PackItem;
using Tensors = std::vector<TensorView>;

namespace {

constexpr const char* kStep = "adamw_step_";
constexpr const char* kBlocks = "adamw_blocks_";
constexpr const char* kSum = "grad_sumsq";
constexpr const char* kNarrow = "grad_narrow";

std::string at(const char* list, size_t i) {
  return std::string(list) + "[" + std::to_string(i) + "]";
}

Kind kind_of(const TensorView& t, const char* op, const std::string& argument, bool fp32) {
  switch (t.dtype()) {
    case DType::kF32:
      if (fp32) return Kind::kF32;
      break;
    case DType::kBF16:
      return Kind::kBF16;
    case DType::kF16:
      return Kind::kFP16;
    default:
      break;
  }
  fail_type(op, argument, fp32 ? "float32, bfloat16 or float16" : "bfloat16 or float16",
            t.describe());
}

void expect_like(const TensorView& t, const TensorView& like, const char* op,
                 const std::string& argument) {
  if (t.numel() != like.numel() || !t.is_contiguous())
    fail_value(op, argument, std::to_string(like.numel()) + " contiguous elements", t.describe());
  expect_same_device(t, like, op, argument.c_str());
}

void expect_f32(const TensorView& t, const char* op, const std::string& argument) {
  if (t.dtype() != DType::kF32) fail_type(op, argument, "float32", t.describe());
}

void expect_count(const Tensors& list, size_t n, const char* argument) {
  if (list.size() != n)
    fail_value(kStep, argument, std::to_string(n) + " tensors, one per parameter",
               std::to_string(list.size()));
}

// Bias corrections in double, then one rounding each.
AdamWScalars make_scalars(const double* h, double t, double grad_scale) {
  const double lr = h[0], beta1 = h[1], beta2 = h[2];
  AdamWScalars s;
  s.decay = static_cast<float>(1.0 - lr * h[4]);
  s.w1 = static_cast<float>(1.0 - beta1);
  s.w2 = static_cast<float>(1.0 - beta2);
  s.step_size = static_cast<float>(lr / (1.0 - pow(beta1, t)));
  s.inv_sqrt_bc2 = static_cast<float>(1.0 / sqrt(1.0 - pow(beta2, t)));
  s.eps = static_cast<float>(h[3]);
  s.grad_scale = static_cast<float>(grad_scale);
  return s;
}

struct Step {
  std::vector<AdamWItem> items;
  std::vector<int64_t> begins;
  std::vector<float*> counters;
};

AdamWItem make_item(size_t i, const TensorView& param, const TensorView& grad,
                    const TensorView& exp_avg, const TensorView& exp_avg_sq) {
  expect_f32(param, kStep, at("params", i));
  expect_like(param, param, kStep, at("params", i));
  expect_like(grad, param, kStep, at("grads", i));
  expect_f32(exp_avg, kStep, at("exp_avgs", i));
  expect_like(exp_avg, param, kStep, at("exp_avgs", i));
  expect_f32(exp_avg_sq, kStep, at("exp_avg_sqs", i));
  expect_like(exp_avg_sq, param, kStep, at("exp_avg_sqs", i));
  AdamWItem item{};
  item.param = param.data<float>();
  item.grad = grad.data();
  item.exp_avg = exp_avg.data<float>();
  item.exp_avg_sq = exp_avg_sq.data<float>();
  item.numel = param.numel();
  item.grad_kind = kind_of(grad, kStep, at("grads", i), true);
  return item;
}

Step prepare(const Tensors& params, const Tensors& grads, const Tensors& exp_avgs,
             const Tensors& exp_avg_sqs, const Tensors& steps, const Tensors& lows,
             const TensorView& hyper, const std::vector<int64_t>& groups, double grad_scale,
             bool reconcile) {
  const size_t n = params.size();
  expect_count(grads, n, "grads");
  expect_count(exp_avgs, n, "exp_avgs");
  expect_count(exp_avg_sqs, n, "exp_avg_sqs");
  expect_count(steps, n, "steps");
  if (!lows.empty()) expect_count(lows, n, "lows");
  if (groups.size() != n)
    fail_value(kStep, "groups", std::to_string(n) + " indices", std::to_string(groups.size()));
  expect(hyper, kStep, "hyper", DType::kF64);
  if (hyper.ndim() != 2 || hyper.shape(1) != 5 || !hyper.is_cpu())
    fail_value(kStep, "hyper", "float64[groups, 5] on cpu", hyper.describe());
  Step step;
  step.items.reserve(n);
  step.begins.assign(1, 0);
  for (size_t i = 0; i < n; ++i) {
    AdamWItem item = make_item(i, params[i], grads[i], exp_avgs[i], exp_avg_sqs[i]);
    expect_same_device(params[i], params[0], kStep, "params");
    if (!lows.empty()) {
      expect_like(lows[i], params[i], kStep, at("lows", i));
      item.low = lows[i].data();
      item.low_kind = kind_of(lows[i], kStep, at("lows", i), false);
      item.reconcile = reconcile;
    }
    expect_f32(steps[i], kStep, at("steps", i));
    if (steps[i].numel() != 1 || !steps[i].is_cpu())
      fail_value(kStep, at("steps", i), "one float32 on cpu", steps[i].describe());
    if (groups[i] < 0 || groups[i] >= hyper.shape(0))
      fail_value(kStep, at("groups", i), "a row of hyper", std::to_string(groups[i]));
    step.counters.push_back(steps[i].data<float>());
    item.scalars = make_scalars(hyper.data<double>() + 5 * groups[i],
                                static_cast<double>(*step.counters[i]) + 1.0, grad_scale);
    step.begins.push_back(step.begins.back() + item.numel);
    step.items.push_back(item);
  }
  return step;
}

// Step counters advance in the same call as moments and weights: an interrupt in Python finds them
// consistent.
void adamw_step(const Tensors& params, const Tensors& grads, const Tensors& exp_avgs,
                const Tensors& exp_avg_sqs, const Tensors& steps, const Tensors& lows,
                const TensorView& hyper, const std::vector<int64_t>& groups, double grad_scale,
                bool reconcile, int threads) {
  if (params.empty()) return;
  const Step step = prepare(params, grads, exp_avgs, exp_avg_sqs, steps, lows, hyper, groups,
                            grad_scale, reconcile);
  const auto count = static_cast<int64_t>(step.items.size());
  expect_no_cuda_missing(params[0], kStep);
#if defined(TS_WITH_CUDA)
  if (params[0].is_cuda()) {
    const DeviceGuard guard(params[0].device_id());
    void* stream = params[0].current_stream();
    const nb::gil_scoped_release release;
    optim::launch_adamw(step.items.data(), count, stream);
    for (float* counter : step.counters) *counter += 1.0f;
    return;
  }
#endif
  const int workers = thread_count(threads);
  const nb::gil_scoped_release release;
  TS_ISA_CALL(optim, adamw, step.items.data(), step.begins.data(), count, workers);
  for (float* counter : step.counters) *counter += 1.0f;
}

// Where the sums of squares of a list of gradients go.
void expect_sums(const TensorView& partials, int64_t pieces, const TensorView& out, int64_t count,
                 const TensorView& grad, const char* op) {
  expect(partials, op, "partials", DType::kF64);
  expect_numel(partials, op, "partials", pieces);
  expect_same_device(partials, grad, op, "partials");
  expect(out, op, "out", DType::kF64);
  expect_numel(out, op, "out", count);
  expect_same_device(out, grad, op, "out");
}

int64_t pieces_of(int64_t numel) { return (numel + optim::kSumChunk - 1) / optim::kSumChunk; }

void grad_sumsq(const Tensors& grads, const TensorView& partials, const TensorView& out,
                int threads) {
  if (grads.empty()) return;
  std::vector<GradItem> items;
  std::vector<int64_t> begins{0};
  for (size_t i = 0; i < grads.size(); ++i) {
    expect_like(grads[i], grads[i], kSum, at("grads", i));
    expect_same_device(grads[i], grads[0], kSum, "grads");
    items.push_back(
        GradItem{grads[i].data(), grads[i].numel(), kind_of(grads[i], kSum, at("grads", i), true)});
    begins.push_back(begins.back() + pieces_of(grads[i].numel()));
  }
  const auto count = static_cast<int64_t>(items.size());
  expect_sums(partials, begins.back(), out, count, grads[0], kSum);
  expect_no_cuda_missing(grads[0], kSum);
#if defined(TS_WITH_CUDA)
  if (grads[0].is_cuda()) {
    const DeviceGuard guard(grads[0].device_id());
    void* stream = grads[0].current_stream();
    const nb::gil_scoped_release release;
    optim::launch_sumsq(items.data(), begins.data(), count, partials.data<double>(),
                        out.data<double>(), stream);
    return;
  }
#endif
  const int workers = thread_count(threads);
  const nb::gil_scoped_release release;
  TS_ISA_CALL(optim, sumsq, items.data(), begins.data(), count, partials.data<double>(),
              out.data<double>(), workers);
}

// low: bfloat16, the forms one after another, each from a multiple of LOW_ALIGN elements on.
void grad_narrow(const Tensors& grads, const TensorView& low, const TensorView& lost,
                 const TensorView& partials, const TensorView& out) {
  if (grads.empty()) return;
  std::vector<NarrowItem> items;
  std::vector<int64_t> begins{0};
  int64_t room = 0;
  auto* to = static_cast<uint16_t*>(low.data());
  for (size_t i = 0; i < grads.size(); ++i) {
    expect_f32(grads[i], kNarrow, at("grads", i));
    expect_like(grads[i], grads[i], kNarrow, at("grads", i));
    expect_same_device(grads[i], grads[0], kNarrow, "grads");
    const int64_t n = grads[i].numel();
    items.push_back(NarrowItem{static_cast<const float*>(grads[i].data()), to + room, n});
    begins.push_back(begins.back() + pieces_of(n));
    room += (n + optim::kLowAlign - 1) / optim::kLowAlign * optim::kLowAlign;
  }
  const auto count = static_cast<int64_t>(items.size());
  expect(low, kNarrow, "low", DType::kBF16);
  expect_numel(low, kNarrow, "low", room);
  expect_same_device(low, grads[0], kNarrow, "low");
  expect(lost, kNarrow, "lost", DType::kU8);
  expect_numel(lost, kNarrow, "lost", count);
  expect_same_device(lost, grads[0], kNarrow, "lost");
  expect_sums(partials, begins.back(), out, count, grads[0], kNarrow);
  expect_no_cuda_missing(grads[0], kNarrow);
#if defined(TS_WITH_CUDA)
  if (grads[0].is_cuda()) {
    const DeviceGuard guard(grads[0].device_id());
    void* stream = grads[0].current_stream();
    const nb::gil_scoped_release release;
    optim::launch_narrow(items.data(), begins.data(), count, partials.data<double>(),
                         out.data<double>(), lost.data<uint8_t>(), stream);
    return;
  }
#endif
  fail_value(kNarrow, "grads", "CUDA tensors", grads[0].describe());
}

// ---- blocks -------------------------------------------------------------------------------------

// What a call is about, apart from its tensors.
struct BlockCall {
  const TensorView& hyper;
  const std::vector<int64_t>& groups;
  const std::vector<int64_t>& seeds;
  const std::vector<int64_t>& numbers;
  double grad_scale;
  double ema_decay;
  bool reconcile;
};

int64_t blocks_of(int64_t numel) { return (numel + optim::kBlock - 1) / optim::kBlock; }

// Address of a state tensor for kernels where `grad` is: CUDA kernels reach page-locked host
// memory.
void* reach(const TensorView& t, const TensorView& grad, const std::string& argument,
            int64_t numel) {
  if (t.numel() != numel || !t.is_contiguous())
    fail_value(kBlocks, argument, std::to_string(numel) + " contiguous elements", t.describe());
  const bool same = t.is_cpu() == grad.is_cpu() && t.device_id() == grad.device_id();
  if (same || numel == 0) return t.data();
#if defined(TS_WITH_CUDA)
  if (grad.is_cuda() && t.is_cpu()) {
    void* found = optim::mapped_pointer(t.data());
    if (found != nullptr) return found;
  }
#endif
  fail_value(kBlocks, argument,
             "a tensor beside grads, or a page-locked one if those are CUDA tensors", t.describe());
}

Moments moments_of(const TensorView& t) {
  switch (t.dtype()) {
    case DType::kF32:
      return Moments::kF32;
    case DType::kBF16:
      return Moments::kBF16;
    case DType::kU8:
      return Moments::kInt8;
    default:
      fail_type(kBlocks, "exp_avgs[0]", "float32, bfloat16 or uint8", t.describe());
  }
}

void expect_lengths(const char* argument, size_t got, size_t n, bool optional) {
  if (got != n && !(optional && got == 0))
    fail_value(kBlocks, argument, std::to_string(n) + " entries, one per parameter",
               std::to_string(got));
}

struct BlockTensors {
  const Tensors &params, &grads, &exp_avgs, &exp_avg_sqs, &m_scales, &v_scales, &steps, &lows,
      &emas;
};

void place_moments(BlockItem& item, const BlockTensors& t, size_t i) {
  const int64_t n = t.params[i].numel();
  const DType dtype = t.exp_avgs[0].dtype();
  for (const auto& [name, list] :
       {std::pair{"exp_avgs", &t.exp_avgs}, std::pair{"exp_avg_sqs", &t.exp_avg_sqs}})
    if ((*list)[i].dtype() != dtype)
      fail_type(kBlocks, at(name, i), "the dtype of exp_avgs[0]", (*list)[i].describe());
  item.m = reach(t.exp_avgs[i], t.grads[i], at("exp_avgs", i), n);
  item.v = reach(t.exp_avg_sqs[i], t.grads[i], at("exp_avg_sqs", i), n);
  if (dtype != DType::kU8) return;
  for (const auto& [name, list, to] : {std::tuple{"m_scales", &t.m_scales, &item.m_scale},
                                       std::tuple{"v_scales", &t.v_scales, &item.v_scale}}) {
    if ((*list)[i].dtype() != DType::kF32)
      fail_type(kBlocks, at(name, i), "float32", (*list)[i].describe());
    *to = static_cast<float*>(reach((*list)[i], t.grads[i], at(name, i), blocks_of(n)));
  }
}

// First moments are rounded to nearest where that lets them decay: half the widest gap of the code
// is 1/16. Random bits are right for any beta1.
void choose_rounding(BlockItem& item, double beta1) {
  const bool nearest = 1.0 - beta1 > 0.0625;
  item.m_random = nearest ? 0 : (1u << optim::kPoint) - 1;
  item.m_fixed = nearest ? optim::RatioCode::kHalf : optim::RatioCode::kBend;
}

BlockItem make_block_item(const BlockTensors& t, const BlockCall& call, size_t i, double count) {
  const TensorView& param = t.params[i];
  if (param.dtype() != DType::kF32)
    fail_type(kBlocks, at("params", i), "float32", param.describe());
  BlockItem item{};
  const TensorView& grad = t.grads[i];
  item.numel = param.numel();
  item.param = static_cast<float*>(reach(param, grad, at("params", i), item.numel));
  expect_same_device(grad, t.grads[0], kBlocks, "grads");
  if (!grad.is_contiguous() || grad.numel() != item.numel)
    fail_value(kBlocks, at("grads", i), std::to_string(item.numel) + " contiguous elements",
               grad.describe());
  item.grad = grad.data();
  item.grad_kind = kind_of(grad, kBlocks, at("grads", i), true);
  place_moments(item, t, i);
  if (!t.lows.empty()) {
    item.low = reach(t.lows[i], grad, at("lows", i), item.numel);
    item.low_kind = kind_of(t.lows[i], kBlocks, at("lows", i), false);
    item.reconcile = call.reconcile;
  }
  if (!t.emas.empty()) {
    if (t.emas[i].dtype() != DType::kF32)
      fail_type(kBlocks, at("emas", i), "float32", t.emas[i].describe());
    item.ema = static_cast<float*>(reach(t.emas[i], grad, at("emas", i), item.numel));
    item.ema_weight = static_cast<float>(1.0 - call.ema_decay);
  }
  const double* hyper = call.hyper.data<double>() + 5 * call.groups[i];
  item.scalars = make_scalars(hyper, count, call.grad_scale);
  choose_rounding(item, hyper[1]);
  item.seed = static_cast<uint64_t>(call.seeds[i]);
  item.number = static_cast<uint64_t>(call.numbers[i]);
  item.turn = optim::random_turn(static_cast<uint32_t>(count));
  return item;
}

void check_blocks(const BlockTensors& t, const BlockCall& call) {
  const size_t n = t.params.size();
  const bool packed = t.exp_avgs.empty() ? false : t.exp_avgs[0].dtype() == DType::kU8;
  expect_lengths("grads", t.grads.size(), n, false);
  expect_lengths("exp_avgs", t.exp_avgs.size(), n, false);
  expect_lengths("exp_avg_sqs", t.exp_avg_sqs.size(), n, false);
  expect_lengths("m_scales", t.m_scales.size(), n, !packed);
  expect_lengths("v_scales", t.v_scales.size(), n, !packed);
  expect_lengths("steps", t.steps.size(), n, false);
  expect_lengths("lows", t.lows.size(), n, true);
  expect_lengths("emas", t.emas.size(), n, true);
  expect_lengths("groups", call.groups.size(), n, false);
  expect_lengths("seeds", call.seeds.size(), n, false);
  expect_lengths("numbers", call.numbers.size(), n, false);
  expect(call.hyper, kBlocks, "hyper", DType::kF64);
  if (call.hyper.ndim() != 2 || call.hyper.shape(1) != 5 || !call.hyper.is_cpu())
    fail_value(kBlocks, "hyper", "float64[groups, 5] on cpu", call.hyper.describe());
  for (size_t i = 0; i < n; ++i) {
    if (t.steps[i].dtype() != DType::kF32 || t.steps[i].numel() != 1 || !t.steps[i].is_cpu())
      fail_value(kBlocks, at("steps", i), "one float32 on cpu", t.steps[i].describe());
    if (call.groups[i] < 0 || call.groups[i] >= call.hyper.shape(0))
      fail_value(kBlocks, at("groups", i), "a row of hyper", std::to_string(call.groups[i]));
  }
}

void fold_blocks(const std::vector<BlockItem>& items, double* out) {
  for (const BlockItem& t : items)
    for (int k = 0; k < optim::kSums; ++k) {
      double lanes[optim::kSumLanes] = {};
      for (int64_t b = 0; b < blocks_of(t.numel); ++b)
        lanes[b % optim::kSumLanes] += t.sums[k * t.sum_stride + b];
      *out++ = optim::fold_lanes(lanes);
    }
}

// partials: float64 [3, blocks], or empty; sums: float64 [params, 3], or empty.
void adamw_blocks(const Tensors& params, const Tensors& grads, const Tensors& exp_avgs,
                  const Tensors& exp_avg_sqs, const Tensors& m_scales, const Tensors& v_scales,
                  const Tensors& steps, const Tensors& lows, const Tensors& emas,
                  const TensorView& hyper, const std::vector<int64_t>& groups,
                  const std::vector<int64_t>& seeds, const std::vector<int64_t>& numbers,
                  const TensorView& partials, const TensorView& sums, double grad_scale,
                  double ema_decay, bool reconcile, int threads) {
  if (params.empty()) return;
  const BlockTensors t{params, grads, exp_avgs, exp_avg_sqs, m_scales, v_scales, steps, lows, emas};
  const BlockCall call{hyper, groups, seeds, numbers, grad_scale, ema_decay, reconcile};
  check_blocks(t, call);
  const Moments moments = moments_of(exp_avgs[0]);
  std::vector<BlockItem> items;
  std::vector<int64_t> begins{0};
  std::vector<float*> counters;
  for (size_t i = 0; i < params.size(); ++i) {
    counters.push_back(steps[i].data<float>());
    items.push_back(make_block_item(t, call, i, static_cast<double>(*counters[i]) + 1.0));
    begins.push_back(begins.back() + blocks_of(items.back().numel));
  }
  const bool measured = sums.numel() > 0;
  if (measured) {
    expect(sums, kBlocks, "sums", DType::kF64);
    expect_numel(sums, kBlocks, "sums", optim::kSums * static_cast<int64_t>(items.size()));
    expect(partials, kBlocks, "partials", DType::kF64);
    expect_numel(partials, kBlocks, "partials", optim::kSums * begins.back());
    for (const TensorView* view : {&sums, &partials})
      expect_same_device(*view, grads[0], kBlocks, "sums");
    for (size_t i = 0; i < items.size(); ++i) {
      items[i].sums = partials.data<double>() + begins[i];
      items[i].sum_stride = begins.back();
    }
  }
  double* out = measured ? sums.data<double>() : nullptr;
  const auto count = static_cast<int64_t>(items.size());
  expect_no_cuda_missing(grads[0], kBlocks);
#if defined(TS_WITH_CUDA)
  if (grads[0].is_cuda()) {
    const DeviceGuard guard(grads[0].device_id());
    void* stream = grads[0].current_stream();
    const nb::gil_scoped_release release;
    optim::launch_adamw_blocks(items.data(), begins.data(), count, moments, out, stream);
    for (float* counter : counters) *counter += 1.0f;
    return;
  }
#endif
  const int workers = thread_count(threads);
  const nb::gil_scoped_release release;
  TS_ISA_CALL(optim, adamw_blocks, items.data(), begins.data(), count, moments, workers);
  if (measured) fold_blocks(items, out);
  for (float* counter : counters) *counter += 1.0f;
}

PackItem make_pack_item(const char* op, const TensorView& m, const TensorView& v,
                        const TensorView& m_code, const TensorView& v_code,
                        const TensorView& m_scale, const TensorView& v_scale) {
  for (const auto& [name, t] : {std::pair{"exp_avg", &m}, std::pair{"exp_avg_sq", &v}})
    expect(*t, op, name, DType::kF32);
  for (const auto& [name, t] : {std::pair{"m_codes", &m_code}, std::pair{"v_codes", &v_code}})
    expect(*t, op, name, DType::kU8);
  for (const auto& [name, t] : {std::pair{"m_scales", &m_scale}, std::pair{"v_scales", &v_scale}}) {
    expect(*t, op, name, DType::kF32);
    expect_numel(*t, op, name, blocks_of(m.numel()));
  }
  for (const TensorView* t : {&m, &v, &m_code, &v_code, &m_scale, &v_scale}) {
    const bool scale = t == &m_scale || t == &v_scale;
    if (!scale) expect_numel(*t, op, "tensors", m.numel());
    if (!t->is_cpu()) fail_value(op, "tensors", "CPU tensors", t->describe());
  }
  return PackItem{m.data<float>(),
                  v.data<float>(),
                  m_code.data<uint8_t>(),
                  v_code.data<uint8_t>(),
                  m_scale.data<float>(),
                  v_scale.data<float>(),
                  m.numel()};
}

void pack_moments(TensorView m, TensorView v, TensorView m_code, TensorView v_code,
                  TensorView m_scale, TensorView v_scale, int threads) {
  const PackItem item = make_pack_item("pack_moments_", m, v, m_code, v_code, m_scale, v_scale);
  const int workers = thread_count(threads);
  const nb::gil_scoped_release release;
  TS_ISA_CALL(optim, pack_moments, item, workers);
}

void unpack_moments(TensorView m, TensorView v, TensorView m_code, TensorView v_code,
                    TensorView m_scale, TensorView v_scale, int threads) {
  const PackItem item = make_pack_item("unpack_moments_", m, v, m_code, v_code, m_scale, v_scale);
  const int workers = thread_count(threads);
  const nb::gil_scoped_release release;
  TS_ISA_CALL(optim, unpack_moments, item, workers);
}

void stream_probe_bytes(TensorView a, TensorView b, TensorView c, TensorView d, int threads) {
  constexpr const char* op = "stream_probe_bytes_";
  for (const TensorView* t : {&a, &b}) {
    expect(*t, op, "tensors", DType::kF32);
    expect_numel(*t, op, "tensors", a.numel());
  }
  const int64_t bytes = a.numel() > 0 ? c.nbytes() / a.numel() : 0;
  for (const TensorView* t : {&c, &d}) {
    expect(*t, op, "tensors", DType::kU8);
    expect_numel(*t, op, "tensors", a.numel() * bytes);
  }
  for (const TensorView* t : {&a, &b, &c, &d})
    if (!t->is_cpu()) fail_value(op, "tensors", "CPU tensors", t->describe());
  const int workers = thread_count(threads);
  const nb::gil_scoped_release release;
  TS_ISA_CALL(optim, stream_probe_bytes, a.data<float>(), b.data<float>(), c.data<uint8_t>(),
              d.data<uint8_t>(), a.numel(), bytes, workers);
}

void stream_probe(TensorView a, TensorView b, TensorView c, TensorView d, int threads) {
  constexpr const char* op = "stream_probe_";
  for (const TensorView* t : {&a, &b, &c, &d}) {
    expect(*t, op, "tensors", DType::kF32);
    expect_numel(*t, op, "tensors", a.numel());
    if (!t->is_cpu()) fail_value(op, "tensors", "CPU tensors", t->describe());
  }
  const int workers = thread_count(threads);
  const nb::gil_scoped_release release;
  TS_ISA_CALL(optim, stream_probe, a.data<float>(), b.data<float>(), c.data<float>(),
              d.data<float>(), a.numel(), workers);
}

}  // namespace

NB_MODULE(_C, m) {
  init_module(m);
  m.attr("SUM_CHUNK") = optim::kSumChunk;
  m.def("adamw_step_", &adamw_step, nb::arg("params"), nb::arg("grads"), nb::arg("exp_avgs"),
        nb::arg("exp_avg_sqs"), nb::arg("steps"), nb::arg("lows"), nb::arg("hyper"),
        nb::arg("groups"), nb::arg("grad_scale") = 1.0, nb::arg("reconcile") = false,
        nb::arg("threads") = 0);
  m.attr("BLOCK") = optim::kBlock;
  m.def("adamw_blocks_", &adamw_blocks, nb::arg("params"), nb::arg("grads"), nb::arg("exp_avgs"),
        nb::arg("exp_avg_sqs"), nb::arg("m_scales"), nb::arg("v_scales"), nb::arg("steps"),
        nb::arg("lows"), nb::arg("emas"), nb::arg("hyper"), nb::arg("groups"), nb::arg("seeds"),
        nb::arg("numbers"), nb::arg("partials"), nb::arg("sums"), nb::arg("grad_scale") = 1.0,
        nb::arg("ema_decay") = 1.0, nb::arg("reconcile") = false, nb::arg("threads") = 0);
  m.def("pack_moments_", &pack_moments, nb::arg("exp_avg"), nb::arg("exp_avg_sq"),
        nb::arg("m_codes"), nb::arg("v_codes"), nb::arg("m_scales"), nb::arg("v_scales"),
        nb::arg("threads") = 0);
  m.def("unpack_moments_", &unpack_moments, nb::arg("exp_avg"), nb::arg("exp_avg_sq"),
        nb::arg("m_codes"), nb::arg("v_codes"), nb::arg("m_scales"), nb::arg("v_scales"),
        nb::arg("threads") = 0);
  m.def("stream_probe_bytes_", &stream_probe_bytes, nb::arg("a"), nb::arg("b"), nb::arg("c"),
        nb::arg("d"), nb::arg("threads") = 0);
  m.def("grad_sumsq", &grad_sumsq, nb::arg("grads"), nb::arg("partials"), nb::arg("out"),
        nb::arg("threads") = 0);
  m.attr("LOW_ALIGN") = optim::kLowAlign;
  m.def("grad_narrow", &grad_narrow, nb::arg("grads"), nb::arg("low"), nb::arg("lost"),
        nb::arg("partials"), nb::arg("out"));
  m.def("stream_probe_", &stream_probe, nb::arg("a"), nb::arg("b"), nb::arg("c"), nb::arg("d"),
        nb::arg("threads") = 0);
}
