#include "uring.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#if __has_include(<linux/io_uring.h>) && defined(__NR_io_uring_setup)
#include <linux/io_uring.h>
#define TS_HAS_URING 1
#endif

namespace ts::paging {

#ifdef TS_HAS_URING
namespace {

template <typename T>
T* at(void* base, uint32_t offset) {
  return reinterpret_cast<T*>(static_cast<char*>(base) + offset);
}

bool knows_operations(int fd) {
  constexpr unsigned kCount = 64;
  alignas(io_uring_probe) char memory[sizeof(io_uring_probe) + kCount * sizeof(io_uring_probe_op)];
  memset(memory, 0, sizeof memory);
  auto* probe = reinterpret_cast<io_uring_probe*>(memory);
  if (syscall(__NR_io_uring_register, fd, IORING_REGISTER_PROBE, probe, kCount) < 0) return false;
  for (const unsigned op : {IORING_OP_READ, IORING_OP_WRITE, IORING_OP_POLL_ADD})
    if (op > probe->last_op || !(probe->ops[op].flags & IO_URING_OP_SUPPORTED)) return false;
  return true;
}

}  // namespace

bool Uring::setup(unsigned entries) {
  io_uring_params params;
  memset(&params, 0, sizeof params);
  fd_ = static_cast<int>(syscall(__NR_io_uring_setup, entries, &params));
  if (fd_ < 0 || !(params.features & IORING_FEAT_SINGLE_MMAP) || !knows_operations(fd_))
    return false;
  ring_bytes_ =
      std::max(params.sq_off.array + params.sq_entries * sizeof(unsigned),
               params.cq_off.cqes + static_cast<size_t>(params.cq_entries) * sizeof(io_uring_cqe));
  void* ring = mmap(nullptr, ring_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_,
                    IORING_OFF_SQ_RING);
  if (ring == MAP_FAILED) return false;
  ring_ = ring;
  entries_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
  void* made = mmap(nullptr, entries_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_,
                    IORING_OFF_SQES);
  if (made == MAP_FAILED) return false;
  entries_ = static_cast<io_uring_sqe*>(made);
  // A forked child must not find the pages of its parent's ring.
  (void)madvise(ring_, ring_bytes_, MADV_DONTFORK);
  (void)madvise(made, entries_bytes_, MADV_DONTFORK);
  submit_tail_ = at<unsigned>(ring_, params.sq_off.tail);
  submit_array_ = at<unsigned>(ring_, params.sq_off.array);
  submit_mask_ = *at<unsigned>(ring_, params.sq_off.ring_mask);
  done_head_ = at<unsigned>(ring_, params.cq_off.head);
  done_tail_ = at<unsigned>(ring_, params.cq_off.tail);
  done_mask_ = *at<unsigned>(ring_, params.cq_off.ring_mask);
  done_ = at<io_uring_cqe>(ring_, params.cq_off.cqes);
  return true;
}

std::unique_ptr<Uring> Uring::open(unsigned entries) {
  std::unique_ptr<Uring> ring(new Uring);
  if (!ring->setup(entries)) return nullptr;
  return ring;
}

Uring::~Uring() {
  if (entries_) (void)munmap(entries_, entries_bytes_);
  if (ring_) (void)munmap(ring_, ring_bytes_);
  if (fd_ >= 0) (void)close(fd_);
}

io_uring_sqe* Uring::entry() {
  // Only this thread moves the tail.
  const unsigned tail = *submit_tail_ + queued_++;
  io_uring_sqe* made = &entries_[tail & submit_mask_];
  memset(made, 0, sizeof *made);
  submit_array_[tail & submit_mask_] = tail & submit_mask_;
  return made;
}

void Uring::transfer(bool write, int fd, void* data, uint32_t bytes, int64_t offset, uint64_t tag) {
  io_uring_sqe* made = entry();
  made->opcode = write ? IORING_OP_WRITE : IORING_OP_READ;
  made->fd = fd;
  made->addr = reinterpret_cast<uint64_t>(data);
  made->len = bytes;
  made->off = static_cast<uint64_t>(offset);
  made->user_data = tag;
}

void Uring::watch(int fd, uint64_t tag) {
  io_uring_sqe* made = entry();
  made->opcode = IORING_OP_POLL_ADD;
  made->fd = fd;
  made->poll32_events = POLLIN;
  made->user_data = tag;
}

int Uring::wait() {
  __atomic_store_n(submit_tail_, *submit_tail_ + queued_, __ATOMIC_RELEASE);
  waiting_ += queued_;
  queued_ = 0;
  while (true) {
    const bool empty = *done_head_ == __atomic_load_n(done_tail_, __ATOMIC_ACQUIRE);
    if (waiting_ == 0 && !empty) return 0;
    const long taken = syscall(__NR_io_uring_enter, fd_, waiting_, empty ? 1 : 0,
                               IORING_ENTER_GETEVENTS, nullptr, 0);
    if (taken >= 0) {
      waiting_ -= std::min(waiting_, static_cast<unsigned>(taken));
    } else if (errno == EAGAIN || errno == EBUSY) {
      // Short of memory, or of room for results: what is under way will give it back.
      if (!empty) return 0;
      (void)usleep(100);
    } else if (errno != EINTR) {
      return errno;
    }
  }
}

bool Uring::next(uint64_t* tag, int32_t* result) {
  const unsigned head = *done_head_;
  if (head == __atomic_load_n(done_tail_, __ATOMIC_ACQUIRE)) return false;
  const io_uring_cqe& found = done_[head & done_mask_];
  *tag = found.user_data;
  *result = found.res;
  __atomic_store_n(done_head_, head + 1, __ATOMIC_RELEASE);
  return true;
}
#else
std::unique_ptr<Uring> Uring::open(unsigned) { return nullptr; }
Uring::~Uring() = default;
void Uring::transfer(bool, int, void*, uint32_t, int64_t, uint64_t) {}
void Uring::watch(int, uint64_t) {}
int Uring::wait() { return ENOSYS; }
bool Uring::next(uint64_t*, int32_t*) { return false; }
#endif

}  // namespace ts::paging
