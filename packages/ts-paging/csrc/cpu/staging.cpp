#include "staging.h"

#include <string.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <string>
#include <utility>

namespace ts::paging {
namespace {

constexpr int64_t kShare = int64_t{1} << 20;  // less than this is not worth another thread

std::atomic<int64_t> threads_wanted{0};

int64_t thread_count() {
  const int64_t wanted = threads_wanted.load();
  const int64_t cores = std::thread::hardware_concurrency();
  return wanted > 0 ? wanted : std::clamp<int64_t>(cores / 4, 1, 4);
}

}  // namespace

void set_staging_threads(int64_t n) { threads_wanted = n; }

std::unique_ptr<Staging> Staging::make(int device) {
  auto pool = std::make_shared<HostPool>(kCount * kBytes);
  pool->counted = false;
  std::string refused;
  const HostBlock block = allocate_host(std::move(pool), kCount * kBytes, true, device, &refused);
  if (!block.pinned) {
    free_host(block);
    return nullptr;
  }
  return std::unique_ptr<Staging>(new Staging(block));
}

Staging::Staging(const HostBlock& block) : block_(block) {
  for (int i = 0; i < kCount; ++i) buffers_[i].data = static_cast<char*>(block.data) + i * kBytes;
  const int64_t count = thread_count();
  try {
    for (int64_t i = 1; i < count; ++i) threads_.push_back(quiet_thread([this, i] { loop(i); }));
  } catch (const std::exception&) {
    // Fewer threads, then.
  }
}

Staging::~Staging() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    changed_.notify_all();
  }
  for (std::thread& thread : threads_) thread.join();
  free_host(block_);
}

void Staging::copy(void* dst, const void* src, int64_t bytes) {
  if (bytes <= kShare || threads_.empty()) {
    memcpy(dst, src, static_cast<size_t>(bytes));
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    dst_ = static_cast<char*>(dst);
    src_ = static_cast<const char*>(src);
    bytes_ = bytes;
    busy_ = static_cast<int64_t>(threads_.size());
    ++round_;
    changed_.notify_all();
  }
  copy_share(0);
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return busy_ == 0; });
}

void Staging::copy_share(int64_t index) {
  const int64_t count = static_cast<int64_t>(threads_.size()) + 1;
  const int64_t begin = bytes_ * index / count, end = bytes_ * (index + 1) / count;
  memcpy(dst_ + begin, src_ + begin, static_cast<size_t>(end - begin));
}

void Staging::loop(int64_t index) {
  int64_t done = 0;
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stop_ || round_ > done; });
    if (stop_) return;
    done = round_;
    lock.unlock();
    copy_share(index);
    lock.lock();
    if (--busy_ == 0) changed_.notify_all();
  }
}

}  // namespace ts::paging
