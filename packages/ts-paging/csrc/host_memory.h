// Page-aligned host memory, page-locked for CUDA where that works; sizes are never rounded beyond
// whole pages.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

namespace ts::paging {

// Bytes of one allocator's live blocks, in whole pages, and what it may page-lock at most.
struct HostPool {
  explicit HostPool(int64_t budget) : budget_bytes(budget) {}
  const int64_t budget_bytes;
  // In pinned_bytes() of the process, and among the locks that the test hook refuses. Set before
  // the first block.
  bool counted = true;
  std::atomic<int64_t> pinned_bytes{0};
  std::atomic<int64_t> pageable_bytes{0};
};

struct HostBlock {
  void* data = nullptr;
  int64_t bytes = 0;  // whole pages
  bool pinned = false;
  int owner = 0;  // process that made it: a forked child must not undo the page lock
  std::shared_ptr<HostPool> pool;
};

// Maps at least `bytes` > 0 bytes and page-locks them if `pin`. A refused page lock leaves pageable
// memory and says why in *refused. Throws std::runtime_error if there is no memory at all.
HostBlock allocate_host(std::shared_ptr<HostPool> pool, int64_t bytes, bool pin, int device,
                        std::string* refused);
void free_host(const HostBlock& block);

// Bytes page-locked by all counted pools of this process, now.
int64_t pinned_bytes();

// Test hooks: let `n` more page locks succeed, then refuse one (n < 0: none). With simulation on,
// page-locking is a no-op that succeeds, so that machines without a GPU take the same paths.
void fail_pinned_after(int64_t n);
void simulate_pinning(bool on);

}  // namespace ts::paging
