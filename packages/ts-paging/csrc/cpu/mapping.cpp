#include "mapping.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <set>

namespace ts::paging {
namespace {

// Memory is unmapped by whatever thread drops a tensor last, also without the interpreter.
struct Known {
  std::mutex mutex;
  std::map<uintptr_t, FileMapping> by_address;  // of the first byte asked for
  std::set<int64_t> numbers;
  int64_t last = 0;
};

Known& known() {
  static Known* all = [] {
    // A child that is forked while another thread is in here must find the mutex free.
    (void)pthread_atfork([] { known().mutex.lock(); }, [] { known().mutex.unlock(); },
                         [] { known().mutex.unlock(); });
    return new Known;
  }();
  return *all;
}

void remember(FileMapping* made) {
  Known& all = known();
  const std::lock_guard<std::mutex> lock(all.mutex);
  made->number = ++all.last;
  all.numbers.insert(made->number);
  all.by_address[reinterpret_cast<uintptr_t>(made->data)] = *made;
}

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
  const bool same =
      fstat(fd, &found) == 0 && S_ISREG(found.st_mode) && found.st_dev == expected.device &&
      found.st_ino == expected.inode && found.st_size == expected.bytes &&
      int64_t{found.st_mtim.tv_sec} * 1000000000 + found.st_mtim.tv_nsec == expected.modified_ns;
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
  remember(&made);
  return made;
}

FileMapping map_shared(int directory, const std::string& name, const std::string& path,
                       int64_t bytes) {
  const int fd = openat(directory, name.c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC);
  if (fd < 0) throw refused("opening", path, errno);
  FileMapping made;
  made.mapped = bytes;
  made.base = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  const int code = made.base == MAP_FAILED ? errno : 0;
  (void)close(fd);
  if (code) throw refused("mapping", path, code);
  made.data = made.base;
  remember(&made);
  return made;
}

void unmap(const FileMapping& mapping) {
  if (!mapping.base) return;
  {
    // Before the address can be given to somebody else.
    Known& all = known();
    const std::lock_guard<std::mutex> lock(all.mutex);
    all.numbers.erase(mapping.number);
    all.by_address.erase(reinterpret_cast<uintptr_t>(mapping.data));
  }
  (void)munmap(mapping.base, static_cast<size_t>(mapping.mapped));
}

MappedPlace find_mapping(const void* address) {
  const auto wanted = reinterpret_cast<uintptr_t>(address);
  Known& all = known();
  const std::lock_guard<std::mutex> lock(all.mutex);
  auto found = all.by_address.upper_bound(wanted);
  if (found == all.by_address.begin()) return {};
  --found;
  const FileMapping& mapping = found->second;
  const auto end = reinterpret_cast<uintptr_t>(mapping.base) + static_cast<size_t>(mapping.mapped);
  if (wanted >= end) return {};
  return {mapping.number, static_cast<int64_t>(wanted - found->first)};
}

bool is_mapped(int64_t number) {
  Known& all = known();
  const std::lock_guard<std::mutex> lock(all.mutex);
  return all.numbers.count(number) != 0;
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
