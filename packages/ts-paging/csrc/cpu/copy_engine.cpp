#include "copy_engine.h"

#include <string.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <limits>
#include <stdexcept>
#include <string>

namespace ts::paging {
namespace {

using Clock = std::chrono::steady_clock;

Countdown copies_until_failure;

Failure device_failure(const std::exception& error) {
  return {Failure::kDevice, 0, error.what(), ""};
}

Failure closed_failure() { return {Failure::kState, 0, "[copy] the engine is closed", ""}; }

bool overlap(const void* a, int64_t a_bytes, const void* b, int64_t b_bytes) {
  const char* first = static_cast<const char*>(a);
  const char* second = static_cast<const char*>(b);
  return first < second + b_bytes && second < first + a_bytes;
}

// Whether the order of two copies matters: one writes what the other reads or writes.
bool conflict(const Copy& a, const Copy& b) {
  for (const Part& x : a.parts)
    for (const Part& y : b.parts)
      if (overlap(x.dst, x.bytes, y.dst, y.bytes) || overlap(x.dst, x.bytes, y.src, y.bytes) ||
          overlap(x.src, x.bytes, y.dst, y.bytes))
        return true;
  return false;
}

}  // namespace

void fail_copy_after(int64_t n) { copies_until_failure.set(n); }

Lane::Lane(int device, bool to_device, int64_t chunk_bytes, int64_t window_bytes, WaitPolicy policy)
    : device_(device),
      to_device_(to_device),
      chunk_(chunk_bytes),
      window_limit_(window_bytes),
      policy_(policy) {
  if (device_ >= 0) stream_ = std::make_unique<device::Stream>(device_);
}

void Lane::submit(const std::shared_ptr<Job>& job, Copy copy) {
  auto order = std::make_shared<Order>();
  order->job = job;
  order->copy = std::move(copy);
  if (device_ >= 0) {
    order->ready = device::record(device_, order->copy.stream);
    for (const Part& part : order->copy.parts)
      if (!device::is_pinned(to_device_ ? part.src : part.dst, part.bytes, device_))
        order->pageable = true;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (stop_) {
    job->fail(closed_failure());
    return;
  }
  order->number = next_number_++;
  enqueue(order);
  if (device_ >= 0) {
    if (order->copy.priority > 0) rush(order);
    advance();
  }
  if (!queue_.empty()) wake();
}

void Lane::promote(const std::shared_ptr<Job>& job) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = std::find_if(queue_.begin(), queue_.end(),
                                  [&job](const OrderPtr& order) { return order->job == job; });
  if (found == queue_.end()) return;
  const OrderPtr order = *found;
  order->copy.priority = std::numeric_limits<int>::max();
  drop(order);
  enqueue(order);
  if (device_ >= 0) rush(order);
}

void Lane::enqueue(const OrderPtr& order) {
  auto place = queue_.end();
  while (place != queue_.begin()) {
    const Order& other = **std::prev(place);
    if (other.copy.priority > order->copy.priority ||
        (other.copy.priority == order->copy.priority && other.number < order->number))
      break;
    --place;
  }
  queue_.insert(place, order);
}

void Lane::drop(const OrderPtr& order) { queue_.remove(order); }

// An earlier copy that this one must not pass, or null.
Lane::OrderPtr Lane::blocker(const Order& order) const {
  for (const OrderPtr& other : queue_)
    if (other->number < order.number && conflict(other->copy, order.copy)) return other;
  return nullptr;
}

// The first of the queue, or what must go before it.
Lane::OrderPtr Lane::pick() const {
  OrderPtr best = queue_.front();
  while (const OrderPtr before = blocker(*best)) best = before;
  return best;
}

// Hands a copy over whole, past the queue and the window. False: the thread must do it.
bool Lane::rush(const OrderPtr& order) {
  while (const OrderPtr before = blocker(*order))
    if (!rush(before)) return false;
  if (order->pageable || (running_ && conflict(running_->copy, order->copy))) return false;
  while (!hand_over(order)) continue;
  return true;
}

// Hands over what the window has room for, in order; leaves the rest to the thread.
void Lane::advance() {
  while (!queue_.empty() && !running_) {
    const OrderPtr next = pick();
    if (next->pageable || !has_room()) return;
    hand_over(next);
  }
}

bool Lane::has_room() {
  std::string ignored;  // a copy that failed tells it by its job
  while (!window_.empty() && device::query(window_.front().first, &ignored) != 0) {
    window_bytes_ -= window_.front().second;
    window_.pop_front();
  }
  return window_bytes_ < window_limit_;
}

// The next `most` bytes or less of what is left; none at the end.
Part Lane::next_piece(Order& order, int64_t most) const {
  while (order.part < order.copy.parts.size() && order.at == order.copy.parts[order.part].bytes) {
    ++order.part;
    order.at = 0;
  }
  if (order.part == order.copy.parts.size()) return {};
  const Part& part = order.copy.parts[order.part];
  const int64_t bytes = std::min(most, part.bytes - order.at);
  const Part piece{static_cast<char*>(part.dst) + order.at,
                   static_cast<const char*>(part.src) + order.at, bytes};
  order.at += bytes;
  return piece;
}

// Queues about a chunk of a copy on the stream. True: that was the last of it, or it failed.
bool Lane::hand_over(const OrderPtr& order) {
  try {
    if (!order->begun) {
      order_stream(*order);
      order->begun = true;
    }
    int64_t handed = 0;
    bool last = false;
    while (!last && handed < chunk_) {
      const Part piece = next_piece(*order, chunk_);
      last = piece.bytes == 0;
      if (!last) stream_->copy(piece.dst, piece.src, piece.bytes, to_device_);
      handed += piece.bytes;
    }
    // Look ahead: a copy of exactly one chunk needs no second event.
    last = last || (order->part + 1 == order->copy.parts.size() &&
                    order->at == order->copy.parts[order->part].bytes);
    DeviceEvent event = device::record(device_, stream_->get());
    window_.emplace_back(event, handed);
    window_bytes_ += handed;
    if (!last) return false;
    drop(order);
    order->job->submit_event(std::move(event));
  } catch (const std::exception& error) {
    drop(order);
    order->job->fail(device_failure(error));
  }
  return true;
}

void Lane::wake() {
  if (!thread_.joinable()) thread_ = quiet_thread([this] { loop(); });
  wake_.notify_one();
}

void Lane::loop() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    wake_.wait(lock, [this] { return stop_ || !queue_.empty(); });
    if (queue_.empty()) return;
    const OrderPtr next = pick();
    if (device_ < 0) {
      // A chunk at a time: what is promoted meanwhile passes the rest.
      const Part piece = next_piece(*next, chunk_);
      if (piece.bytes == 0) {
        drop(next);
        next->job->complete();
        continue;
      }
      lock.unlock();
      memcpy(piece.dst, piece.src, static_cast<size_t>(piece.bytes));
      lock.lock();
    } else if (next->pageable) {
      drop(next);
      running_ = next;
      lock.unlock();
      run_pageable(next);
      lock.lock();
      running_ = nullptr;
    } else if (has_room()) {
      hand_over(next);
    } else {
      const DeviceEvent oldest = window_.front().first;
      lock.unlock();
      wait_for(oldest);
      lock.lock();
    }
  }
}

