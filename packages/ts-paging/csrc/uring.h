// io_uring by raw system calls: only what the disk tier needs.
#pragma once

#include <cstdint>
#include <memory>

struct io_uring_sqe;
struct io_uring_cqe;

namespace ts::paging {

// Used by one thread.
class Uring {
 public:
  // Null where the kernel, the container or a limit does not let it be, or it lacks an operation.
  static std::unique_ptr<Uring> open(unsigned entries);
  ~Uring();
  Uring(const Uring&) = delete;
  Uring& operator=(const Uring&) = delete;

  // One operation; at most as many as `entries` may be unfinished.
  void transfer(bool write, int fd, void* data, uint32_t bytes, int64_t offset, uint64_t tag);
  // Once readable; for a descriptor that others write to.
  void watch(int fd, uint64_t tag);
  // Hands over what was queued and sleeps until something is finished. Returns 0, or an errno that
  // trying again would not help.
  int wait();
  // One finished operation: its tag, and what read(2) or write(2) would return, or -errno.
  bool next(uint64_t* tag, int32_t* result);

 private:
  Uring() = default;
  bool setup(unsigned entries);
  io_uring_sqe* entry();

  int fd_ = -1;
  void* ring_ = nullptr;
  size_t ring_bytes_ = 0;
  io_uring_sqe* entries_ = nullptr;
  size_t entries_bytes_ = 0;
  unsigned *submit_tail_ = nullptr, *submit_array_ = nullptr, submit_mask_ = 0;
  unsigned *done_head_ = nullptr, *done_tail_ = nullptr, done_mask_ = 0;
  io_uring_cqe* done_ = nullptr;
  unsigned queued_ = 0;   // not shown to the kernel yet
  unsigned waiting_ = 0;  // shown, and not taken yet
};

}  // namespace ts::paging
