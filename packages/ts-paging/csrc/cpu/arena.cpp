#include "arena.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

#include "job.h"

namespace ts::paging {
namespace {

using Clock = std::chrono::steady_clock;

int64_t round_up(int64_t bytes, int64_t multiple) {
  return (bytes + multiple - 1) / multiple * multiple;
}

void free_all(std::vector<HostBlock>* blocks) {
  for (const HostBlock& block : *blocks) free_host(block);
}

}  // namespace

Arena::Arena(std::shared_ptr<HostPool> pool, int64_t slab_bytes, int64_t step_bytes)
    : pool_(std::move(pool)),
      slab_bytes_(round_up(slab_bytes, sysconf(_SC_PAGESIZE))),
      step_bytes_(std::min(round_up(step_bytes, sysconf(_SC_PAGESIZE)), slab_bytes_)),
      own_bytes_(step_bytes_ < slab_bytes_ ? step_bytes_ / 2 : step_bytes_),
      page_(sysconf(_SC_PAGESIZE)),
      owner_(getpid()) {}

Arena::~Arena() {
  if (mine()) close();
}

bool Arena::mine() const { return owner_ == getpid(); }

Arena::Outcome Arena::allocate(int64_t bytes, int64_t limit, int device, int64_t timeout_us,
                               Piece* piece) {
  const int64_t wanted = round_up(bytes, kAlign);
  const Clock::time_point deadline = Clock::now() + std::chrono::microseconds(timeout_us);
  Dropped dropped;
  Outcome outcome = Outcome::kNotYet;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      if (closed_) {
        outcome = Outcome::kClosed;
        break;
      }
      if (take(wanted, piece)) {
        outcome = Outcome::kGiven;
        break;
      }
      if (!hurry(wanted)) {
        const int64_t size = make_way(round_up(wanted, page_), limit, &dropped);
        if (size == 0) {
          outcome = Outcome::kFull;
          break;
        }
        device_ = device;
        start({size, wanted > own_bytes_, false}, true);
      }
      if (changed_.wait_until(lock, deadline) == std::cv_status::timeout) break;
    }
  }
  free_all(&dropped);
  return outcome;
}

bool Arena::find(int64_t bytes, Piece* piece) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return !closed_ && take(round_up(bytes, kAlign), piece);
}

// Best fit: the smallest free extent that holds it, the lowest of these.
bool Arena::take(int64_t bytes, Piece* piece) {
  const auto found = by_size_.lower_bound({bytes, -1, -1});
  if (found == by_size_.end()) return false;
  const auto [size, number, offset] = *found;
  Slab& slab = slabs_.at(number);
  remove_free(number, slab, slab.free.find(offset));
  if (size > bytes) add_free(number, slab, offset + bytes, size - bytes);
  slab.live_bytes += bytes;
  ++slab.pieces;
  slab.used = calls_;
  *piece = {static_cast<char*>(slab.memory.data) + offset, bytes, number, offset,
            shared_from_this()};
  return true;
}

void Arena::add_free(int64_t number, Slab& slab, int64_t offset, int64_t bytes) {
  slab.free.emplace(offset, bytes);
  by_size_.emplace(bytes, number, offset);
}

void Arena::remove_free(int64_t number, Slab& slab, std::map<int64_t, int64_t>::iterator extent) {
  by_size_.erase({extent->second, number, extent->first});
  slab.free.erase(extent);
}

void Arena::give_back(Piece&& piece) {
  std::shared_ptr<Arena> arena = std::move(piece.arena);
  if (!arena) return;
  if (!arena->mine()) {
    // A forked child: the lock may be held by a thread that is not there. Never destroyed here.
    (void)new std::shared_ptr<Arena>(std::move(arena));
    return;
  }
  Dropped dropped;
  {
    const std::lock_guard<std::mutex> lock(arena->mutex_);
    arena->put_back(piece);
    if (arena->closed_ && arena->slabs_.at(piece.slab).pieces == 0)
      arena->drop_slab(piece.slab, &dropped);
    arena->changed_.notify_all();
  }
  free_all(&dropped);
}

void Arena::put_back(const Piece& piece) {
  Slab& slab = slabs_.at(piece.slab);
  slab.live_bytes -= piece.bytes;
  --slab.pieces;
  slab.used = calls_;
  int64_t offset = piece.offset, bytes = piece.bytes;
  auto next = slab.free.lower_bound(offset);
  if (next != slab.free.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      offset = before->first;
      bytes += before->second;
      remove_free(piece.slab, slab, before);
      next = slab.free.lower_bound(offset);
    }
  }
  if (next != slab.free.end() && next->first == offset + bytes) {
    bytes += next->second;
    remove_free(piece.slab, slab, next);
  }
  add_free(piece.slab, slab, offset, bytes);
}