// Ordinary memory goes through the staging buffers; if there are none, the call blocks while the
// driver stages the bytes.
void Lane::run_pageable(const OrderPtr& order) {
  try {
    if (!staging_ && !staging_refused_) {
      staging_ = Staging::make(device_);
      staging_refused_ = !staging_;
    }
    if (!staging_)
      run_directly(*order);
    else if (to_device_)
      stage_up(*order);
    else
      stage_down(*order);
  } catch (const std::exception& error) {
    order->job->fail(device_failure(error));
  }
}

void Lane::order_stream(const Order& order) {
  device::make_wait(device_, stream_->get(), order.ready);
  for (const DeviceEvent& event : order.copy.after)
    device::make_wait(device_, stream_->get(), event);
}

// For bytes that the host reads, not the device: what they wait for has to be over.
void Lane::wait_here(const Order& order) const {
  wait_for(order.ready);
  for (const DeviceEvent& event : order.copy.after) wait_for(event);
}

void Lane::run_directly(Order& order) {
  if (to_device_) wait_here(order);
  order_stream(order);
  for (Part piece = next_piece(order, chunk_); piece.bytes > 0; piece = next_piece(order, chunk_))
    stream_->copy(piece.dst, piece.src, piece.bytes, to_device_);
  order.job->submit_event(device::record(device_, stream_->get()));
}

