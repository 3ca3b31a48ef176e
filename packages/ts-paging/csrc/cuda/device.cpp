#include "device.h"

#include <unistd.h>

#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <utility>
#include <vector>

#include "ts/cuda.h"

namespace ts::paging::device {

#if defined(TS_WITH_CUDA)

namespace {

// What a DeviceEvent points to. The device is made current to look at it: a thread without one
// would otherwise open a context on the first GPU.
struct PooledEvent {
  cudaEvent_t event;
  int device;
};

const PooledEvent& pooled(const DeviceEvent& event) {
  return *static_cast<const PooledEvent*>(event.get());
}

// Events are made once and used again: making one takes longer than recording it.
class EventPool {
 public:
  // The device must be current.
  DeviceEvent take(int device) {
    std::unique_ptr<PooledEvent> taken;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      auto& free = free_[device];
      if (!free.empty()) {
        taken = std::move(free.back());
        free.pop_back();
      }
    }
    if (!taken) {
      taken = std::make_unique<PooledEvent>(PooledEvent{nullptr, device});
      cuda_check(
          cudaEventCreateWithFlags(&taken->event, cudaEventDisableTiming | cudaEventBlockingSync),
          "copy");
    }
    return DeviceEvent(taken.release(), [this](void* used) {
      // After a fork the mutex may be held by a thread that is not there.
      if (getpid() != owner_) return;
      std::unique_ptr<PooledEvent> back(static_cast<PooledEvent*>(used));
      const std::lock_guard<std::mutex> lock(mutex_);
      free_[back->device].push_back(std::move(back));
    });
  }

 private:
  const int owner_ = getpid();
  std::mutex mutex_;
  std::map<int, std::vector<std::unique_ptr<PooledEvent>>> free_;
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

bool is_pinned(const void* data, int64_t bytes, int device) {
  const DeviceGuard guard(device);
  return pinned_at(data) && pinned_at(static_cast<const char*>(data) + bytes - 1);
}

int query(const DeviceEvent& event, std::string* error) {
  try {
    const DeviceGuard guard(pooled(event).device);
    const cudaError_t status = cudaEventQuery(pooled(event).event);
    if (status == cudaSuccess) return 1;
    (void)cudaGetLastError();
    if (status == cudaErrorNotReady) return 0;
    *error = cudaGetErrorString(status);
  } catch (const std::exception& failure) {
    *error = failure.what();
  }
  return -1;
}

void synchronize(const DeviceEvent& event) {
  try {
    const DeviceGuard guard(pooled(event).device);
    if (cudaEventSynchronize(pooled(event).event) != cudaSuccess) (void)cudaGetLastError();
  } catch (const std::exception&) {
    // The next query() tells.
  }
}

DeviceEvent record(int device, void* stream) {
  const DeviceGuard guard(device);
  DeviceEvent event = events().take(device);
  cuda_check(cudaEventRecord(pooled(event).event, static_cast<cudaStream_t>(stream)), "copy");
  return event;
}

void make_wait(int device, void* stream, const DeviceEvent& event) {
  const DeviceGuard guard(device);
  cuda_check(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), pooled(event).event, 0),
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

void Stream::copy(void* dst, const void* src, int64_t bytes, bool to_device) {
  const DeviceGuard guard(device_);
  const cudaMemcpyKind kind = to_device ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost;
  cuda_check(cudaMemcpyAsync(dst, src, static_cast<size_t>(bytes), kind,
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
bool is_pinned(const void*, int64_t, int) { return false; }
int query(const DeviceEvent&, std::string*) { return 1; }
void synchronize(const DeviceEvent&) {}
DeviceEvent record(int, void*) { no_cuda(); }
void make_wait(int, void*, const DeviceEvent&) { no_cuda(); }
Stream::Stream(int device) : device_(device) { no_cuda(); }
Stream::~Stream() = default;
void Stream::copy(void*, const void*, int64_t, bool) { no_cuda(); }

#endif

}  // namespace ts::paging::device
