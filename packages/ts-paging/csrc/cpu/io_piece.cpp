#include "io_piece.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

namespace ts::paging {
namespace {

Failure storage_failure(bool write, const std::string& path, int64_t offset, int64_t expected,
                        int64_t got, int code) {
  std::string text = std::string("[disk] ") + (write ? "writing " : "reading ") + path +
                     " at offset " + std::to_string(offset) + ": expected " +
                     std::to_string(expected) + " bytes, got " + std::to_string(got);
  text += code ? std::string(" (") + strerror(code) + ")" : " (the file ends there)";
  return {Failure::kStorage, code ? code : EIO, text, path};
}

int64_t padded(int64_t bytes) { return (bytes + kDirectAlign - 1) / kDirectAlign * kDirectAlign; }

// What direct I/O asks of memory addresses; 0: more than we give.
int64_t memory_alignment(int fd) {
#ifdef STATX_DIOALIGN
  struct statx found;
  if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &found) == 0 &&
      (found.stx_mask & STATX_DIOALIGN)) {
    const bool fits = found.stx_dio_offset_align != 0 &&
                      found.stx_dio_offset_align <= kDirectAlign &&
                      found.stx_dio_mem_align <= kDirectAlign;
    return fits ? std::max<int64_t>(found.stx_dio_mem_align, 64) : 0;
  }
#else
  (void)fd;
#endif
  return kDirectAlign;
}

FileIdentity identity_of(const struct stat& found) {
  return {found.st_dev, found.st_ino, found.st_size,
          static_cast<int64_t>(found.st_mtim.tv_sec) * 1000000000 + found.st_mtim.tv_nsec};
}

}  // namespace

FileIdentity identify(const std::string& path) {
  struct stat found;
  if (stat(path.c_str(), &found) != 0)
    throw Failure{Failure::kStorage, errno, "[disk] opening " + path + ": " + strerror(errno),
                  path};
  return identity_of(found);
}

IoPool::Request::~Request() {
  if (fd >= 0) (void)::close(fd);
}

void IoPool::Request::open() {
  std::call_once(opening, [this] { open_file(); });
}

void IoPool::Request::open_file() {
  // A file that is known needs no other protection, and may be named through /proc.
  const int follow = spec.expected.bytes >= 0 ? 0 : O_NOFOLLOW;
  const int flags = (spec.write ? O_RDWR : O_RDONLY) | follow | O_CLOEXEC;
  direct = spec.direct;
  fd = openat(spec.directory, spec.name.c_str(), flags | (direct ? O_DIRECT : 0));
  // Another file system than that of our own folder may not take it.
  if (fd < 0 && direct && errno == EINVAL) {
    direct = false;
    fd = openat(spec.directory, spec.name.c_str(), flags);
  }
  if (fd < 0)
    return fail({Failure::kStorage, errno, "[disk] opening " + spec.path + ": " + strerror(errno),
                 spec.path});
  struct stat found;
  if (spec.expected.bytes >= 0) {
    const FileIdentity now = fstat(fd, &found) == 0 ? identity_of(found) : FileIdentity{};
    const FileIdentity& then = spec.expected;
    if (now.device != then.device || now.inode != then.inode || now.bytes != then.bytes ||
        now.modified_ns != then.modified_ns)
      return fail({Failure::kStorage, ESTALE,
                   "[disk] " + spec.path +
                       " was written since it was opened: expected the file of " +
                       std::to_string(then.bytes) + " bytes that it was, found one of " +
                       std::to_string(now.bytes) + ". Load the model again",
                   spec.path});
  }
  if (direct) memory_align = memory_alignment(fd);
  if (direct && memory_align == 0) {
    direct = false;
    (void)fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_DIRECT);
  }
}

void IoPool::Request::fail(Failure reason) {
  if (!failed.exchange(true)) failure = std::move(reason);
}

void IoPool::Request::chunk_done(int64_t count) {
  if (left.fetch_sub(count, std::memory_order_acq_rel) != count) return;
  if (fd >= 0) (void)::close(fd);
  fd = -1;
  if (failed.load())
    job->fail(std::move(failure));
  else
    job->complete();
}

bool IoPool::Piece::wants_staging() const {
  return request->direct &&
         (offset % kDirectAlign != 0 || bytes < kDirectAlign ||
          reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(request->memory_align) != 0);
}

void IoPool::Piece::plan(char* staging) {
  staged = wants_staging();
  skipped = staged ? offset % kDirectAlign : 0;
  io = staged ? staging : data;
  io_offset = offset - skipped;
  io_bytes = bytes;
  at = 0;
  if (staged) {
    io_bytes = padded(skipped + bytes);
  } else if (request->direct) {
    io_bytes = bytes / kDirectAlign * kDirectAlign;
  }
  needed = io_bytes;
  if (staged && request->spec.write) {
    memcpy(io, data, static_cast<size_t>(bytes));
    memset(io + bytes, 0, static_cast<size_t>(io_bytes - bytes));
  } else if (staged) {
    needed = skipped + bytes;
  }
}

bool IoPool::Piece::advance(int64_t result) {
  if (result == -EINTR || result == -EAGAIN) return false;
  // After a piece that ends inside a block direct I/O answers EINVAL: the file ends there.
  const bool ends = result == 0 || (result == -EINVAL && at % kDirectAlign != 0);
  if (result <= 0)
    throw storage_failure(request->spec.write, request->spec.path, io_offset, needed, at,
                          ends ? 0 : static_cast<int>(-result));
  at += result;
  return at >= needed;
}

void IoPool::Piece::finish() {
  const int64_t done = staged ? bytes : io_bytes;
  if (staged && !request->spec.write) memcpy(data, io + skipped, static_cast<size_t>(done));
  data += done;
  offset += done;
  bytes -= done;
}

}  // namespace ts::paging
