#include "mapping.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

namespace ts::paging {
namespace {

Failure refused(const char* what, const std::string& path, int code) {
  return {Failure::kStorage, code,
          std::string("[disk] ") + what + " " + path + ": " + strerror(code), path};
}

int64_t page_size() {
  static const int64_t size = sysconf(_SC_PAGESIZE);
  return size;
}

}  // namespace

FileMapping map_privately(const std::string& path, int64_t offset, int64_t bytes,
                          const FileIdentity& expected) {
  const int fd = open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
  if (fd < 0) throw refused("opening", path, errno);
  struct stat found;
  const bool same = fstat(fd, &found) == 0 && S_ISREG(found.st_mode) &&
                    found.st_dev == expected.device && found.st_ino == expected.inode &&
                    found.st_size == expected.bytes;
  FileMapping made;
  const int64_t before = offset % page_size();
  made.mapped = before + bytes;
  int code = same ? 0 : ESTALE;
  if (same) {
    made.base = mmap(nullptr, static_cast<size_t>(made.mapped), PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_NORESERVE, fd, offset - before);
    if (made.base == MAP_FAILED) code = errno;
  }
  (void)close(fd);
  if (code) throw refused("mapping", path, code);
  made.data = static_cast<char*>(made.base) + before;
  return made;
}

void unmap(const FileMapping& mapping) {
  if (mapping.base) (void)munmap(mapping.base, static_cast<size_t>(mapping.mapped));
}

bool written_since(const void* data, int64_t bytes) {
  // Bits of an entry of /proc/self/pagemap that are shown to everybody.
  constexpr uint64_t kPresent = uint64_t{1} << 63, kSwapped = uint64_t{1} << 62,
                     kOfFile = uint64_t{1} << 61;
  const int fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return true;
  const auto first = static_cast<int64_t>(reinterpret_cast<uintptr_t>(data)) / page_size();
  const auto last =
      (static_cast<int64_t>(reinterpret_cast<uintptr_t>(data)) + bytes - 1) / page_size();
  uint64_t entries[512];
  bool written = false;
  for (int64_t page = first; page <= last && !written;) {
    const auto wanted = std::min<int64_t>(last - page + 1, 512);
    const ssize_t got = pread(fd, entries, static_cast<size_t>(wanted) * sizeof(uint64_t),
                              page * static_cast<int64_t>(sizeof(uint64_t)));
    if (got < static_cast<ssize_t>(sizeof(uint64_t))) written = true;
    for (ssize_t i = 0; i < got / static_cast<ssize_t>(sizeof(uint64_t)); ++i)
      written = written || ((entries[i] & (kPresent | kSwapped)) && !(entries[i] & kOfFile));
    page += std::max<int64_t>(got, 0) / static_cast<int64_t>(sizeof(uint64_t));
  }
  (void)close(fd);
  return written;
}

int replace_pages(void* place, const void* bytes, int64_t count) {
  if (reinterpret_cast<uintptr_t>(place) % static_cast<uintptr_t>(page_size()) != 0) return EINVAL;
  const auto whole = static_cast<size_t>((count + page_size() - 1) / page_size() * page_size());
  void* made = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (made == MAP_FAILED) return errno;
  memcpy(made, bytes, static_cast<size_t>(count));
  if (mremap(made, whole, whole, MREMAP_MAYMOVE | MREMAP_FIXED, place) == MAP_FAILED) {
    const int code = errno;
    (void)munmap(made, whole);
    return code;
  }
  return 0;
}

}  // namespace ts::paging
