// A device made of threads, in the place of csrc/cuda/device.cpp: its streams run what they are
// given in order and beside the host, and a test can hold them and see what they did.
#pragma once

#include <stdint.h>

#include <vector>

namespace fake {

// A stream of the program, as torch's current one; work on it runs until the gate is closed.
class Gate {
 public:
  Gate();
  ~Gate();
  void* stream() const { return stream_; }
  // Events recorded on the stream from now on are not reached before open().
  void close();
  void open();

 private:
  void* stream_;
};

// Destinations of the transfers so far, in the order in which the device made them.
std::vector<const void*> transfers();
void forget_transfers();

// Host memory [data, data + bytes) is not page-locked: a transfer blocks its caller.
void set_pageable(const void* data, int64_t bytes);

// Page-locking is refused from now on.
void refuse_pinning(bool on);

// Lets `n` more transfers go well, then has the call for one throw (n < 0: none).
void fail_transfer_after(int64_t n);

}  // namespace fake
