// Mappings of files that are not ours, and of those that are when their disk fails.
#pragma once

#include <cstdint>
#include <string>

#include "disk.h"

namespace ts::paging {

struct FileMapping {
  void* base = nullptr;  // of whole pages
  int64_t mapped = 0;
  void* data = nullptr;  // first byte asked for
};

// Maps [offset, offset + bytes) of a file, any offset, for reading; what is written goes to pages
// of this process alone. Throws Failure, also if the file is another one than expected.
FileMapping map_privately(const std::string& path, int64_t offset, int64_t bytes,
                          const FileIdentity& expected);
void unmap(const FileMapping& mapping);

// Whether a page of such a mapping was written by this process: it is not the file's any more.
// Also true if that cannot be found out.
bool written_since(const void* data, int64_t bytes);

// Puts ordinary memory with these bytes in the place of whole pages of a mapping, at once for all
// who use it. Returns 0 or an errno; nothing changed then.
int replace_pages(void* place, const void* bytes, int64_t count);

}  // namespace ts::paging
