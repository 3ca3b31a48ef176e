// Check, device, stream, dispatch: the only file that sees nanobind.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <vector>

#include "kernels.h"
#include "ts/module.h"

namespace nb = nanobind;
using namespace ts;

namespace {

bool is_kernel_float(DType t) { return t == DType::kF32 || t == DType::kBF16 || t == DType::kF16; }

void expect_float(const TensorView& t, const char* op, const char* argument) {
  if (!is_kernel_float(t.dtype()))
    fail_type(op, argument, "float32, bfloat16 or float16", t.describe());
  if (!t.is_contiguous()) fail_value(op, argument, "a contiguous tensor", t.describe());
}

// Checks one operand fully: float or a given dtype, size, device.
void expect_like(const TensorView& t, const TensorView& like, const char* op, const char* argument,
                 DType dtype, int64_t numel) {
  expect(t, op, argument, dtype);
  expect_numel(t, op, argument, numel);
  expect_same_device(t, like, op, argument);
}

// Runs one of the two where the tensor is: on its device and current stream, or on the pool's
// threads without the GIL. `on_cuda` is generic so that it is no code at all in a build without
// CUDA.
template <typename OnCuda, typename OnCpu>
void run_on(const TensorView& t, const char* op, int threads, [[maybe_unused]] OnCuda&& on_cuda,
            OnCpu&& on_cpu) {
  expect_no_cuda_missing(t, op);
#if defined(TS_WITH_CUDA)
  if (t.is_cuda()) {
    DeviceGuard guard(t.device_id());
    on_cuda(t.current_stream());
    return;
  }
#endif
  threads = thread_count(threads);
  nb::gil_scoped_release release;
  on_cpu(threads);
}

fused::NormTypes norm_types(const TensorView& x, const TensorView& weight, bool gemma) {
  const DType promoted = x.dtype() == weight.dtype() ? x.dtype() : DType::kF32;
  return {x.dtype(), weight.dtype(), gemma ? x.dtype() : promoted};
}

// What both passes of RMSNorm take: checks x, its weight, a result or gradient, and the row
// statistics.
fused::NormTypes norm_operands(const TensorView& x, const TensorView& weight, const TensorView& y,
                               const TensorView& rstd, bool gemma, const char* op,
                               const char* y_name) {
  expect_float(x, op, "x");
  expect_float(weight, op, "weight");
  expect_same_device(weight, x, op, "weight");
  const auto types = norm_types(x, weight, gemma);
  const int64_t numel = rstd.numel() * weight.numel();
  expect_numel(x, op, "x", numel);
  expect_like(y, x, op, y_name, types.out, numel);
  expect_like(rstd, x, op, "rstd", DType::kF32, rstd.numel());
  return types;
}

void rms_norm_forward(TensorView x, TensorView weight, TensorView y, TensorView rstd, double eps,
                      double offset, bool gemma, int mean_lanes, std::optional<TensorView> residual,
                      std::optional<TensorView> sum, int threads) {
  const char* op = "rms_norm_forward";
  const int64_t hidden = weight.numel(), rows = rstd.numel();
  const auto types = norm_operands(x, weight, y, rstd, gemma, op, "y");
  if (residual.has_value() != sum.has_value())
    fail_value(op, "sum", "given together with residual", "one of the two");
  if (residual) {
    expect_like(*residual, x, op, "residual", x.dtype(), rows * hidden);
    expect_like(*sum, x, op, "sum", x.dtype(), rows * hidden);
  }
  if (mean_lanes != 8 && mean_lanes != 4)
    fail_value(op, "mean_lanes", "8 or 4", std::to_string(mean_lanes));
  if (rows == 0 || hidden == 0) return;
  const fused::NormForward a{x.data(),
                             weight.data(),
                             y.data(),
                             rstd.data<float>(),
                             rows,
                             hidden,
                             static_cast<float>(eps),
                             static_cast<float>(offset),
                             gemma,
                             residual ? residual->data() : nullptr,
                             sum ? sum->data() : nullptr};
  run_on(
      x, op, threads, [&](auto stream) { fused::launch_rms_norm_forward(a, types, stream); },
      [&](int threads) { TS_ISA_CALL(fused, rms_norm_forward, a, types, mean_lanes, threads); });
}

void rms_norm_backward(TensorView grad_y, TensorView x, TensorView weight, TensorView rstd,
                       std::optional<TensorView> grad_x, std::optional<TensorView> partial,
                       std::optional<TensorView> grad_weight, int64_t rows_per_chunk, double offset,
                       bool gemma, std::optional<TensorView> grad_sum, int threads) {
  const char* op = "rms_norm_backward";
  const int64_t hidden = weight.numel(), rows = rstd.numel();
  const auto types = norm_operands(x, weight, grad_y, rstd, gemma, op, "grad_y");
  if (rows_per_chunk < 1)
    fail_value(op, "rows_per_chunk", "at least 1", std::to_string(rows_per_chunk));
  if (grad_sum) {
    if (!grad_x) fail_value(op, "grad_sum", "None without grad_x", grad_sum->describe());
    expect_like(*grad_sum, x, op, "grad_sum", x.dtype(), rows * hidden);
  }
  if (grad_x) expect_like(*grad_x, x, op, "grad_x", x.dtype(), rows * hidden);
  if (grad_weight.has_value() != partial.has_value())
    fail_value(op, "partial", "given together with grad_weight", "one of the two");
  if (grad_weight) {
    const int64_t chunks = (rows + rows_per_chunk - 1) / rows_per_chunk;
    expect_like(*grad_weight, x, op, "grad_weight", weight.dtype(), hidden);
    expect_like(*partial, x, op, "partial", DType::kF32, (chunks ? chunks : 1) * hidden);
  }
  if ((!grad_x && !grad_weight) || hidden == 0) return;
  const fused::NormBackward a{grad_y.data(),
                              x.data(),
                              weight.data(),
                              rstd.data<float>(),
                              grad_x ? grad_x->data() : nullptr,
                              partial ? partial->data<float>() : nullptr,
                              grad_weight ? grad_weight->data() : nullptr,
                              rows,
                              hidden,
                              rows_per_chunk,
                              static_cast<float>(offset),
                              gemma,
                              grad_sum ? grad_sum->data() : nullptr};
  run_on(
      x, op, threads, [&](auto stream) { fused::launch_rms_norm_backward(a, types, stream); },
      [&](int threads) { TS_ISA_CALL(fused, rms_norm_backward, a, types, threads); });
}

// A (batch, tokens, heads, dim) operand of the rotary embedding and its result.
fused::RotaryHeads rotary_heads(const TensorView& x, const TensorView& y, const TensorView& like,
                                const char* op, const char* argument) {
  for (const TensorView* t : {&x, &y}) {
    if (t->dtype() != like.dtype()) fail_type(op, argument, name_of(like.dtype()), t->describe());
    if (t->ndim() != 4 || (t->numel() > 0 && t->shape(3) > 1 && t->stride(3) != 1))
      fail_value(op, argument, "4 dimensions, the last one without gaps", t->describe());
    expect_same_device(*t, like, op, argument);
    for (int i = 0; i < 4; ++i)
      if (t->shape(i) != (i == 2 ? x : like).shape(i))
        fail_value(op, argument, "the batch, tokens and dim of " + like.describe(), t->describe());
  }
  return {x.data(),
          y.data(),
          x.shape(2),
          {x.stride(0), x.stride(1), x.stride(2)},
          {y.stride(0), y.stride(1), y.stride(2)}};
}

void expect_angles(const TensorView& t, const TensorView& q, const TensorView& cos, const char* op,
                   const char* argument) {
  if (!is_kernel_float(t.dtype()) || t.dtype() != cos.dtype())
    fail_type(op, argument, "float32, bfloat16 or float16, cos and sin alike", t.describe());
  if (t.ndim() != 3 || t.shape(0) != q.shape(0) || t.shape(1) != q.shape(1) ||
      t.shape(2) != cos.shape(2) || (t.numel() > 0 && t.shape(2) > 1 && t.stride(2) != 1))
    fail_value(op, argument, "(batch, tokens, width), the last one without gaps", t.describe());
  expect_same_device(t, q, op, argument);
}

void rotary(TensorView q, std::optional<TensorView> k, TensorView cos, TensorView sin,
            TensorView q_out, std::optional<TensorView> k_out, int64_t rotary_dim, bool interleaved,
            bool inverse, int threads) {
  const char* op = "rotary";
  if (!is_kernel_float(q.dtype())) fail_type(op, "q", "float32, bfloat16 or float16", q.describe());
  if (k.has_value() != k_out.has_value()) fail_value(op, "k_out", "given with k", "one of the two");
  fused::Rotary a{};
  a.q = rotary_heads(q, q_out, q, op, "q");
  if (k) a.k = rotary_heads(*k, *k_out, q, op, "k");
  expect_angles(cos, q, cos, op, "cos");
  expect_angles(sin, q, cos, op, "sin");
  const int64_t width = cos.shape(2);
  if (rotary_dim < 2 || rotary_dim % 2 || rotary_dim > q.shape(3) ||
      rotary_dim > fused::kMaxRotaryDim || (width != rotary_dim && 2 * width != rotary_dim))
    fail_value(op, "rotary_dim", "even, at most dim and 1024, the width of cos or twice that",
               std::to_string(rotary_dim));
  a.cos = cos.data();
  a.sin = sin.data();
  for (int i = 0; i < 2; ++i) {
    a.cos_stride[i] = cos.stride(i);
    a.sin_stride[i] = sin.stride(i);
  }
  a.batch = q.shape(0);
  a.tokens = q.shape(1);
  a.dim = q.shape(3);
  a.rotary_dim = rotary_dim;
  a.half_width = width != rotary_dim;
  a.interleaved = interleaved;
  a.inverse = inverse;
  if (a.batch * a.tokens * (a.q.heads + a.k.heads) == 0) return;
  run_on(
      q, op, threads, [&](auto stream) { fused::launch_rotary(a, q.dtype(), cos.dtype(), stream); },
      [&](int threads) { TS_ISA_CALL(fused, rotary, a, q.dtype(), cos.dtype(), threads); });
}

// Rows and width of the gated activation: the last dimension, and all others.
struct GatedShape {
  int64_t rows, width;
};

GatedShape gated_shape(const TensorView& gate, const char* op) {
  if (gate.ndim() < 1) fail_value(op, "gate", "at least one dimension", gate.describe());
  const int64_t width = gate.shape(gate.ndim() - 1);
  return {width ? gate.numel() / width : 0, width};
}

// An operand: (rows, width), rows without gaps, or anything contiguous; returns the stride of its
// rows.
int64_t gated_rows(const TensorView& t, const TensorView& like, const GatedShape& s, const char* op,
                   const char* argument) {
  if (!is_kernel_float(t.dtype()) || t.dtype() != like.dtype())
    fail_type(op, argument, "float32, bfloat16 or float16, all alike", t.describe());
  const int last = t.ndim() - 1;
  const bool rows =
      last == 1 && t.shape(0) == s.rows && (t.numel() == 0 || s.width == 1 || t.stride(1) == 1);
  if (last < 0 || t.numel() != s.rows * s.width || t.shape(last) != s.width ||
      !(rows || t.is_contiguous()))
    fail_value(op, argument, "the shape of " + like.describe() + ", rows without gaps",
               t.describe());
  expect_same_device(t, like, op, argument);
  return rows ? t.stride(0) : s.width;
}

void gated_forward(TensorView gate, TensorView up, TensorView y, bool gelu, int threads) {
  const char* op = "gated_forward";
  fused::GatedForward a{};
  const GatedShape shape = gated_shape(gate, op);
  a.gate_stride = gated_rows(gate, gate, shape, op, "gate");
  a.up_stride = gated_rows(up, gate, shape, op, "up");
  expect_like(y, gate, op, "y", gate.dtype(), gate.numel());
  if (gate.numel() == 0) return;
  a.gate = gate.data();
  a.up = up.data();
  a.y = y.data();
  a.rows = shape.rows;
  a.width = shape.width;
  a.gelu = gelu;
  run_on(
      gate, op, threads, [&](auto stream) { fused::launch_gated_forward(a, gate.dtype(), stream); },
      [&](int threads) { TS_ISA_CALL(fused, gated_forward, a, gate.dtype(), threads); });
}

void gated_backward(TensorView grad_y, TensorView gate, TensorView up,
                    std::optional<TensorView> grad_gate, std::optional<TensorView> grad_up,
                    bool gelu, int threads) {
  const char* op = "gated_backward";
  fused::GatedBackward a{};
  const GatedShape shape = gated_shape(gate, op);
  a.gate_stride = gated_rows(gate, gate, shape, op, "gate");
  a.up_stride = gated_rows(up, gate, shape, op, "up");
  a.grad_stride = gated_rows(grad_y, gate, shape, op, "grad_y");
  if (grad_gate) a.out_stride = gated_rows(*grad_gate, gate, shape, op, "grad_gate");
  if (grad_up) {
    const int64_t stride = gated_rows(*grad_up, gate, shape, op, "grad_up");
    if (grad_gate && stride != a.out_stride)
      fail_value(op, "grad_up", "the strides of grad_gate", std::to_string(stride));
    a.out_stride = stride;
  }
  if (gate.numel() == 0 || (!grad_gate && !grad_up)) return;
  a.grad_y = grad_y.data();
  a.gate = gate.data();
  a.up = up.data();
  a.grad_gate = grad_gate ? grad_gate->data() : nullptr;
  a.grad_up = grad_up ? grad_up->data() : nullptr;
  a.rows = shape.rows;
  a.width = shape.width;
  a.gelu = gelu;
  run_on(
      gate, op, threads,
      [&](auto stream) { fused::launch_gated_backward(a, gate.dtype(), stream); },
      [&](int threads) { TS_ISA_CALL(fused, gated_backward, a, gate.dtype(), threads); });
}

void cross_entropy_rows(TensorView logits, TensorView targets, TensorView losses,
                        int64_t ignore_index, double softcap, double scale, double smoothing,
                        bool with_grad, int threads) {
  const char* op = "cross_entropy_rows";
  expect_float(logits, op, "logits");
  if (logits.ndim() != 2) fail_value(op, "logits", "two dimensions", logits.describe());
  const int64_t rows = logits.shape(0), vocab = logits.shape(1);
  expect_like(targets, logits, op, "targets", DType::kI64, rows);
  expect_like(losses, logits, op, "losses", DType::kF32, rows);
  if (rows == 0) return;
  if (vocab == 0) fail_value(op, "logits", "a vocabulary of at least 1", logits.describe());
  const fused::CrossEntropyRows a{logits.data(),
                                  targets.data<int64_t>(),
                                  losses.data<float>(),
                                  rows,
                                  vocab,
                                  ignore_index,
                                  static_cast<float>(softcap),
                                  static_cast<float>(scale),
                                  static_cast<float>(smoothing),
                                  with_grad};
  run_on(
      logits, op, threads,
      [&](auto stream) { fused::launch_cross_entropy_rows(a, logits.dtype(), stream); },
      [&](int threads) { TS_ISA_CALL(fused, cross_entropy_rows, a, logits.dtype(), threads); });
}

void scale_cast(TensorView src, TensorView scale, TensorView out, int threads) {
  const char* op = "scale_cast";
  expect_float(src, op, "src");
  expect_float(out, op, "out");
  expect_like(scale, src, op, "scale", DType::kF32, 1);
  expect_like(out, src, op, "out", out.dtype(), src.numel());
  if (src.numel() == 0) return;
  run_on(
      src, op, threads,
      [&](auto stream) {
        fused::launch_scale_cast(src.data(), src.dtype(), scale.data<float>(), out.data(),
                                 out.dtype(), src.numel(), stream);
      },
      [&](int threads) {
        TS_ISA_CALL(fused, scale_cast, src.data(), src.dtype(), scale.data<float>(), out.data(),
                    out.dtype(), src.numel(), threads);
      });
}

void copy_each(const std::vector<TensorView>& targets, const std::vector<TensorView>& sources) {
  const char* op = "copy_each";
  if (targets.size() != sources.size())
    fail_value(op, "sources", std::to_string(targets.size()) + " tensors",
               std::to_string(sources.size()));
  if (targets.empty()) return;
  std::vector<fused::CopyEach> copies;
  copies.reserve(targets.size());
  for (size_t i = 0; i < targets.size(); ++i) {
    const TensorView &target = targets[i], &source = sources[i];
    expect_float(target, op, "targets");
    expect_float(source, op, "sources");
    expect_numel(source, op, "sources", target.numel());
    expect_same_device(source, targets[0], op, "sources");
    expect_same_device(target, targets[0], op, "targets");
    copies.push_back(
        {source.data(), target.data(), target.numel(), source.dtype(), target.dtype()});
  }
  if (!targets[0].is_cuda()) fail_value(op, "targets", "CUDA tensors", targets[0].describe());
  run_on(
      targets[0], op, 1,
      [&](auto stream) {
        fused::launch_copy_each(copies.data(), static_cast<int64_t>(copies.size()), stream);
      },
      [](int) {});
}

void label_counts(TensorView targets, int64_t ignore_index, int64_t vocab, TensorView counts) {
  const char* op = "label_counts";
  expect(targets, op, "targets", DType::kI64);
  expect_like(counts, targets, op, "counts", DType::kI64, 2);
  run_on(
      targets, op, 1,
      [&](auto stream) {
        fused::launch_label_counts(targets.data<int64_t>(), targets.numel(), ignore_index, vocab,
                                   counts.data<int64_t>(), stream);
      },
      [&](int) {
        TS_ISA_CALL(fused, label_counts, targets.data<int64_t>(), targets.numel(), ignore_index,
                    vocab, counts.data<int64_t>());
      });
}

void loss_total(TensorView losses, TensorView total) {
  const char* op = "loss_total";
  expect(losses, op, "losses", DType::kF32);
  expect_like(total, losses, op, "total", DType::kF64, 1);
  run_on(
      losses, op, 1,
      [&](auto stream) {
        fused::launch_loss_total(losses.data<float>(), losses.numel(), total.data<double>(),
                                 stream);
      },
      [&](int) {
        TS_ISA_CALL(fused, loss_total, losses.data<float>(), losses.numel(), total.data<double>());
      });
}

}  // namespace

