// What paging needs of CUDA, as plain functions. Without CUDA in the build they say so.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "job.h"

namespace ts::paging::device {

// Page-locks [data, data + bytes). Returns an empty string, or why it was refused; CUDA's sticky
// last error is clear afterwards in either case.
std::string pin(void* data, int64_t bytes, int device);
void unpin(void* data);
// Whether the range is page-locked for CUDA.
bool is_pinned(const void* data, int64_t bytes, int device);

// 1: reached, 0: not yet, -1: error, with its text.
int query(const DeviceEvent& event, std::string* error);
// Sleeps until the event is reached.
void synchronize(const DeviceEvent& event);
// Records an event on any stream of the device.
DeviceEvent record(int device, void* stream);
// Work put on `stream` from now on starts after the event.
void make_wait(int device, void* stream, const DeviceEvent& event);

// A non-blocking stream of our own, of the highest priority.
class Stream {
 public:
  explicit Stream(int device);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  void* get() const { return stream_; }
  int device() const { return device_; }
  // Queues one transfer. Blocks while it runs if the host side is pageable.
  void copy(void* dst, const void* src, int64_t bytes, bool to_device);

 private:
  int device_;
  void* stream_ = nullptr;
};

}  // namespace ts::paging::device
