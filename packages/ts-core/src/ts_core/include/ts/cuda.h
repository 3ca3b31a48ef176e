// CUDA helpers for bindings and launchers. Kernels never see torch: streams arrive as pointers.
#pragma once

#if defined(TS_WITH_CUDA)

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace ts {

inline void cuda_check(cudaError_t status, const char* op) {
  if (status == cudaSuccess) return;
  // Clears the thread's sticky last error, so that a later launch is not blamed for this one.
  (void)cudaGetLastError();
  throw std::runtime_error("[" + std::string(op) + "] CUDA: " + cudaGetErrorString(status));
}

inline void cuda_check_launch(const char* op) { cuda_check(cudaGetLastError(), op); }

// Makes `device` current for the scope and restores what was current before.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    cuda_check(cudaGetDevice(&previous_), "device_guard");
    if (previous_ != device) {
      cuda_check(cudaSetDevice(device), "device_guard");
      changed_ = true;
    }
  }
  ~DeviceGuard() {
    if (changed_) (void)cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

}  // namespace ts

#endif  // TS_WITH_CUDA
