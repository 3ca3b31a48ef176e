// ts::TensorView: how a torch tensor enters native code, through DLPack's C exchange table
// (torch >= 2.10). A call with four tensors costs about 0.4 us this way.
//
// The view borrows the tensor: it is valid only during the call. A thread or a pending copy that
// outlives the call must hold the Python object itself. Bindings only: kernels take plain pointers.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "ts/checks.h"
#include "ts/cuda.h"
#include "ts/dlpack.h"
#include "ts/dtype.h"

namespace ts {

class TensorView {
 public:
  TensorView() = default;
  TensorView(const dl::Tensor& tensor, const dl::ExchangeApi* api) : tensor_(tensor), api_(api) {}

  template <typename T = void>
  T* data() const {
    return reinterpret_cast<T*>(static_cast<char*>(tensor_.data) + tensor_.byte_offset);
  }
  DType dtype() const { return dtype_of(tensor_.dtype); }
  int ndim() const { return tensor_.ndim; }
  int64_t shape(int axis) const { return tensor_.shape[axis]; }
  int64_t stride(int axis) const { return tensor_.strides[axis]; }
  int64_t numel() const {
    int64_t n = 1;
    for (int i = 0; i < tensor_.ndim; ++i) n *= tensor_.shape[i];
    return n;
  }
  int64_t nbytes() const { return numel() * ((tensor_.dtype.bits + 7) / 8); }
  bool is_cuda() const {
    return tensor_.device.type == dl::kCUDA || tensor_.device.type == dl::kCUDAManaged;
  }
  bool is_cpu() const {
    return tensor_.device.type == dl::kCPU || tensor_.device.type == dl::kCUDAHost;
  }
  int device_id() const { return tensor_.device.id; }
  bool is_contiguous() const {
    int64_t expected = 1;
    for (int i = tensor_.ndim - 1; i >= 0; --i) {
      if (tensor_.shape[i] == 1) continue;
      if (tensor_.strides[i] != expected) return numel() == 0;
      expected *= tensor_.shape[i];
    }
    return true;
  }
  std::string describe() const {
    std::string text = std::string(name_of(dtype())) + "[";
    for (int i = 0; i < tensor_.ndim; ++i)
      text += (i ? ", " : "") + std::to_string(tensor_.shape[i]);
    return text + "] on " +
           (is_cuda() ? "cuda:" + std::to_string(tensor_.device.id) : std::string("cpu"));
  }
  // torch's current stream on this tensor's device (null on the CPU).
  void* current_stream() const {
    void* stream = nullptr;
    if (is_cuda() && api_->current_stream(tensor_.device.type, tensor_.device.id, &stream) != 0)
      throw nanobind::python_error();
    return stream;
  }

 private:
  dl::Tensor tensor_{};
  const dl::ExchangeApi* api_ = nullptr;
};

// The usual checks of one argument, in one call: dtype, contiguity, device of `like` if given.
inline void expect(const TensorView& t, const char* op, const char* argument, DType dtype) {
  if (t.dtype() != dtype) fail_type(op, argument, name_of(dtype), t.describe());
  if (!t.is_contiguous()) fail_value(op, argument, "a contiguous tensor", t.describe());
}

inline void expect_numel(const TensorView& t, const char* op, const char* argument, int64_t n) {
  if (t.numel() != n) fail_value(op, argument, std::to_string(n) + " elements", t.describe());
}

inline void expect_same_device(const TensorView& t, const TensorView& like, const char* op,
                               const char* argument) {
  if (t.is_cuda() != like.is_cuda() || (t.is_cuda() && t.device_id() != like.device_id()))
    fail_value(op, argument, "the device of " + like.describe(), t.describe());
}

inline void expect_no_cuda_missing(const TensorView& t, const char* op) {
#if !defined(TS_WITH_CUDA)
  if (t.is_cuda())
    throw std::runtime_error("[" + std::string(op) +
                             "] this build has no CUDA kernels; reinstall the package with a CUDA "
                             "compiler (nvcc) on PATH or CUDA_HOME set");
#else
  (void)t;
  (void)op;
#endif
}

namespace detail {

// The exchange table of `type`, cached: torch.Tensor, torch.nn.Parameter and subclasses share one.
inline const dl::ExchangeApi* exchange_api(PyObject* type) {
  static PyObject* cached_type = nullptr;
  static const dl::ExchangeApi* cached_api = nullptr;
  static PyObject* cached_type2 = nullptr;
  if (type == cached_type || type == cached_type2) return cached_api;
  PyObject* capsule = PyObject_GetAttrString(type, "__dlpack_c_exchange_api__");
  if (!capsule) {
    PyErr_Clear();
    return nullptr;
  }
  auto* api =
      static_cast<const dl::ExchangeApi*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  Py_DECREF(capsule);
  if (!api) {
    PyErr_Clear();
    return nullptr;
  }
  while (api && api->version.major != 1) api = api->previous;
  if (api && (!cached_api || cached_api == api)) {
    cached_api = api;
    PyObject*& place = cached_type ? cached_type2 : cached_type;
    if (!place) {
      Py_INCREF(type);  // types live as long as the process; the cache must not dangle
      place = type;
    }
  }
  return api;
}

}  // namespace detail

// Registers the translation of ts::type_error; call once in every NB_MODULE.
inline void register_errors() {
  nanobind::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const ts::type_error& e) {
      PyErr_SetString(PyExc_TypeError, e.what());
    }
  });
}

}  // namespace ts

namespace nanobind::detail {

template <>
struct type_caster<ts::TensorView> {
  NB_TYPE_CASTER(ts::TensorView, const_name("torch.Tensor"))

  bool from_python(handle src, uint8_t, cleanup_list*) {
    const ts::dl::ExchangeApi* api =
        ts::detail::exchange_api(reinterpret_cast<PyObject*>(src.type().ptr()));
    if (!api) return false;
    ts::dl::Tensor tensor{};
    if (api->tensor_from_object(src.ptr(), &tensor) != 0) throw python_error();
    value = ts::TensorView(tensor, api);
    if (!tensor.data && value.numel() != 0)
      throw std::invalid_argument(
          "a tensor without storage (fake, meta or functional) reached a native kernel");
    return true;
  }
};

}  // namespace nanobind::detail
