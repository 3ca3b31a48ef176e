// What the bindings of all codecs share: the switch over float types and the checks of block-wise
// formats. Included by bind_*.cpp only; each of them defines one function declared here.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <type_traits>

#include "ts/module.h"
#include "ts/numeric.h"

namespace ts::quant {

namespace nb = nanobind;

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

// Runs a kernel where `dense` is: gpu(stream) with its device current, or cpu(data, threads)
// without the GIL, `data` being that of `dense` by its type: float, bf16 or fp16.
template <typename Gpu, typename Cpu>
void run(const TensorView& dense, const char* op, const char* name, int threads,
         [[maybe_unused]] Gpu&& gpu, Cpu&& cpu) {
  with_float_type(dense, op, name, [&](auto* type) {
#if defined(TS_WITH_CUDA)
    if (dense.is_cuda()) {
      DeviceGuard guard(dense.device_id());
      return gpu(dense.current_stream());
    }
#endif
    const int workers = thread_count(threads);
    nb::gil_scoped_release released;
    cpu(dense.data<std::remove_pointer_t<decltype(type)>>(), workers);
  });
}

struct BlockLayout {
  const char* op;
  DType codes;
  int64_t elements_per_byte;
};

inline int64_t pieces(int64_t n, int64_t size) { return n / size + (n % size != 0); }

// `dense` is the float tensor of either direction, named `name` in messages.
inline void check_codes(const BlockLayout& layout, const TensorView& dense, const char* name,
                        const TensorView& codes, int64_t block_size) {
  ts::check(block_size >= 2 && block_size % 2 == 0, layout.op, "block_size", "an even integer >= 2",
            std::to_string(block_size));
  if (!dense.is_contiguous()) fail_value(layout.op, name, "a contiguous tensor", dense.describe());
  expect(codes, layout.op, "codes", layout.codes);
  expect_numel(codes, layout.op, "codes", pieces(dense.numel(), layout.elements_per_byte));
  expect_same_device(codes, dense, layout.op, "codes");
  expect_no_cuda_missing(dense, layout.op);
}

// The same, with one fp32 per block.
inline void check_blocks(const BlockLayout& layout, const TensorView& dense, const char* name,
                         const TensorView& codes, const TensorView& absmax, int64_t block_size) {
  check_codes(layout, dense, name, codes, block_size);
  expect(absmax, layout.op, "absmax", DType::kF32);
  expect_numel(absmax, layout.op, "absmax", pieces(dense.numel(), block_size));
  expect_same_device(absmax, dense, layout.op, "absmax");
}

void bind_bnb(nb::module_& m);
void bind_fp_published(nb::module_& m);
void bind_gguf(nb::module_& m);
void bind_groups(nb::module_& m);
void bind_fp8(nb::module_& m);
void bind_int8(nb::module_& m);
void bind_nested(nb::module_& m);
void bind_nf4(nb::module_& m);
void bind_nvfp4(nb::module_& m);
void bind_operands(nb::module_& m);

}  // namespace ts::quant
