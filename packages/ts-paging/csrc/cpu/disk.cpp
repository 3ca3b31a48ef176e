#include "disk.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <condition_variable>
#include <mutex>

#include "io_piece.h"

namespace ts::paging {
namespace {

Countdown io_until_failure;
std::atomic<int> injected_code{0};
std::mutex held_mutex;
std::condition_variable held_changed;
bool held = false;  // under the mutex

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

int64_t injected_result() {
  if (!io_until_failure.hit()) return INT64_MAX;
  return -int64_t{injected_code.load()};
}

void hold_io(bool on) {
  const std::lock_guard<std::mutex> lock(held_mutex);
  held = on;
  held_changed.notify_all();
}

void wait_while_held() {
  std::unique_lock<std::mutex> lock(held_mutex);
  held_changed.wait(lock, [] { return !held; });
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

namespace {

// Whether direct reads and writes work, and see what is written through a mapping and are seen.
bool direct_and_coherent(int fd) {
  const NoFileSizeSignal quiet;
  void* block = nullptr;
  if (posix_memalign(&block, kDirectAlign, kDirectAlign) != 0) return false;
  auto* const bytes = static_cast<volatile char*>(block);
  memset(block, 0x5a, kDirectAlign);
  bool good = pwrite(fd, block, kDirectAlign, 0) == kDirectAlign;
  void* map = MAP_FAILED;
  if (good) map = mmap(nullptr, kDirectAlign, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (map != MAP_FAILED) {
    auto* const mapped = static_cast<volatile char*>(map);
    good = mapped[kDirectAlign - 1] == 0x5a;
    mapped[0] = 0x11;
    memset(block, 0, kDirectAlign);
    good = good && pread(fd, block, kDirectAlign, 0) == kDirectAlign && bytes[0] == 0x11 &&
           bytes[kDirectAlign - 1] == 0x5a;
    mapped[1] = 0x22;  // there and unwritten when the direct write comes
    memset(block, 0x33, kDirectAlign);
    good = good && pwrite(fd, block, kDirectAlign, 0) == kDirectAlign && mapped[1] == 0x33;
    (void)munmap(map, kDirectAlign);
  }
  free(block);
  return good && map != MAP_FAILED;
}

}  // namespace

bool takes_direct_io(int directory) {
  const char* name = "direct-io-probe";
  const int fd =
      openat(directory, name, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC | O_DIRECT, 0600);
  // Some file systems make the file before they refuse the flag.
  const bool good = fd >= 0 && direct_and_coherent(fd);
  if (fd >= 0) (void)close(fd);
  (void)unlinkat(directory, name, 0);
  return good;
}

}  // namespace ts::paging
