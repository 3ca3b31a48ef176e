#include "disk.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

namespace ts::paging {
namespace {

Countdown io_until_failure;
std::atomic<int> injected_code{0};

Failure storage_failure(const char* what, const std::string& path, int64_t offset, int64_t expected,
                        int64_t got, int code) {
  std::string text = std::string("[disk] ") + what + " " + path + " at offset " +
                     std::to_string(offset) + ": expected " + std::to_string(expected) +
                     " bytes, got " + std::to_string(got);
  text += code ? std::string(" (") + strerror(code) + ")" : " (the file ends there)";
  return {Failure::kStorage, code ? code : EIO, text, path};
}

// One pread or pwrite, again after a signal.
ssize_t transfer(bool write, int fd, char* data, int64_t bytes, int64_t offset) {
  if (io_until_failure.hit()) {
    errno = injected_code.load();
    if (errno == 0) return 0;
    if (errno != EINTR) return -1;
  }
  ssize_t done;
  do {
    done = write ? pwrite(fd, data, static_cast<size_t>(bytes), offset)
                 : pread(fd, data, static_cast<size_t>(bytes), offset);
  } while (done < 0 && errno == EINTR);
  return done;
}

// All of [data, data + bytes), whatever pieces the system takes it in; of a padded read only the
// first `needed` bytes must be there.
void transfer_all(bool write, int fd, const std::string& path, char* data, int64_t bytes,
                  int64_t offset, int64_t needed) {
  int64_t at = 0;
  while (at < needed) {
    const ssize_t done = transfer(write, fd, data + at, bytes - at, offset + at);
    // After a piece that ends inside a block direct I/O answers EINVAL: the file ends there.
    const bool ends = done == 0 || (done < 0 && errno == EINVAL && at % kDirectAlign != 0);
    if (done <= 0)
      throw storage_failure(write ? "writing" : "reading", path, offset, needed, at,
                            ends ? 0 : errno);
    at += done;
  }
}

// Blocks SIGXFSZ, which a file size limit sends to the thread that passes it, and takes it back.
class NoFileSizeSignal {
 public:
  NoFileSizeSignal() {
    sigemptyset(&set_);
    sigaddset(&set_, SIGXFSZ);
    pthread_sigmask(SIG_BLOCK, &set_, &before_);
  }
  ~NoFileSizeSignal() {
    const timespec now{};
    while (sigtimedwait(&set_, nullptr, &now) > 0) {
    }
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  NoFileSizeSignal(const NoFileSizeSignal&) = delete;
  NoFileSizeSignal& operator=(const NoFileSizeSignal&) = delete;

 private:
  sigset_t set_, before_;
};

int reserve_blocks(int fd, int64_t from, int64_t to) {
  const NoFileSizeSignal quiet;
  int code;
  do {
    code = posix_fallocate(fd, from, to - from);
  } while (code == EINTR);
  return code;
}

}  // namespace

void fail_io_after(int64_t n, int code) {
  injected_code = code;
  io_until_failure.set(n);
}

void reserve_file(int directory, const std::string& name, const std::string& path, int64_t bytes,
                  int64_t old_bytes, bool create) {
  const int flags = O_RDWR | O_NOFOLLOW | O_CLOEXEC | (create ? O_CREAT | O_EXCL : 0);
  const int fd = openat(directory, name.c_str(), flags, 0600);
  if (fd < 0)
    throw Failure{
        Failure::kStorage, errno,
        "[disk] " + std::string(create ? "making " : "opening ") + path + ": " + strerror(errno),
        path};
  int code = 0;
  if (bytes > old_bytes) code = reserve_blocks(fd, old_bytes, bytes);
  if (!code && bytes < old_bytes && ftruncate(fd, bytes) != 0) code = errno;
  // A reservation that failed half way may have left blocks behind.
  if (code && !create && ftruncate(fd, old_bytes) != 0) code = errno;
  close(fd);
  if (!code) return;
  if (create) (void)unlinkat(directory, name.c_str(), 0);
  throw Failure{
      Failure::kStorage, code,
      "[disk] reserving " + std::to_string(bytes) + " bytes for " + path + ": " + strerror(code),
      path};
}

bool takes_direct_io(int directory) {
  const char* name = "direct-io-probe";
  const int fd =
      openat(directory, name, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC | O_DIRECT, 0600);
  if (fd < 0) {
    // Some file systems make the file before they refuse the flag.
    (void)unlinkat(directory, name, 0);
    return false;
  }
  void* block = nullptr;
  bool good = posix_memalign(&block, kDirectAlign, kDirectAlign) == 0;
  if (good) {
    const NoFileSizeSignal quiet;
    memset(block, 0x5a, kDirectAlign);
    good = pwrite(fd, block, kDirectAlign, 0) == kDirectAlign;
    memset(block, 0, kDirectAlign);
    good = good && pread(fd, block, kDirectAlign, 0) == kDirectAlign &&
           static_cast<char*>(block)[kDirectAlign - 1] == 0x5a;
  }
  free(block);
  close(fd);
  (void)unlinkat(directory, name, 0);
  return good;
}

struct IoPool::Request {
  IoSpec spec;
  std::once_flag opening;
  int fd = -1;
  int64_t chunks = 0;
  int64_t next = 0;  // under the pool's mutex
  std::atomic<int64_t> left{0};
  std::atomic<bool> failed{false};
  std::shared_ptr<Job> job;

