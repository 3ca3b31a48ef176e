// Copies beside the computation: on a GPU one stream per direction and device, on the CPU one
// thread per direction.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "device.h"
#include "job.h"

namespace ts::paging {

enum class Direction : int { kH2D = 0, kD2H = 1 };

struct Copy {
  Direction direction = Direction::kH2D;
  void* dst = nullptr;
  const void* src = nullptr;
  int64_t bytes = 0;
  int device = -1;         // -1: both sides are host memory
  void* stream = nullptr;  // the copy starts after the work that this stream holds now
};

class CopyEngine {
 public:
  explicit CopyEngine(int64_t chunk_bytes) : chunk_(chunk_bytes) {}
  ~CopyEngine() { close(); }
  // Starts the copy; what goes wrong is told by the job. The memory must live until it is finished.
  void submit(const std::shared_ptr<Job>& job, const Copy& copy);
  // Waits for everything submitted, ends threads and streams. submit fails from then on.
  void close();

 private:
  // Copies of one direction on one device, in order.
  struct Lane {
    std::unique_ptr<device::Stream> stream;
    Worker worker;
  };
  std::shared_ptr<Lane> lane(const Copy& copy);
  void submit_device(const std::shared_ptr<Job>& job, const Copy& copy, Lane& lane);

  const int64_t chunk_;
  std::mutex mutex_;
  bool closed_ = false;
  std::map<std::pair<int, int>, std::shared_ptr<Lane>> lanes_;
};

// Test hook: let `n` more copies go well, then fail one (n < 0: none).
void fail_copy_after(int64_t n);

}  // namespace ts::paging