// Whether a slab that holds `bytes` is being made; if it only waits its turn, it is made next.
bool Arena::hurry(int64_t bytes) {
  if (making_bytes_ >= bytes) {
    making_ahead_ = false;
    return true;
  }
  const auto found = std::find_if(queue_.begin(), queue_.end(),
                                  [bytes](const Growth& growth) { return growth.bytes >= bytes; });
  if (found == queue_.end()) return false;
  Growth growth = *found;
  growth.ahead = false;
  queue_.erase(found);
  queue_.push_front(growth);
  return true;
}

// Size of a slab that may be made for `bytes`, 0 if none may. None of the slabs that hold nothing,
// or that are reserved, was large enough: they go where the limit is near.
int64_t Arena::make_way(int64_t bytes, int64_t limit, Dropped* dropped) {
  const bool own = bytes > own_bytes_;
  const int64_t size = own ? bytes : step_bytes_;
  if (size >= refused_bytes_) return 0;
  int64_t idle = 0;
  for (const auto& [number, slab] : slabs_)
    if (slab.pieces == 0) idle += slab.memory.bytes;
  for (const Growth& growth : queue_)
    if (growth.ahead) idle += growth.bytes;
  const auto room = [&] { return limit - reserved_bytes_ - coming_bytes_; };
  if (room() + idle < bytes) return 0;
  // What is reserved ahead and not begun first: this is a part of it.
  for (auto growth = queue_.end(); room() < bytes && growth != queue_.begin();) {
    --growth;
    if (!growth->ahead) continue;
    coming_bytes_ -= growth->bytes;
    growth = queue_.erase(growth);
  }
  if (own) replace_own(bytes, dropped);
  for (auto slab = slabs_.begin(); slab != slabs_.end() && room() < bytes;) {
    const int64_t number = slab->first;
    const bool goes = slab->second.pieces == 0;
    ++slab;
    if (goes) drop_slab(number, dropped);
  }
  return std::min(size, room() / page_ * page_);
}

// A large request that is a little larger than those before takes the place of slabs of theirs, or
// growing requests would leave a trail of them: about as many bytes as it has itself.
void Arena::replace_own(int64_t bytes, Dropped* dropped) {
  std::vector<std::pair<int64_t, int64_t>> idle;
  for (const auto& [number, slab] : slabs_)
    if (slab.own && slab.pieces == 0) idle.emplace_back(slab.memory.bytes, number);
  std::sort(idle.rbegin(), idle.rend());
  int64_t gone = 0;
  for (const auto& [size, number] : idle) {
    if (gone > bytes / 2) break;
    gone += size;
    drop_slab(number, dropped);
  }
}

// Takes back what is reserved ahead and not begun, the latest first, while there is more than this;
// what is left may be less only if `below`.
void Arena::drop_ahead(int64_t keep_bytes, bool below) {
  for (auto growth = queue_.end(); growth != queue_.begin();) {
    --growth;
    const int64_t left = reserved_bytes_ + coming_bytes_ - (below ? 1 : growth->bytes);
    if (!growth->ahead || left < keep_bytes) continue;
    coming_bytes_ -= growth->bytes;
    growth = queue_.erase(growth);
  }
}

void Arena::drop_slab(int64_t number, Dropped* dropped) {
  const auto found = slabs_.find(number);
  Slab& slab = found->second;
  while (!slab.free.empty()) remove_free(number, slab, slab.free.begin());
  reserved_bytes_ -= slab.memory.bytes;
  dropped->push_back(slab.memory);
  slabs_.erase(found);
}

void Arena::start(Growth growth, bool first) {
  if (first)
    queue_.push_front(growth);
  else
    queue_.push_back(growth);
  coming_bytes_ += growth.bytes;
  if (first) drop_ahead(target_bytes_, false);  // it is a part of what was reserved
  if (!thread_.joinable()) thread_ = quiet_thread([this] { grow(); });
  changed_.notify_all();
}

int64_t Arena::reserve(int64_t bytes, int64_t limit, int device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto there = [this] { return reserved_bytes_ + coming_bytes_; };
  unwanted_ = false;
  target_bytes_ = std::max(target_bytes_, std::min(bytes, limit));
  while (!closed_ && there() < std::min(bytes, limit)) {
    // The last one is no larger than it has to be.
    const int64_t usual = std::min(slab_bytes_, round_up(bytes - there(), step_bytes_));
    const int64_t size = std::min(usual, (limit - there()) / page_ * page_);
    if (size <= 0 || usual >= refused_bytes_) break;
    device_ = device;
    start({size, false, true}, false);
  }
  return there();
}

