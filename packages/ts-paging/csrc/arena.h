// Host memory in slabs that are page-locked once, on a thread of their own, and handed out in
// pieces: page-locking runs at a few GB/s, handing out a piece takes a microsecond.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "host_memory.h"

namespace ts::paging {

class Arena : public std::enable_shared_from_this<Arena> {
 public:
  // Pieces start and end at multiples of this.
  static constexpr int64_t kAlign = 256;
  static constexpr int64_t kNever = INT64_MAX;

  struct Piece {
    void* data = nullptr;
    int64_t bytes = 0;  // multiple of kAlign
    int64_t slab = -1;
    int64_t offset = 0;
    std::shared_ptr<Arena> arena;
  };
  struct SlabInfo {
    int64_t bytes, live_bytes, free_extents, largest_free;
    bool pinned;
  };
  struct Info {
    std::vector<SlabInfo> slabs;
    int64_t reserved_bytes, live_bytes, pieces, coming_bytes;
    double lock_seconds;    // spent on making slabs, page locks included
    int64_t refused_bytes;  // the smallest slab that was refused since the last trim
    std::string refused;    // and why the last one was
  };
  enum class Outcome {
    kGiven,
    kNotYet,  // something that fits is being made: ask again
    kFull,    // it would take more than the limit, or page-locking was refused
    kClosed,
  };

  // slab_bytes: of slabs that are reserved ahead. step_bytes, no more than that: of those that are
  // made when a request finds no room, so that the last one, half empty, is not a large one.
  Arena(std::shared_ptr<HostPool> pool, int64_t slab_bytes, int64_t step_bytes);
  ~Arena();

  // Hands out a piece of `bytes` > 0. Memory is made where there is none: step by step, or one slab
  // of exactly this size if it is larger than half a step (than a step, where that is a slab).
  // Waits for that at most timeout_us.
  // limit: bytes of all slabs at most. device: who page-locks; < 0: nobody.
  Outcome allocate(int64_t bytes, int64_t limit, int device, int64_t timeout_us, Piece* piece);
  // The same of what is there already; nothing is made.
  bool find(int64_t bytes, Piece* piece);
  // Takes a piece back, from any thread. In a forked child nothing happens.
  static void give_back(Piece&& piece);
  // Has slabs made until there are `bytes`, as far as the limit allows, and returns at once.
  // Returns what there will be.
  int64_t reserve(int64_t bytes, int64_t limit, int device);
  // Waits until what was reserved is there. False: not within timeout_us.
  bool wait_reserved(int64_t timeout_us);
  // Lets go of slabs that hold nothing until `keep_bytes` or less are left, and of what is reserved
  // beyond that and not there yet, unless a request waits for it; returns what went.
  int64_t trim(int64_t keep_bytes);
  // Lets go of slabs that have held nothing during the latest `calls` calls; returns what went.
  int64_t trim_unused(int64_t calls);
  // Ends the thread and lets go of the slabs; one that holds pieces goes with the last of them.
  void close();
  bool mine() const;
  Info info();

 private:
  struct Slab {
    HostBlock memory;
    bool own = false;  // made for one large request
    int64_t used = 0;  // trim_unused() calls before something was taken or given back
    int64_t live_bytes = 0;
    int64_t pieces = 0;
    std::map<int64_t, int64_t> free;  // offset -> bytes, never two side by side
  };
  struct Growth {
    int64_t bytes;
    bool own;
    bool ahead;  // nobody waits for it
  };
  using Dropped = std::vector<HostBlock>;

  // All of these are called with the lock held. What they drop is freed after it is let go.
  bool take(int64_t bytes, Piece* piece);
  void add_free(int64_t number, Slab& slab, int64_t offset, int64_t bytes);
  void remove_free(int64_t number, Slab& slab, std::map<int64_t, int64_t>::iterator extent);
  void put_back(const Piece& piece);
  bool hurry(int64_t bytes);
  int64_t make_way(int64_t bytes, int64_t limit, Dropped* dropped);
  void drop_slab(int64_t number, Dropped* dropped);
  void replace_own(int64_t bytes, Dropped* dropped);
  void drop_ahead(int64_t keep_bytes, bool below);
  void start(Growth growth, bool first);
  void grow();

  const std::shared_ptr<HostPool> pool_;
  const int64_t slab_bytes_;
  const int64_t step_bytes_;
  const int64_t own_bytes_;  // a larger request has a slab of its own
  const int64_t page_;
  const int owner_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<int64_t, Slab> slabs_;
  std::set<std::tuple<int64_t, int64_t, int64_t>> by_size_;  // bytes, slab, offset of free extents
  int64_t next_slab_ = 0;
  int64_t reserved_bytes_ = 0;
  std::deque<Growth> queue_;
  int64_t making_bytes_ = 0;   // of the slab that the thread makes now
  bool making_ahead_ = false;  // and nobody waits for it
  bool unwanted_ = false;      // nor is it to stay, then
  int64_t target_bytes_ = 0;   // what was reserved
  int64_t calls_ = 0;          // of trim_unused
  int64_t coming_bytes_ = 0;   // that, and the queue
  int device_ = -1;
  double lock_seconds_ = 0;
  int64_t refused_bytes_ = kNever;  // slabs of this size are not tried again
  std::string refused_;
  bool closed_ = false;
  std::thread thread_;
};

}  // namespace ts::paging
