// Reads and writes of whole tensors and parts of them: direct I/O where the file takes it, several
// chunks in flight through io_uring or a pool of threads; plain pread / pwrite otherwise, never a
// mapping.
#pragma once

#include <stdlib.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "job.h"

namespace ts::paging {

// File offsets, sizes and memory addresses of direct I/O are multiples of this.
constexpr int64_t kDirectAlign = 4096;

// Which file it is and what is in it, as far as the file system tells.
struct FileIdentity {
  uint64_t device = 0, inode = 0;
  int64_t bytes = -1;  // -1: any file will do
  int64_t modified_ns = 0;
};

struct IoSpec {
  bool write = false;
  int directory = -1;  // descriptor that `name` is relative to (AT_FDCWD for a plain path)
  std::string name;
  std::string path;  // for messages
  void* data = nullptr;
  int64_t bytes = 0;
  int64_t offset = 0;
  // Direct I/O. A read may begin anywhere; a write at an aligned offset, in a file that is padded
  // to kDirectAlign past the last byte.
  bool direct = false;
  FileIdentity expected;
};

enum class IoBackend : int { kAuto = 0, kUring = 1, kThreads = 2 };

class IoPool {
 public:
  // At most `threads` chunks are under way at once through io_uring, which takes what is aligned,
  // and as many on the threads, which take everything else.
  IoPool(int threads, int64_t chunk_bytes, IoBackend backend = IoBackend::kAuto);
  ~IoPool() { close(); }
  // The file is opened (never through a link) when its turn comes; the memory must live until the
  // job is finished.
  std::shared_ptr<Job> submit(const IoSpec& spec);
  // Fails what has not begun, finishes what has, joins the threads.
  void close();
  // Whether aligned direct I/O goes through io_uring; found out when asked first.
  bool uses_uring();

 private:
  struct Request;
  struct Piece;
  struct Ring;
  bool take(std::deque<std::shared_ptr<Request>>& queue, Piece* piece);
  void thread_loop(size_t index);
  char* staging(bool ring, size_t index, const std::string& path);
  void ring_loop();
  void start_ring();

  const int threads_wanted_;
  const int64_t chunk_;
  const IoBackend backend_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::shared_ptr<Request>> queue_;       // for the threads
  std::deque<std::shared_ptr<Request>> ring_queue_;  // for the ring
  std::vector<std::thread> threads_;
  bool ring_tried_ = false;
  std::shared_ptr<Ring> ring_;
  std::thread ring_thread_;
  bool stop_ = false;

  // A chunk for each that is under way, made when one is needed first. Huge pages make fewer
  // segments of a transfer: the disk is up to twice as fast.
  class Staging {
   public:
    explicit Staging(bool huge) : huge_(huge) {}
    char* get(size_t index, size_t count, int64_t chunk, const std::string& path);

   private:
    struct Free {
      void operator()(char* data) const { free(data); }
    };
    const bool huge_;
    std::once_flag once_;
    std::unique_ptr<char, Free> memory_;
  };
  Staging staging_{true};
  Staging ring_staging_{false};  // last blocks of tensors, nearly always
};

// Makes the file (O_CREAT | O_EXCL, 0600) if `create`, and reserves its blocks up to `bytes`; a
// file that was longer is cut. Throws Failure; the file is then as before, or gone if it was made
// here.
void reserve_file(int directory, const std::string& name, const std::string& path, int64_t bytes,
                  int64_t old_bytes, bool create);

// Whether files in the directory take direct reads and writes, and mappings of them see these and
// are seen by them.
bool takes_direct_io(int directory);

// Throws Failure.
FileIdentity identify(const std::string& path);

// Test hooks: let `n` more reads and writes go well, then have one fail with `code`; code 0: the
// file ends there (a short read). n < 0: none.
void fail_io_after(int64_t n, int code);
// With `on`, reads and writes do not begin until it is off again: a disk that hangs.
void hold_io(bool on);

}  // namespace ts::paging
