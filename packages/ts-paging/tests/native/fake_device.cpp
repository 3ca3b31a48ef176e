#include "fake_device.h"

#include <string.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>

#include "device.h"

namespace {

class Event {
 public:
  void reach() {
    const std::lock_guard<std::mutex> lock(mutex_);
    reached_ = true;
    changed_.notify_all();
  }
  bool reached() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return reached_;
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return reached_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
};

class Queue {
 public:
  Queue() : thread_([this] { run(); }) {}
  ~Queue() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
      wake_.notify_all();
    }
    thread_.join();
  }
  void post(std::function<void()> work) {
    const std::lock_guard<std::mutex> lock(mutex_);
    work_.push_back(std::move(work));
    wake_.notify_all();
  }

 private:
  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      wake_.wait(lock, [this] { return stop_ || !work_.empty(); });
      if (work_.empty()) return;
      const std::function<void()> work = std::move(work_.front());
      work_.pop_front();
      lock.unlock();
      work();
      lock.lock();
    }
  }
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> work_;
  bool stop_ = false;
  std::thread thread_;
};

struct Stream {
  Queue queue;
  std::shared_ptr<Event> gate;  // of the test's streams
};

std::mutex seen_mutex;
std::vector<const void*> seen;
const char* pageable_begin = nullptr;
const char* pageable_end = nullptr;
ts::paging::Countdown transfers_until_failure;
std::atomic<bool> refusing{false};

Event* event_of(const ts::paging::DeviceEvent& event) { return static_cast<Event*>(event.get()); }

bool pageable(const void* data) {
  const std::lock_guard<std::mutex> lock(seen_mutex);
  const char* at = static_cast<const char*>(data);
  return at >= pageable_begin && at < pageable_end;
}

}  // namespace

namespace fake {

Gate::Gate() : stream_(new Stream) {}
Gate::~Gate() { delete static_cast<Stream*>(stream_); }
void Gate::close() {
  auto* stream = static_cast<Stream*>(stream_);
  stream->gate = std::make_shared<Event>();
  stream->queue.post([gate = stream->gate] { gate->wait(); });
}
void Gate::open() { static_cast<Stream*>(stream_)->gate->reach(); }

std::vector<const void*> transfers() {
  const std::lock_guard<std::mutex> lock(seen_mutex);
  return seen;
}
void forget_transfers() {
  const std::lock_guard<std::mutex> lock(seen_mutex);
  seen.clear();
}
void set_pageable(const void* data, int64_t bytes) {
  const std::lock_guard<std::mutex> lock(seen_mutex);
  pageable_begin = static_cast<const char*>(data);
  pageable_end = pageable_begin + bytes;
}
void refuse_pinning(bool on) { refusing = on; }
void fail_transfer_after(int64_t n) { transfers_until_failure.set(n); }

}  // namespace fake

namespace ts::paging::device {

std::string pin(void*, int64_t, int) { return refusing ? "refused" : ""; }
void unpin(void*) {}
bool is_pinned(const void* data, int64_t, int) { return !pageable(data); }
int query(const DeviceEvent& event, std::string*) { return event_of(event)->reached() ? 1 : 0; }
void synchronize(const DeviceEvent& event) { event_of(event)->wait(); }
DeviceEvent record(int, void* stream) {
  auto event = std::make_shared<Event>();
  if (stream)
    static_cast<::Stream*>(stream)->queue.post([event] { event->reach(); });
  else
    event->reach();
  return event;
}
void make_wait(int, void* stream, const DeviceEvent& event) {
  static_cast<::Stream*>(stream)->queue.post([event] { event_of(event)->wait(); });
}
Stream::Stream(int device) : device_(device), stream_(new ::Stream) {}
Stream::~Stream() { delete static_cast<::Stream*>(stream_); }
void Stream::copy(void* dst, const void* src, int64_t bytes, bool to_device) {
  if (transfers_until_failure.hit()) throw std::runtime_error("a transfer failed");
  auto done = std::make_shared<Event>();
  static_cast<::Stream*>(stream_)->queue.post([=] {
    memcpy(dst, src, static_cast<size_t>(bytes));
    {
      const std::lock_guard<std::mutex> lock(seen_mutex);
      seen.push_back(dst);
    }
    done->reach();
  });
  if (pageable(to_device ? src : dst)) done->wait();
}

}  // namespace ts::paging::device
