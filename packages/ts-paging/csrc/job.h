// One piece of asynchronous work, how to wait for it, and the threads that carry it out.
// Plain C++: nothing here knows Python, so that worker threads never touch the interpreter.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

namespace ts::paging {

// What went wrong in a job; becomes a Python exception where the job is waited for.
struct Failure {
  enum Kind { kStorage, kDevice, kState } kind = kDevice;
  int code = 0;  // errno of a storage failure
  std::string text;
  std::string path;  // file of a storage failure
};

// For test hooks: `hit` is true once, after `n` calls that were not; n < 0: never.
class Countdown {
 public:
  void set(int64_t n) { left_ = n; }
  bool hit() {
    int64_t left = left_.load();
    while (left >= 0)
      if (left_.compare_exchange_weak(left, left - 1)) return left == 0;
    return false;
  }

 private:
  std::atomic<int64_t> left_{-1};
};

// How a host thread waits: look for spin_us, then sleep sleep_us between looks (poll); look without
// end (spin); sleep until signalled (block).
struct WaitPolicy {
  enum Mode { kPoll, kSpin, kBlock } mode = kPoll;
  int64_t spin_us = 50;
  int64_t sleep_us = 100;
};

// A cudaEvent_t that returns to its pool with the last reference; null on the CPU.
using DeviceEvent = std::shared_ptr<void>;

class Job {
 public:
  explicit Job(int64_t bytes, std::shared_ptr<std::atomic<int64_t>> inflight = nullptr);
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  int64_t bytes() const { return bytes_; }
  // The host has handed all of it to the device (or is through with it): wait_on_device can be
  // used.
  bool submitted() const { return state_.load(std::memory_order_acquire) != kQueued; }
  // Looks once, never blocks. True after a failure as well.
  bool finished();
  // Waits until finished, at most timeout_us; returns finished().
  bool wait(const WaitPolicy& policy, int64_t timeout_us);
  // The same for submitted().
  bool wait_submitted(const WaitPolicy& policy, int64_t timeout_us);
  // Makes `stream` of `device` wait for the copy. Only after submitted().
  void wait_on_device(int device, void* stream);
  // What the device reaches when the copy is through; null before submitted() and on the CPU.
  DeviceEvent event() const { return submitted() ? event_ : nullptr; }
  // Null: it went well, or it has not finished.
  std::shared_ptr<const Failure> failure();

  // For whoever carries it out. The first of complete and fail counts.
  void submit_event(DeviceEvent event);
  void complete();
  void fail(Failure failure);

 private:
  enum State : int { kQueued, kSubmitted, kDone };
  void settle(std::shared_ptr<const Failure> failure);
  template <typename Look, typename Sleep>
  bool wait_for(const WaitPolicy& policy, int64_t timeout_us, Look look, Sleep sleep);

  const int64_t bytes_;
  std::shared_ptr<std::atomic<int64_t>> inflight_;
  std::atomic<int> state_{kQueued};
  DeviceEvent event_;  // set before state_ becomes kSubmitted, constant from then on
  std::shared_ptr<const Failure> failure_;
  std::mutex mutex_;
  std::condition_variable changed_;
};

// Starts a thread in which no signal is delivered: Python's handlers belong to its main thread, and
// SIGXFSZ must become an error code.
std::thread quiet_thread(std::function<void()> body);

// A moment's pause in a loop that looks without end.
void pause_briefly();

}  // namespace ts::paging