void Lane::stage_up(Order& order) {
  wait_here(order);
  order_stream(order);
  DeviceEvent last;
  const int64_t most = std::min(chunk_, Staging::kBytes);
  for (Part piece = next_piece(order, most); piece.bytes > 0; piece = next_piece(order, most)) {
    Staging::Buffer& buffer = staging_->next();
    if (buffer.used) wait_for(buffer.used);
    staging_->copy(buffer.data, piece.src, piece.bytes);
    stream_->copy(piece.dst, buffer.data, piece.bytes, true);
    buffer.used = last = device::record(device_, stream_->get());
  }
  order.job->submit_event(std::move(last));
}

void Lane::stage_down(Order& order) {
  order_stream(order);
  std::deque<std::pair<Part, DeviceEvent>> arriving;
  const auto empty_oldest = [&] {
    const auto [piece, event] = arriving.front();
    arriving.pop_front();
    wait_for(event);
    std::string error;
    if (device::query(event, &error) < 0) throw std::runtime_error("[copy] CUDA: " + error);
    staging_->copy(piece.dst, piece.src, piece.bytes);
  };
  const int64_t most = std::min(chunk_, Staging::kBytes);
  for (Part piece = next_piece(order, most); piece.bytes > 0; piece = next_piece(order, most)) {
    if (arriving.size() == Staging::kCount) empty_oldest();
    Staging::Buffer& buffer = staging_->next();
    if (buffer.used) wait_for(buffer.used);
    stream_->copy(buffer.data, piece.src, piece.bytes, false);
    buffer.used = device::record(device_, stream_->get());
    arriving.push_back({{piece.dst, buffer.data, piece.bytes}, buffer.used});
  }
  while (!arriving.empty()) empty_oldest();
  order.job->complete();
}

void Lane::wait_for(const DeviceEvent& event) const {
  if (policy_.mode == WaitPolicy::kBlock) return device::synchronize(event);
  const Clock::time_point spin_until = Clock::now() + std::chrono::microseconds(policy_.spin_us);
  std::string ignored;
  while (device::query(event, &ignored) == 0) {
    if (policy_.mode == WaitPolicy::kSpin || Clock::now() < spin_until)
      pause_briefly();
    else
      std::this_thread::sleep_for(std::chrono::microseconds(policy_.sleep_us));
  }
}

void Lane::close() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    wake_.notify_one();
  }
  if (thread_.joinable()) thread_.join();
  if (!stream_) return;
  try {
    device::synchronize(device::record(device_, stream_->get()));
  } catch (const std::exception&) {
    // The device is gone or broken: its jobs tell that themselves.
  }
}

std::shared_ptr<Lane> CopyEngine::lane(const Copy& copy) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) return nullptr;
  std::shared_ptr<Lane>& found = lanes_[{copy.device, static_cast<int>(copy.direction)}];
  if (!found)
    found = std::make_shared<Lane>(copy.device, copy.direction == Direction::kH2D, chunk_, window_,
                                   policy_);
  return found;
}

std::shared_ptr<Lane> CopyEngine::submit(const std::shared_ptr<Job>& job, Copy copy) {
  try {
    const std::shared_ptr<Lane> here = lane(copy);
    if (!here) {
      job->fail(closed_failure());
    } else if (copies_until_failure.hit()) {
      job->fail({Failure::kDevice, 0, "[copy] failed by a test hook", ""});
    } else if (copy.bytes() == 0) {
      job->complete();
    } else {
      here->submit(job, std::move(copy));
      return here;
    }
  } catch (const std::exception& error) {
    job->fail(device_failure(error));
  }
  return nullptr;
}

void CopyEngine::close() {
  std::map<std::pair<int, int>, std::shared_ptr<Lane>> lanes;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    lanes.swap(lanes_);
  }
  for (auto& entry : lanes) entry.second->close();
}

}  // namespace ts::paging
