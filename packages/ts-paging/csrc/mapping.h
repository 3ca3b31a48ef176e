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
  int64_t number = 0;
};

// Maps [offset, offset + bytes) of a file, any offset, for reading; what is written goes to pages
// of this process alone. Throws Failure, also if the file is another one than expected.
FileMapping map_privately(const std::string& path, int64_t offset, int64_t bytes,
                          const FileIdentity& expected);
// Maps the first bytes of a file of our own; what is written goes to the file.
FileMapping map_shared(int directory, const std::string& name, const std::string& path,
                       int64_t bytes);
void unmap(const FileMapping& mapping);

// Which mapping an address lies in, and where: its number (numbers are never used again), or 0.
struct MappedPlace {
  int64_t number = 0, offset = 0;
};
MappedPlace find_mapping(const void* address);
// Whether a mapping is still there.
bool is_mapped(int64_t number);

// Whether a page of such a mapping was written by this process: it is not the file's any more.
// Also true if that cannot be found out.
bool written_since(const void* data, int64_t bytes);

// Puts ordinary memory with these bytes in the place of whole pages of a mapping, at once for all
// who use it. Returns 0 or an errno; nothing changed then.
int replace_pages(void* place, const void* bytes, int64_t count);

}  // namespace ts::paging
