// Page-locked buffers that copies from and to ordinary memory go through, and the threads that fill
// and empty them: faster than the driver's own staging, which blocks its caller and uses one
// thread.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "host_memory.h"
#include "job.h"

namespace ts::paging {

class Staging {
 public:
  static constexpr int64_t kBytes = int64_t{8} << 20;
  static constexpr int kCount = 3;

  struct Buffer {
    char* data = nullptr;
    DeviceEvent used;  // reached when the device is through with it; null: free
  };

  // Null if page-locking is refused.
  static std::unique_ptr<Staging> make(int device);
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  // The buffer whose turn it is.
  Buffer& next() { return buffers_[static_cast<size_t>(turn_++ % kCount)]; }
  // memcpy by several threads; one caller at a time.
  void copy(void* dst, const void* src, int64_t bytes);

 private:
  explicit Staging(const HostBlock& block);
  void loop(int64_t index);
  void copy_share(int64_t index);

  HostBlock block_;
  Buffer buffers_[kCount];
  int64_t turn_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::thread> threads_;
  char* dst_ = nullptr;
  const char* src_ = nullptr;
  int64_t bytes_ = 0;
  int64_t round_ = 0;  // copies so far; a thread does its share of each
  int64_t busy_ = 0;
  bool stop_ = false;
};

// Test hook: threads of what is made from now on; 0: by the number of cores.
void set_staging_threads(int64_t n);

}  // namespace ts::paging
