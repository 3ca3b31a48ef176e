// Copies beside the computation: on a GPU one stream per direction and device, on the CPU one
// thread per direction. What is needed next goes first: a lane hands the device only a window of
// bytes at a time, and a copy that is waited for passes those that are still queued.
#pragma once

#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "device.h"
#include "job.h"
#include "staging.h"

namespace ts::paging {

enum class Direction : int { kH2D = 0, kD2H = 1 };

struct Part {
  void* dst = nullptr;
  const void* src = nullptr;
  int64_t bytes = 0;
};

struct Copy {
  Direction direction = Direction::kH2D;
  std::vector<Part> parts;
  int device = -1;         // -1: both sides are host memory
  void* stream = nullptr;  // the copy starts after the work that this stream holds now
  int priority = 0;        // higher goes first; above 0 it does not wait for the window either
  std::vector<DeviceEvent> after;  // and after these

  int64_t bytes() const {
    int64_t sum = 0;
    for (const Part& part : parts) sum += part.bytes;
    return sum;
  }
};

// Copies of one direction on one device. Of equal priority they run in the order of submit; a copy
// never passes one that shares memory with it.
class Lane {
 public:
  Lane(int device, bool to_device, int64_t chunk_bytes, int64_t window_bytes, WaitPolicy policy);
  ~Lane() { close(); }
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  void submit(const std::shared_ptr<Job>& job, Copy copy);
  // The copy is needed now: it passes what is queued. Nothing happens if it has begun to run.
  void promote(const std::shared_ptr<Job>& job);
  // Carries out what was submitted, then joins the thread. submit fails from then on.
  void close();

 private:
  struct Order {
    std::shared_ptr<Job> job;
    Copy copy;
    uint64_t number = 0;
    DeviceEvent ready;
    bool pageable = false;
    bool begun = false;  // the stream waits for `ready` already
    size_t part = 0;     // what is left: from byte `at` of this part on
    int64_t at = 0;
  };
  using OrderPtr = std::shared_ptr<Order>;

  // All of these are called with the lock held.
  void enqueue(const OrderPtr& order);
  void drop(const OrderPtr& order);
  OrderPtr pick() const;
  OrderPtr blocker(const Order& order) const;
  bool rush(const OrderPtr& order);
  void advance();
  bool has_room();
  bool hand_over(const OrderPtr& order);
  Part next_piece(Order& order, int64_t most) const;
  void wake();

  void loop();
  void run_pageable(const OrderPtr& order);
  void run_directly(Order& order);
  void stage_up(Order& order);
  void stage_down(Order& order);
  void order_stream(const Order& order);
  void wait_here(const Order& order) const;
  void wait_for(const DeviceEvent& event) const;

  const int device_;
  const bool to_device_;
  const int64_t chunk_;
  const int64_t window_limit_;
  const WaitPolicy policy_;
  std::unique_ptr<device::Stream> stream_;  // null on the CPU
  std::unique_ptr<Staging> staging_;        // of the thread alone, from the first use on
  bool staging_refused_ = false;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::list<OrderPtr> queue_;  // by priority, then number
  OrderPtr running_;           // what the thread copies with the lock open
  std::deque<std::pair<DeviceEvent, int64_t>> window_;
  int64_t window_bytes_ = 0;
  uint64_t next_number_ = 0;
  bool stop_ = false;
  std::thread thread_;
};

class CopyEngine {
 public:
  CopyEngine(int64_t chunk_bytes, int64_t window_bytes, WaitPolicy policy)
      : chunk_(chunk_bytes), window_(window_bytes), policy_(policy) {}
  ~CopyEngine() { close(); }
  // Starts the copy; what goes wrong is told by the job. The memory must live until it is finished.
  // Returns the lane it is in, null if there is none.
  std::shared_ptr<Lane> submit(const std::shared_ptr<Job>& job, Copy copy);
  // Waits for everything submitted, ends threads and streams. submit fails from then on.
  void close();

 private:
  std::shared_ptr<Lane> lane(const Copy& copy);

  const int64_t chunk_;
  const int64_t window_;
  const WaitPolicy policy_;
  std::mutex mutex_;
  bool closed_ = false;
  std::map<std::pair<int, int>, std::shared_ptr<Lane>> lanes_;
};

// Test hook: let `n` more copies go well, then fail one (n < 0: none).
void fail_copy_after(int64_t n);

}  // namespace ts::paging
