// One chunk of a request on its way: which transfers it takes, whoever carries them out.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <mutex>
#include <string>

#include "disk.h"

namespace ts::paging {

struct IoPool::Request {
  IoSpec spec;
  std::once_flag opening;
  int fd = -1;
  bool direct = false;  // what opening found
  int64_t memory_align = kDirectAlign;
  int64_t first = 0;  // offset of the first chunk, aligned
  int64_t chunks = 0;
  int64_t next = 0;  // under the pool's mutex
  std::atomic<int64_t> left{0};
  std::atomic<bool> failed{false};
  Failure failure;
  std::shared_ptr<Job> job;

  ~Request();
  // By the first who works on it: a long queue must not use up the descriptors.
  void open();
  void fail(Failure reason);
  // Called once for each chunk; the last one settles the job, when nobody touches the memory.
  void chunk_done(int64_t count);

 private:
  void open_file();
};

// Whole blocks of aligned memory go straight; everything else through a staging buffer.
struct IoPool::Piece {
  std::shared_ptr<Request> request;
  char* data = nullptr;  // of the caller, what is left of this chunk
  int64_t bytes = 0;
  int64_t offset = 0;

  // The transfer under way.
  char* io = nullptr;
  int64_t io_bytes = 0, io_offset = 0, at = 0;
  int64_t needed = 0;   // of io_bytes: those that must be there
  int64_t skipped = 0;  // of io: bytes before the caller's
  bool staged = false;

  // Whether the next transfer needs the staging buffer. Only while bytes > 0.
  bool wants_staging() const;
  // Sets up the next transfer; `staging` has room for a chunk.
  void plan(char* staging);
  // Takes the result of a read or write of [io + at, io + io_bytes): bytes, or -errno. Returns true
  // if this transfer is complete, false if it is to be continued; throws Failure.
  bool advance(int64_t result);
  // Puts the bytes of a complete transfer where they belong and goes on to what is left.
  void finish();
};

// What the test hook wants of the next transfer: 1 nothing, else its result.
int64_t injected_result();
// Returns once the disk no longer hangs, by the test hook.
void wait_while_held();

}  // namespace ts::paging
