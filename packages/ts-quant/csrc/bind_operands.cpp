// Operands of low-precision products: check, set the device, take the stream, dispatch.
#include "bindings.h"
#include "operands.h"

namespace ts::quant {
namespace {

void transpose(TensorView in, TensorView out, int64_t rows, int64_t columns, int threads) {
  const char* op = "transpose_bytes";
  ts::check(rows >= 0 && columns >= 0, op, "rows", "sizes >= 0", std::to_string(rows));
  expect(in, op, "codes", DType::kU8);
  expect_numel(in, op, "codes", rows * columns);
  expect(out, op, "out", DType::kU8);
  expect_numel(out, op, "out", rows * columns);
  expect_same_device(out, in, op, "out");
  expect_no_cuda_missing(in, op);
  if (rows * columns == 0) return;
#if defined(TS_WITH_CUDA)
  if (in.is_cuda()) {
    DeviceGuard guard(in.device_id());
    launch_transpose_bytes(in.data<uint8_t>(), out.data<uint8_t>(), rows, columns,
                           in.current_stream());
    return;
  }
#endif
  const int count = thread_count(threads);
  nb::gil_scoped_release released;
  TS_ISA_CALL(ts::quant, transpose_bytes, in.data<uint8_t>(), out.data<uint8_t>(), rows, columns,
              count);
}

// `like` is a CUDA tensor, whose current stream is meant; without CUDA nothing is ever captured.
uint64_t capture_of(TensorView like) {
#if defined(TS_WITH_CUDA)
  if (like.is_cuda()) return capture_id(like.current_stream());
#endif
  return 0;
}

}  // namespace

void bind_operands(nb::module_& m) {
  m.def("transpose_bytes", &transpose, nb::arg("codes"), nb::arg("out"), nb::arg("rows"),
        nb::arg("columns"), nb::arg("threads") = 0);
  m.def("capture_id", &capture_of, nb::arg("like"));
}

}  // namespace ts::quant
