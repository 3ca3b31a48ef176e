#include "device.h"

#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "ts/cuda.h"

namespace ts::paging::device {

#if defined(TS_WITH_CUDA)

namespace {

// Events are made once and used again: making one takes longer than recording it.
class EventPool {
 public:
  DeviceEvent take(int device) {
    cudaEvent_t event = nullptr;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      std::vector<cudaEvent_t>& free = free_[device];
      if (!free.empty()) {
        event = free.back();
        free.pop_back();
      }
    }
    if (!event)
      cuda_check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync),
                 "copy");
    return DeviceEvent(event, [this, device](void* used) {
      // After a fork the mutex may be held by a thread that is not there.
      if (getpid() != owner_) return;
      const std::lock_guard<std::mutex> lock(mutex_);
      free_[device].push_back(static_cast<cudaEvent_t>(used));
    });
  }

 private:
  const int owner_ = getpid();
  std::mutex mutex_;
  std::map<int, std::vector<cudaEvent_t>> free_;
};

// Never destroyed: jobs may outlive static destruction, and the driver takes back events at exit.
EventPool& events() {
  static EventPool* pool = new EventPool;
  return *pool;
}

bool pinned_at(const void* data) {
  cudaPointerAttributes attributes{};
  if (cudaPointerGetAttributes(&attributes, data) != cudaSuccess) {
    (void)cudaGetLastError();
    return false;
  }
  return attributes.type == cudaMemoryTypeHost || attributes.type == cudaMemoryTypeManaged;
}

}  // namespace

std::string pin(void* data, int64_t bytes, int device) {
  cudaError_t status;
  try {
    const DeviceGuard guard(device);
    // Portable: page-locked for every device, not only for this one.
    status = cudaHostRegister(data, static_cast<size_t>(bytes), cudaHostRegisterPortable);
  } catch (const std::exception& error) {
    return error.what();
  }
  if (status == cudaSuccess) return "";
  // A refusal stays the thread's last error, and the next kernel launch would be blamed for it.
  (void)cudaGetLastError();
  return std::string("CUDA: ") + cudaGetErrorString(status);
}

void unpin(void* data) {
  if (cudaHostUnregister(data) != cudaSuccess) (void)cudaGetLastError();
}

bool is_pinned(const void* data, int64_t bytes) {
  return pinned_at(data) && pinned_at(static_cast<const char*>(data) + bytes - 1);
}

int query(const DeviceEvent& event, std::string* error) {
  const cudaError_t status = cudaEventQuery(static_cast<cudaEvent_t>(event.get()));
  if (status == cudaSuccess) return 1;
  (void)cudaGetLastError();
  if (status == cudaErrorNotReady) return 0;
  *error = cudaGetErrorString(status);
  return -1;
}

void synchronize(const DeviceEvent& event) {
  if (cudaEventSynchronize(static_cast<cudaEvent_t>(event.get())) != cudaSuccess)
    (void)cudaGetLastError();
}

DeviceEvent record(int device, void* stream) {
  const DeviceGuard guard(device);
  DeviceEvent event = events().take(device);
  cuda_check(
      cudaEventRecord(static_cast<cudaEvent_t>(event.get()), static_cast<cudaStream_t>(stream)),
      "copy");
  return event;
}

void make_wait(int device, void* stream, const DeviceEvent& event) {
  const DeviceGuard guard(device);
  cuda_check(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream),
                                 static_cast<cudaEvent_t>(event.get()), 0),
             "copy");
}

Stream::Stream(int device) : device_(device) {
  const DeviceGuard guard(device);
  int least = 0, greatest = 0;
  cuda_check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "copy");
  cudaStream_t stream = nullptr;
  cuda_check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest), "copy");
  stream_ = stream;
}

Stream::~Stream() {
  if (cudaStreamDestroy(static_cast<cudaStream_t>(stream_)) != cudaSuccess)
    (void)cudaGetLastError();
}

void Stream::copy(void* dst, const void* src, int64_t bytes, bool to_device, int64_t chunk) {
  const DeviceGuard guard(device_);
  const cudaMemcpyKind kind = to_device ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost;
  for (int64_t at = 0; at < bytes; at += chunk)
    cuda_check(cudaMemcpyAsync(static_cast<char*>(dst) + at, static_cast<const char*>(src) + at,
                               static_cast<size_t>(std::min(chunk, bytes - at)), kind,
                               static_cast<cudaStream_t>(stream_)),
               "copy");
}

#else

namespace {

[[noreturn]] void no_cuda() {
  throw std::runtime_error(
      "[copy] this build has no CUDA: reinstall the package with a CUDA compiler (nvcc) on PATH or "
      "CUDA_HOME set");
}

}  // namespace

std::string pin(void*, int64_t, int) { return "this build has no CUDA"; }
void unpin(void*) {}
bool is_pinned(const void*, int64_t) { return false; }
int query(const DeviceEvent&, std::string*) { return 1; }
void synchronize(const DeviceEvent&) {}
DeviceEvent record(int, void*) { no_cuda(); }
void make_wait(int, void*, const DeviceEvent&) { no_cuda(); }
Stream::Stream(int device) : device_(device) { no_cuda(); }
Stream::~Stream() = default;
void Stream::copy(void*, const void*, int64_t, bool, int64_t) { no_cuda(); }

#endif

}  // namespace ts::paging::device