  ~Request() {
    if (fd >= 0) ::close(fd);
  }
  // By the first thread that works on it: a long queue must not use up the descriptors.
  void open() {
    std::call_once(opening, [this] {
      const int flags = (spec.write ? O_RDWR : O_RDONLY) | O_NOFOLLOW | O_CLOEXEC;
      fd = openat(spec.directory, spec.name.c_str(), flags | (spec.direct ? O_DIRECT : 0));
      if (fd < 0)
        fail({Failure::kStorage, errno, "[disk] opening " + spec.path + ": " + strerror(errno),
              spec.path});
    });
  }
  void fail(Failure failure) {
    if (!failed.exchange(true)) first = std::move(failure);
  }
  // Called once for each chunk; the last one settles the job, when no thread touches the memory.
  void chunk_done(int64_t count) {
    if (left.fetch_sub(count, std::memory_order_acq_rel) != count) return;
    if (fd >= 0) ::close(fd);
    fd = -1;
    if (failed.load())
      job->fail(std::move(first));
    else
      job->complete();
  }
  Failure first;
};

IoPool::IoPool(int threads, int64_t chunk_bytes)
    : threads_wanted_(threads),
      chunk_((chunk_bytes + kDirectAlign - 1) / kDirectAlign * kDirectAlign) {}

std::shared_ptr<Job> IoPool::submit(const IoSpec& spec) {
  auto request = std::make_shared<Request>();
  request->spec = spec;
  request->job = std::make_shared<Job>(spec.bytes);
  const std::shared_ptr<Job> job = request->job;
  if (spec.bytes == 0) {
    job->complete();
    return job;
  }
  request->chunks = (spec.bytes + chunk_ - 1) / chunk_;
  request->left = request->chunks;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (stop_) {
    job->fail({Failure::kState, 0, "[disk] the store is closed", spec.path});
    return job;
  }
  if (threads_.empty())
    for (int i = 0; i < threads_wanted_; ++i) threads_.push_back(quiet_thread([this] { loop(); }));
  queue_.push_back(std::move(request));
  wake_.notify_all();
  return job;
}

void IoPool::loop() {
  char* bounce = nullptr;
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    wake_.wait(lock, [this] { return stop_ || !queue_.empty(); });
    if (queue_.empty()) break;
    const std::shared_ptr<Request> request = queue_.front();
    const int64_t index = request->next++;
    if (request->next == request->chunks) queue_.pop_front();
    lock.unlock();
    if (!request->failed.load()) request->open();
    if (!request->failed.load()) {
      const int64_t begin = index * chunk_;
      try {
        run_chunk(*request, begin, std::min(begin + chunk_, request->spec.bytes), &bounce);
      } catch (Failure& failure) {
        request->fail(std::move(failure));
      }
    }
    request->chunk_done(1);
    lock.lock();
  }
  lock.unlock();
  free(bounce);
}

void IoPool::run_chunk(Request& request, int64_t begin, int64_t end, char** bounce) {
  const IoSpec& spec = request.spec;
  char* data = static_cast<char*>(spec.data) + begin;
  int64_t bytes = end - begin;
  int64_t offset = spec.offset + begin;
  if (!spec.direct) {
    transfer_all(spec.write, request.fd, spec.path, data, bytes, offset, bytes);
    return;
  }
  // Whole blocks of aligned memory go straight; everything else through an aligned buffer.
  if (reinterpret_cast<uintptr_t>(data) % kDirectAlign == 0) {
    const int64_t whole = bytes / kDirectAlign * kDirectAlign;
    transfer_all(spec.write, request.fd, spec.path, data, whole, offset, whole);
    data += whole;
    offset += whole;
    bytes -= whole;
  }
  if (bytes == 0) return;
  if (!*bounce) {
    void* made = nullptr;
    if (posix_memalign(&made, kDirectAlign, static_cast<size_t>(chunk_)) != 0)
      throw Failure{Failure::kStorage, ENOMEM, "[disk] no memory for an I/O buffer", spec.path};
    *bounce = static_cast<char*>(made);
  }
  const int64_t padded = (bytes + kDirectAlign - 1) / kDirectAlign * kDirectAlign;
  if (spec.write) {
    memcpy(*bounce, data, static_cast<size_t>(bytes));
    memset(*bounce + bytes, 0, static_cast<size_t>(padded - bytes));
    transfer_all(true, request.fd, spec.path, *bounce, padded, offset, padded);
  } else {
    transfer_all(false, request.fd, spec.path, *bounce, padded, offset, bytes);
    memcpy(data, *bounce, static_cast<size_t>(bytes));
  }
}

void IoPool::close() {
  std::deque<std::shared_ptr<Request>> dropped;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    dropped.swap(queue_);
    wake_.notify_all();
  }
  for (const std::shared_ptr<Request>& request : dropped) {
    request->fail({Failure::kState, 0, "[disk] the store was closed before this was done",
                   request->spec.path});
    request->chunk_done(request->chunks - request->next);
  }
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

}  // namespace ts::paging