NB_MODULE(_C, m) {
  init_module(m);
  m.def("rms_norm_forward", &rms_norm_forward, nb::arg("x"), nb::arg("weight"), nb::arg("y"),
        nb::arg("rstd"), nb::arg("eps"), nb::arg("offset"), nb::arg("gemma"), nb::arg("mean_lanes"),
        nb::arg("residual").none() = nb::none(), nb::arg("sum").none() = nb::none(),
        nb::arg("threads") = 0);
  m.def("rms_norm_backward", &rms_norm_backward, nb::arg("grad_y"), nb::arg("x"), nb::arg("weight"),
        nb::arg("rstd"), nb::arg("grad_x").none(), nb::arg("partial").none(),
        nb::arg("grad_weight").none(), nb::arg("rows_per_chunk"), nb::arg("offset"),
        nb::arg("gemma"), nb::arg("grad_sum").none() = nb::none(), nb::arg("threads") = 0);
  m.def("rotary", &rotary, nb::arg("q"), nb::arg("k").none(), nb::arg("cos"), nb::arg("sin"),
        nb::arg("q_out"), nb::arg("k_out").none(), nb::arg("rotary_dim"), nb::arg("interleaved"),
        nb::arg("inverse"), nb::arg("threads") = 0);
  m.def("gated_forward", &gated_forward, nb::arg("gate"), nb::arg("up"), nb::arg("y"),
        nb::arg("gelu"), nb::arg("threads") = 0);
  m.def("gated_backward", &gated_backward, nb::arg("grad_y"), nb::arg("gate"), nb::arg("up"),
        nb::arg("grad_gate").none(), nb::arg("grad_up").none(), nb::arg("gelu"),
        nb::arg("threads") = 0);
  m.def("cross_entropy_rows", &cross_entropy_rows, nb::arg("logits"), nb::arg("targets"),
        nb::arg("losses"), nb::arg("ignore_index"), nb::arg("softcap"), nb::arg("scale"),
        nb::arg("smoothing"), nb::arg("with_grad"), nb::arg("threads") = 0);
  m.def("scale_cast", &scale_cast, nb::arg("src"), nb::arg("scale"), nb::arg("out"),
        nb::arg("threads") = 0);
  m.def("copy_each", &copy_each, nb::arg("targets"), nb::arg("sources"));
  m.def("label_counts", &label_counts, nb::arg("targets"), nb::arg("ignore_index"),
        nb::arg("vocab"), nb::arg("counts"));
  m.def("loss_total", &loss_total, nb::arg("losses"), nb::arg("total"));
}
