#include "host_memory.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "device.h"
#include "job.h"

namespace ts::paging {
namespace {

std::atomic<int64_t> pinned_total{0};
Countdown locks_until_failure;
std::atomic<bool> simulated{false};

constexpr int64_t kPopulatePiece = int64_t{32} << 20;

void populate_piece(char* data, int64_t bytes, int64_t page) {
#if defined(MADV_POPULATE_WRITE)
  if (madvise(data, static_cast<size_t>(bytes), MADV_POPULATE_WRITE) == 0) return;
#endif
  for (int64_t at = 0; at < bytes; at += page) const_cast<volatile char*>(data)[at] = 0;
}

// Has the kernel find and clear the pages on several threads; the page lock alone would do it on
// one, and most of its time goes there.
void populate(char* data, int64_t bytes, int64_t page) {
  const int64_t pieces = (bytes + kPopulatePiece - 1) / kPopulatePiece;
  const int64_t cores = std::thread::hardware_concurrency();
  const int64_t wanted = std::min(pieces, std::clamp<int64_t>(cores / 4, 1, 8));
  std::atomic<int64_t> next{0};
  const auto work = [&] {
    for (int64_t i = next++; i < pieces; i = next++)
      populate_piece(data + i * kPopulatePiece,
                     std::min(kPopulatePiece, bytes - i * kPopulatePiece), page);
  };
  std::vector<std::thread> threads;
  try {
    for (int64_t i = 1; i < wanted; ++i) threads.push_back(quiet_thread(work));
  } catch (const std::exception&) {
    // Fewer threads, then.
  }
  work();
  for (std::thread& thread : threads) thread.join();
}

// Empty if page-locked. The budget is taken first, so that threads cannot pass it together.
std::string page_lock(HostPool& pool, void* data, int64_t bytes, int device) {
  if (pool.pinned_bytes.fetch_add(bytes) + bytes > pool.budget_bytes) {
    pool.pinned_bytes -= bytes;
    return "over the page-lock budget of " + std::to_string(pool.budget_bytes) + " bytes";
  }
  std::string refused;
  if (pool.counted && locks_until_failure.hit())
    refused = "refused by a test hook";
  else if (!simulated.load())
    refused = device::pin(data, bytes, device);
  if (!refused.empty())
    pool.pinned_bytes -= bytes;
  else if (pool.counted)
    pinned_total += bytes;
  return refused;
}

}  // namespace

HostBlock allocate_host(std::shared_ptr<HostPool> pool, int64_t bytes, bool pin, int device,
                        std::string* refused) {
  const int64_t page = sysconf(_SC_PAGESIZE);
  HostBlock block;
  block.bytes = (bytes + page - 1) / page * page;
  block.owner = getpid();
  block.data = mmap(nullptr, static_cast<size_t>(block.bytes), PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (block.data == MAP_FAILED)
    throw std::runtime_error("[host memory] nbytes: the system refused to map " +
                             std::to_string(block.bytes) + " bytes: " + strerror(errno));
  // Fewer pages to lock and to look up, and no more memory, for only whole huge pages count. The
  // kernel may refuse.
  if (block.bytes >= (int64_t{4} << 20))
    (void)madvise(block.data, static_cast<size_t>(block.bytes), MADV_HUGEPAGE);
  if (pin) {
    if (block.bytes >= 2 * kPopulatePiece && !simulated.load())
      populate(static_cast<char*>(block.data), block.bytes, page);
    *refused = page_lock(*pool, block.data, block.bytes, device);
    block.pinned = refused->empty();
  }
  if (!block.pinned) pool->pageable_bytes += block.bytes;
  block.pool = std::move(pool);
  return block;
}

void free_host(const HostBlock& block) {
  if (!block.data) return;
  if (block.pinned) {
    // In a forked child CUDA is out of reach, and the lock is the parent's.
    if (block.owner == getpid() && !simulated.load()) device::unpin(block.data);
    if (block.pool->counted) pinned_total -= block.bytes;
    block.pool->pinned_bytes -= block.bytes;
  } else {
    block.pool->pageable_bytes -= block.bytes;
  }
  (void)munmap(block.data, static_cast<size_t>(block.bytes));
}

int64_t pinned_bytes() { return pinned_total.load(); }
void fail_pinned_after(int64_t n) { locks_until_failure.set(n); }
void simulate_pinning(bool on) { simulated = on; }

}  // namespace ts::paging
