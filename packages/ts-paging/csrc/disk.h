// Reads and writes of whole tensors by a pool of I/O threads: direct I/O where the file takes it,
// plain pread / pwrite otherwise, never a mapping.
#pragma once

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

struct IoSpec {
  bool write = false;
  int directory = -1;  // descriptor that `name` is relative to (AT_FDCWD for a plain path)
  std::string name;
  std::string path;  // for messages
  void* data = nullptr;
  int64_t bytes = 0;
  int64_t offset = 0;
  // Direct I/O; offset must be aligned, and the file padded to kDirectAlign past the last byte.
  bool direct = false;
};

class IoPool {
 public:
  IoPool(int threads, int64_t chunk_bytes);
  ~IoPool() { close(); }
  // The file is opened (never through a link) when its turn comes; the memory must live until the
  // job is finished.
  std::shared_ptr<Job> submit(const IoSpec& spec);
  // Fails what has not begun, finishes what has, joins the threads.
  void close();

 private:
  struct Request;
  void loop();
  void run_chunk(Request& request, int64_t begin, int64_t end, char** bounce);

  const int threads_wanted_;
  const int64_t chunk_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::shared_ptr<Request>> queue_;
  std::vector<std::thread> threads_;
  bool stop_ = false;
};

// Makes the file (O_CREAT | O_EXCL, 0600) if `create`, and reserves its blocks up to `bytes`; a
// file that was longer is cut. Throws Failure; the file is then as before, or gone if it was made
// here.
void reserve_file(int directory, const std::string& name, const std::string& path, int64_t bytes,
                  int64_t old_bytes, bool create);

// Whether files in the directory take direct reads and writes.
bool takes_direct_io(int directory);

// Test hook: let `n` more reads and writes go well, then have one fail with `code`; code 0: the
// file ends there (a short read). n < 0: none.
void fail_io_after(int64_t n, int code);

}  // namespace ts::paging
