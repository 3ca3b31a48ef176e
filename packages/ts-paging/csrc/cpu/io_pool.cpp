#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "disk.h"
#include "io_piece.h"
#include "uring.h"

namespace ts::paging {
namespace {

constexpr int64_t kNotInjected = INT64_MAX;

Failure closed(const char* what, const std::string& path) {
  return {Failure::kState, 0, std::string("[disk] the store ") + what, path};
}

}  // namespace

// What the thread of io_uring works with.
struct IoPool::Ring {
  std::unique_ptr<Uring> uring;
  int event = -1;  // written when there is something new to do
  IoPool* pool = nullptr;
  std::vector<Piece> pieces;
  std::vector<size_t> free;

  ~Ring() {
    if (event >= 0) (void)::close(event);
  }
  void wake() const {
    const uint64_t one = 1;
    (void)!write(event, &one, sizeof one);
  }
  void begin(size_t index);
  void step(size_t index, int64_t result);
  void issue(size_t index);
  void done(size_t index);
};

IoPool::IoPool(int threads, int64_t chunk_bytes, IoBackend backend)
    : threads_wanted_(threads),
      chunk_((chunk_bytes + kDirectAlign - 1) / kDirectAlign * kDirectAlign),
      backend_(backend) {}

std::shared_ptr<Job> IoPool::submit(const IoSpec& spec) {
  auto request = std::make_shared<Request>();
  request->spec = spec;
  request->job = std::make_shared<Job>(spec.bytes);
  const std::shared_ptr<Job> job = request->job;
  if (spec.bytes == 0) {
    job->complete();
    return job;
  }
  request->first = spec.direct ? spec.offset / kDirectAlign * kDirectAlign : spec.offset;
  request->chunks = (spec.offset - request->first + spec.bytes + chunk_ - 1) / chunk_;
  request->left = request->chunks;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (stop_) {
    job->fail(closed("is closed", spec.path));
    return job;
  }
  // What passes through buffers is copied by this machine's processors: by several of them.
  const bool straight =
      reinterpret_cast<uintptr_t>(spec.data) % kDirectAlign == 0 && spec.offset % kDirectAlign == 0;
  const bool through_ring = spec.direct && (straight || backend_ == IoBackend::kUring);
  if (through_ring) start_ring();
  if (through_ring && ring_) {
    ring_queue_.push_back(std::move(request));
    ring_->wake();
    return job;
  }
  if (threads_.empty())
    for (int i = 0; i < threads_wanted_; ++i)
      threads_.push_back(quiet_thread([this, i] { thread_loop(static_cast<size_t>(i)); }));
  queue_.push_back(std::move(request));
  wake_.notify_all();
  return job;
}

bool IoPool::uses_uring() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!stop_) start_ring();
  return ring_ != nullptr;
}

// Under the mutex.
void IoPool::start_ring() {
  if (ring_tried_) return;
  ring_tried_ = true;
  if (backend_ == IoBackend::kThreads) return;
  auto ring = std::make_shared<Ring>();
  const auto count = static_cast<size_t>(threads_wanted_);
  ring->uring = Uring::open(static_cast<unsigned>(count + 1));
  ring->event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (!ring->uring || ring->event < 0) return;
  ring->pool = this;
  ring->pieces.resize(count);
  for (size_t i = count; i > 0; --i) ring->free.push_back(i - 1);
  ring_ = std::move(ring);
  ring_thread_ = quiet_thread([this] { ring_loop(); });
}

// Under the mutex.
bool IoPool::take(std::deque<std::shared_ptr<Request>>& queue, Piece* piece) {
  if (queue.empty()) return false;
  piece->request = queue.front();
  Request& request = *piece->request;
  const IoSpec& spec = request.spec;
  const int64_t index = request.next++;
  if (request.next == request.chunks) queue.pop_front();
  const int64_t begin = std::max(spec.offset, request.first + index * chunk_);
  const int64_t end = std::min(spec.offset + spec.bytes, request.first + (index + 1) * chunk_);
  piece->data = static_cast<char*>(spec.data) + (begin - spec.offset);
  piece->offset = begin;
  piece->bytes = end - begin;
  return true;
}

