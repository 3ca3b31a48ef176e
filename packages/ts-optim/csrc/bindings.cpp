// Checks, device, stream, dispatch: the only file of ts_optim that sees Python.
#include <math.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <vector>

#include "kernels.h"
#include "ts/module.h"

namespace nb = nanobind;
using namespace ts;
using optim::AdamWItem;
using optim::AdamWScalars;
using optim::GradItem;
using optim::Kind;
using Tensors = std::vector<TensorView>;

namespace {

constexpr const char* kStep = "adamw_step_";
constexpr const char* kSum = "grad_sumsq";

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
    begins.push_back(begins.back() + (grads[i].numel() + optim::kSumChunk - 1) / optim::kSumChunk);
  }
  const auto count = static_cast<int64_t>(items.size());
  expect(partials, kSum, "partials", DType::kF64);
  expect_numel(partials, kSum, "partials", begins.back());
  expect_same_device(partials, grads[0], kSum, "partials");
  expect(out, kSum, "out", DType::kF64);
  expect_numel(out, kSum, "out", count);
  expect_same_device(out, grads[0], kSum, "out");
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
  m.def("grad_sumsq", &grad_sumsq, nb::arg("grads"), nb::arg("partials"), nb::arg("out"),
        nb::arg("threads") = 0);
  m.def("stream_probe_", &stream_probe, nb::arg("a"), nb::arg("b"), nb::arg("c"), nb::arg("d"),
        nb::arg("threads") = 0);
}
