#include "job.h"

#include <pthread.h>
#include <signal.h>

#include <chrono>
#include <stdexcept>
#include <utility>

#include "device.h"

namespace ts::paging {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

}  // namespace

void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

Job::Job(int64_t bytes, std::shared_ptr<std::atomic<int64_t>> inflight)
    : bytes_(bytes), inflight_(std::move(inflight)) {
  if (inflight_) inflight_->fetch_add(bytes_, std::memory_order_relaxed);
}

void Job::settle(std::shared_ptr<const Failure> failure) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (state_.load(std::memory_order_relaxed) == kDone) return;
  failure_ = std::move(failure);
  state_.store(kDone, std::memory_order_release);
  if (inflight_) inflight_->fetch_sub(bytes_, std::memory_order_relaxed);
  changed_.notify_all();
}

void Job::submit_event(DeviceEvent event) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (state_.load(std::memory_order_relaxed) != kQueued) return;
  event_ = std::move(event);
  state_.store(kSubmitted, std::memory_order_release);
  changed_.notify_all();
}

void Job::complete() { settle(nullptr); }

void Job::fail(Failure failure) { settle(std::make_shared<const Failure>(std::move(failure))); }

bool Job::finished() {
  const int state = state_.load(std::memory_order_acquire);
  if (state == kDone) return true;
  if (state == kQueued) return false;
  std::string error;
  const int reached = device::query(event_, &error);
  if (reached == 0) return false;
  if (reached > 0)
    complete();
  else
    fail({Failure::kDevice, 0, "[copy] CUDA: " + error, ""});
  return true;
}

std::shared_ptr<const Failure> Job::failure() {
  if (!finished()) return nullptr;
  const std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

template <typename Look, typename Sleep>
bool Job::wait_for(const WaitPolicy& policy, int64_t timeout_us, Look look, Sleep sleep) {
  const Clock::time_point start = Clock::now();
  const Clock::time_point deadline = start + microseconds(timeout_us);
  const Clock::time_point spin_until =
      policy.mode == WaitPolicy::kSpin ? deadline : start + microseconds(policy.spin_us);
  while (true) {
    if (look()) return true;
    const Clock::time_point now = Clock::now();
    if (now >= deadline) return false;
    if (policy.mode == WaitPolicy::kBlock) {
      sleep(deadline);
    } else if (now < spin_until) {
      pause_briefly();
    } else {
      std::this_thread::sleep_for(microseconds(policy.sleep_us));
    }
  }
}

bool Job::wait(const WaitPolicy& policy, int64_t timeout_us) {
  return wait_for(
      policy, timeout_us, [this] { return finished(); },
      [this](Clock::time_point deadline) {
        if (submitted()) {
          // finished() said no, so there is an event.
          device::synchronize(event_);
          return;
        }
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait_until(lock, deadline, [this] { return submitted(); });
      });
}

bool Job::wait_submitted(const WaitPolicy& policy, int64_t timeout_us) {
  return wait_for(
      policy, timeout_us, [this] { return submitted(); },
      [this](Clock::time_point deadline) {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait_until(lock, deadline, [this] { return submitted(); });
      });
}

void Job::wait_on_device(int device, void* stream) {
  if (event_ && !finished()) device::make_wait(device, stream, event_);
}

std::thread quiet_thread(std::function<void()> body) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread;
  try {
    thread = std::thread(std::move(body));
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return thread;
}

}  // namespace ts::paging