char* IoPool::Staging::get(size_t index, size_t count, int64_t chunk, const std::string& path) {
  std::call_once(once_, [&] {
    constexpr size_t kHugePage = 2 << 20;
    size_t bytes = count * static_cast<size_t>(chunk);
    const bool huge = huge_ && bytes >= kHugePage;
    if (huge) bytes = (bytes + kHugePage - 1) / kHugePage * kHugePage;
    void* made = nullptr;
    if (posix_memalign(&made, huge ? kHugePage : kDirectAlign, bytes) != 0) return;
    (void)madvise(made, bytes, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    memory_.reset(static_cast<char*>(made));
  });
  if (!memory_) throw Failure{Failure::kStorage, ENOMEM, "[disk] no memory for I/O buffers", path};
  return memory_.get() + static_cast<int64_t>(index) * chunk;
}

char* IoPool::staging(bool ring, size_t index, const std::string& path) {
  return (ring ? ring_staging_ : staging_)
      .get(index, static_cast<size_t>(threads_wanted_), chunk_, path);
}

void IoPool::thread_loop(size_t index) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    wake_.wait(lock, [this] { return stop_ || !queue_.empty(); });
    Piece piece;
    if (!take(queue_, &piece)) break;
    lock.unlock();
    wait_while_held();
    Request& request = *piece.request;
    if (!request.failed.load()) request.open();
    try {
      while (!request.failed.load() && piece.bytes > 0) {
        piece.plan(piece.wants_staging() ? staging(false, index, request.spec.path) : nullptr);
        int64_t result;
        do {
          result = injected_result();
          if (result != kNotInjected) continue;
          char* const data = piece.io + piece.at;
          const auto bytes = static_cast<size_t>(piece.io_bytes - piece.at);
          const int64_t offset = piece.io_offset + piece.at;
          result = request.spec.write ? pwrite(request.fd, data, bytes, offset)
                                      : pread(request.fd, data, bytes, offset);
          if (result < 0) result = -errno;
        } while (!piece.advance(result));
        piece.finish();
      }
    } catch (Failure& failure) {
      request.fail(std::move(failure));
    }
    request.chunk_done(1);
    lock.lock();
  }
}

void IoPool::Ring::done(size_t index) {
  const std::shared_ptr<Request> request = std::move(pieces[index].request);
  pieces[index] = Piece();
  free.push_back(index);
  request->chunk_done(1);
}

void IoPool::Ring::begin(size_t index) {
  Piece& piece = pieces[index];
  Request& request = *piece.request;
  if (!request.failed.load()) request.open();
  if (request.failed.load()) return done(index);
  try {
    piece.plan(piece.wants_staging() ? pool->staging(true, index, request.spec.path) : nullptr);
  } catch (Failure& failure) {
    request.fail(std::move(failure));
    return done(index);
  }
  issue(index);
}

void IoPool::Ring::issue(size_t index) {
  const int64_t result = injected_result();
  if (result != kNotInjected) return step(index, result);
  const Piece& piece = pieces[index];
  uring->transfer(piece.request->spec.write, piece.request->fd, piece.io + piece.at,
                  static_cast<uint32_t>(piece.io_bytes - piece.at), piece.io_offset + piece.at,
                  index);
}

void IoPool::Ring::step(size_t index, int64_t result) {
  Piece& piece = pieces[index];
  try {
    if (!piece.advance(result)) return issue(index);
  } catch (Failure& failure) {
    piece.request->fail(std::move(failure));
    return done(index);
  }
  piece.finish();
  if (piece.bytes > 0) return begin(index);
  done(index);
}

void IoPool::ring_loop() {
  const std::shared_ptr<Ring> ring = ring_;
  const size_t count = ring->pieces.size();
  std::vector<size_t> taken;
  ring->uring->watch(ring->event, count);
  while (true) {
    taken.clear();
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      while (!ring->free.empty() && take(ring_queue_, &ring->pieces[ring->free.back()])) {
        taken.push_back(ring->free.back());
        ring->free.pop_back();
      }
      if (stop_ && ring->free.size() == count) return;
    }
    if (!taken.empty()) wait_while_held();
    const size_t free_before = ring->free.size();
    for (const size_t index : taken) ring->begin(index);
    if (ring->free.size() > free_before) continue;  // something failed at once: there may be more
    const int code = ring->uring->wait();
    if (code != 0) {
      // Not seen: our own calls are wrong then. Without the ring the kernel writes no more.
      ring->uring.reset();
      for (size_t i = 0; i < count; ++i)
        if (ring->pieces[i].request) {
          Request& request = *ring->pieces[i].request;
          request.fail({Failure::kStorage, code, std::string("[disk] io_uring: ") + strerror(code),
                        request.spec.path});
          ring->done(i);
        }
      const std::lock_guard<std::mutex> lock(mutex_);
      for (const std::shared_ptr<Request>& request : ring_queue_) {
        request->fail({Failure::kStorage, code, std::string("[disk] io_uring: ") + strerror(code),
                       request->spec.path});
        request->chunk_done(request->chunks - request->next);
      }
      ring_queue_.clear();
      ring_ = nullptr;
      return;
    }
    uint64_t tag;
    int32_t result;
    while (ring->uring->next(&tag, &result)) {
      if (tag != count) {
        ring->step(tag, result);
        continue;
      }
      uint64_t news;
      (void)!read(ring->event, &news, sizeof news);
      ring->uring->watch(ring->event, count);
    }
  }
}

void IoPool::close() {
  std::deque<std::shared_ptr<Request>> dropped;
  std::shared_ptr<Ring> ring;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    dropped.swap(queue_);
    for (std::shared_ptr<Request>& request : ring_queue_) dropped.push_back(std::move(request));
    ring_queue_.clear();
    wake_.notify_all();
    ring = ring_;
  }
  if (ring) ring->wake();
  for (const std::shared_ptr<Request>& request : dropped) {
    request->fail(closed("was closed before this was done", request->spec.path));
    request->chunk_done(request->chunks - request->next);
  }
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  if (ring_thread_.joinable()) ring_thread_.join();
}

}  // namespace ts::paging
