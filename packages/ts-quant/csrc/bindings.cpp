// Check, set the device, take the stream, dispatch. Python allocates every output.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "kernels.h"
#include "ts/module.h"

namespace nb = nanobind;
using namespace ts;

namespace {

// Calls fn with a null pointer of the C++ type of `view`: float, bf16 or fp16.
template <typename Fn>
void with_float_type(const TensorView& view, const char* op, const char* argument, Fn&& fn) {
  switch (view.dtype()) {
    case DType::kF32:
      return fn(static_cast<float*>(nullptr));
    case DType::kBF16:
      return fn(static_cast<bf16*>(nullptr));
    case DType::kF16:
      return fn(static_cast<fp16*>(nullptr));
    default:
      fail_type(op, argument, "float32, bfloat16 or float16", view.describe());
  }
}

struct Layout {
  const char* op;
  DType codes;
  int64_t elements_per_byte;
};

// `dense` is the float tensor of either direction, named `name` in messages.
void check(const Layout& layout, const TensorView& dense, const char* name, const TensorView& codes,
           const TensorView& absmax, int64_t block_size) {
  const int64_t n = dense.numel();
  ts::check(block_size >= 2 && block_size % 2 == 0, layout.op, "block_size", "an even integer >= 2",
            std::to_string(block_size));
  if (!dense.is_contiguous()) fail_value(layout.op, name, "a contiguous tensor", dense.describe());
  expect(codes, layout.op, "codes", layout.codes);
  expect_numel(codes, layout.op, "codes",
               n / layout.elements_per_byte + n % layout.elements_per_byte);
  expect(absmax, layout.op, "absmax", DType::kF32);
  expect_numel(absmax, layout.op, "absmax", n / block_size + (n % block_size != 0));
  expect_same_device(codes, dense, layout.op, "codes");
  expect_same_device(absmax, dense, layout.op, "absmax");
  expect_no_cuda_missing(dense, layout.op);
}

void quantize_nf4(TensorView x, TensorView codes, TensorView absmax, int64_t block_size,
                  int threads) {
  const char* op = "quantize_nf4";
  check({op, DType::kU8, 2}, x, "x", codes, absmax, block_size);
  with_float_type(x, op, "x", [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
#if defined(TS_WITH_CUDA)
    if (x.is_cuda()) {
      DeviceGuard guard(x.device_id());
      quant::launch_quantize_nf4(x.data(), x.dtype(), codes.data<uint8_t>(), absmax.data<float>(),
                                 x.numel(), block_size, x.current_stream());
      return;
    }
#endif
    const int count = thread_count(threads);
    nb::gil_scoped_release released;
    TS_ISA_CALL(quant, quantize_nf4, x.data<const T>(), codes.data<uint8_t>(), absmax.data<float>(),
                x.numel(), block_size, count);
  });
}

void dequantize_nf4(TensorView codes, TensorView absmax, TensorView out, int64_t block_size,
                    int threads) {
  const char* op = "dequantize_nf4";
  check({op, DType::kU8, 2}, out, "out", codes, absmax, block_size);
  with_float_type(out, op, "out", [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
#if defined(TS_WITH_CUDA)
    if (out.is_cuda()) {
      DeviceGuard guard(out.device_id());
      quant::launch_dequantize_nf4(codes.data<uint8_t>(), absmax.data<float>(), out.data(),
                                   out.dtype(), out.numel(), block_size, out.current_stream());
      return;
    }
#endif
    const int count = thread_count(threads);
    nb::gil_scoped_release released;
    TS_ISA_CALL(quant, dequantize_nf4, codes.data<uint8_t>(), absmax.data<float>(), out.data<T>(),
                out.numel(), block_size, count);
  });
}

void quantize_int8(TensorView x, TensorView codes, TensorView absmax, int64_t block_size,
                   int threads) {
  const char* op = "quantize_int8";
  check({op, DType::kI8, 1}, x, "x", codes, absmax, block_size);
  with_float_type(x, op, "x", [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
#if defined(TS_WITH_CUDA)
    if (x.is_cuda()) {
      DeviceGuard guard(x.device_id());
      quant::launch_quantize_int8(x.data(), x.dtype(), codes.data<int8_t>(), absmax.data<float>(),
                                  x.numel(), block_size, x.current_stream());
      return;
    }
#endif
    const int count = thread_count(threads);
    nb::gil_scoped_release released;
    TS_ISA_CALL(quant, quantize_int8, x.data<const T>(), codes.data<int8_t>(), absmax.data<float>(),
                x.numel(), block_size, count);
  });
}

void dequantize_int8(TensorView codes, TensorView absmax, TensorView out, int64_t block_size,
                     int threads) {
  const char* op = "dequantize_int8";
  check({op, DType::kI8, 1}, out, "out", codes, absmax, block_size);
  with_float_type(out, op, "out", [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
#if defined(TS_WITH_CUDA)
    if (out.is_cuda()) {
      DeviceGuard guard(out.device_id());
      quant::launch_dequantize_int8(codes.data<int8_t>(), absmax.data<float>(), out.data(),
                                    out.dtype(), out.numel(), block_size, out.current_stream());
      return;
    }
#endif
    const int count = thread_count(threads);
    nb::gil_scoped_release released;
    TS_ISA_CALL(quant, dequantize_int8, codes.data<int8_t>(), absmax.data<float>(), out.data<T>(),
                out.numel(), block_size, count);
  });
}

}  // namespace

NB_MODULE(_C, m) {
  init_module(m);
  m.def("quantize_nf4", &quantize_nf4, nb::arg("x"), nb::arg("codes"), nb::arg("absmax"),
        nb::arg("block_size"), nb::arg("threads") = 0);
  m.def("dequantize_nf4", &dequantize_nf4, nb::arg("codes"), nb::arg("absmax"), nb::arg("out"),
        nb::arg("block_size"), nb::arg("threads") = 0);
  m.def("quantize_int8", &quantize_int8, nb::arg("x"), nb::arg("codes"), nb::arg("absmax"),
        nb::arg("block_size"), nb::arg("threads") = 0);
  m.def("dequantize_int8", &dequantize_int8, nb::arg("codes"), nb::arg("absmax"), nb::arg("out"),
        nb::arg("block_size"), nb::arg("threads") = 0);
}