bool Arena::wait_reserved(int64_t timeout_us) {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, std::chrono::microseconds(timeout_us),
                           [this] { return coming_bytes_ == 0 || closed_; });
}

// The thread: makes one slab after the other.
void Arena::grow() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return closed_ || !queue_.empty(); });
    if (closed_) return;
    const Growth growth = queue_.front();
    queue_.pop_front();
    making_bytes_ = growth.bytes;
    making_ahead_ = growth.ahead;
    unwanted_ = false;
    const int device = device_;
    lock.unlock();
    const Clock::time_point begin = Clock::now();
    HostBlock block;
    std::string refused;
    try {
      block = allocate_host(pool_, growth.bytes, device >= 0, std::max(device, 0), &refused);
    } catch (const std::exception& error) {
      refused = error.what();
    }
    // A fork would copy locked pages at once, all of them, for a child that has no use for them.
    if (block.pinned) (void)madvise(block.data, static_cast<size_t>(block.bytes), MADV_DONTFORK);
    const std::chrono::duration<double> took = Clock::now() - begin;
    lock.lock();
    making_bytes_ = 0;
    lock_seconds_ += took.count();
    if (closed_ || !refused.empty()) {
      // What was asked for later is likely to be refused as well; who waits for it asks again.
      coming_bytes_ = 0;
      queue_.clear();
      if (!refused.empty()) {
        refused_ = refused;
        refused_bytes_ = std::min(refused_bytes_, growth.bytes);
      }
      lock.unlock();
      free_host(block);
      lock.lock();
    } else if (unwanted_ && making_ahead_) {
      coming_bytes_ -= growth.bytes;
      lock.unlock();
      free_host(block);
      lock.lock();
    } else {
      coming_bytes_ -= growth.bytes;
      reserved_bytes_ += block.bytes;
      const int64_t number = next_slab_++;
      Slab& slab = slabs_[number];
      slab.memory = block;
      slab.own = growth.own;
      slab.used = calls_;
      add_free(number, slab, 0, block.bytes);
    }
    changed_.notify_all();
  }
}

int64_t Arena::trim(int64_t keep_bytes) {
  Dropped dropped;
  int64_t gone = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    target_bytes_ = std::min(target_bytes_, keep_bytes);
    drop_ahead(keep_bytes, true);
    std::vector<int64_t> idle;
    for (const auto& [number, slab] : slabs_)
      if (slab.pieces == 0) idle.push_back(number);
    // The oldest stays longest: it serves what is always needed.
    for (auto number = idle.rbegin(); number != idle.rend() && reserved_bytes_ > keep_bytes;
         ++number) {
      gone += slabs_.at(*number).memory.bytes;
      drop_slab(*number, &dropped);
    }
    unwanted_ = making_bytes_ > 0 && reserved_bytes_ + coming_bytes_ > keep_bytes;
    refused_.clear();
    refused_bytes_ = kNever;
  }
  free_all(&dropped);
  return gone;
}

int64_t Arena::trim_unused(int64_t calls) {
  Dropped dropped;
  int64_t gone = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++calls_;
    for (auto slab = slabs_.begin(); slab != slabs_.end();) {
      const int64_t number = slab->first;
      const bool goes = slab->second.pieces == 0 && calls_ - slab->second.used > calls;
      if (goes) gone += slab->second.memory.bytes;
      ++slab;
      if (goes) drop_slab(number, &dropped);
    }
  }
  free_all(&dropped);
  return gone;
}

void Arena::close() {
  Dropped dropped;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    coming_bytes_ = 0;
    queue_.clear();
    for (auto slab = slabs_.begin(); slab != slabs_.end();) {
      const int64_t number = slab->first;
      const bool goes = slab->second.pieces == 0;
      ++slab;
      if (goes) drop_slab(number, &dropped);
    }
    changed_.notify_all();
  }
  free_all(&dropped);
  if (thread_.joinable()) thread_.join();
}

Arena::Info Arena::info() {
  const std::lock_guard<std::mutex> lock(mutex_);
  Info info{{}, reserved_bytes_, 0, 0, coming_bytes_, lock_seconds_, refused_bytes_, refused_};
  for (const auto& [number, slab] : slabs_) {
    int64_t largest = 0;
    for (const auto& extent : slab.free) largest = std::max(largest, extent.second);
    info.slabs.push_back({slab.memory.bytes, slab.live_bytes,
                          static_cast<int64_t>(slab.free.size()), largest, slab.memory.pinned});
    info.live_bytes += slab.live_bytes;
    info.pieces += slab.pieces;
  }
  return info;
}

}  // namespace ts::paging
