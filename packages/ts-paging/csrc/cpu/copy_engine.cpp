#include "copy_engine.h"

#include <string.h>

#include <exception>

namespace ts::paging {
namespace {

Countdown copies_until_failure;

Failure device_failure(const std::exception& error) {
  return {Failure::kDevice, 0, error.what(), ""};
}

}  // namespace

void fail_copy_after(int64_t n) { copies_until_failure.set(n); }

std::shared_ptr<CopyEngine::Lane> CopyEngine::lane(const Copy& copy) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) return nullptr;
  std::shared_ptr<Lane>& found = lanes_[{copy.device, static_cast<int>(copy.direction)}];
  if (!found) {
    auto made = std::make_shared<Lane>();
    if (copy.device >= 0) made->stream = std::make_unique<device::Stream>(copy.device);
    found = std::move(made);
  }
  return found;
}

void CopyEngine::submit(const std::shared_ptr<Job>& job, const Copy& copy) {
  try {
    const std::shared_ptr<Lane> here = lane(copy);
    if (!here) {
      job->fail({Failure::kState, 0, "[copy] the engine is closed", ""});
    } else if (copies_until_failure.hit()) {
      job->fail({Failure::kDevice, 0, "[copy] failed by a test hook", ""});
    } else if (copy.bytes == 0) {
      job->complete();
    } else if (copy.device >= 0) {
      submit_device(job, copy, *here);
    } else {
      here->worker.post([job, copy] {
        memcpy(copy.dst, copy.src, static_cast<size_t>(copy.bytes));
        job->complete();
      });
    }
  } catch (const std::exception& error) {
    job->fail(device_failure(error));
  }
}

void CopyEngine::submit_device(const std::shared_ptr<Job>& job, const Copy& copy, Lane& lane) {
  const bool to_device = copy.direction == Direction::kH2D;
  const void* host = to_device ? copy.src : copy.dst;
  const DeviceEvent ready = device::record(copy.device, copy.stream);
  device::Stream* stream = lane.stream.get();
  const int64_t chunk = chunk_;
  auto carry_out = [job, copy, ready, stream, to_device, chunk] {
    try {
      device::make_wait(copy.device, stream->get(), ready);
      stream->copy(copy.dst, copy.src, copy.bytes, to_device, chunk);
      job->submit_event(device::record(copy.device, stream->get()));
    } catch (const std::exception& error) {
      job->fail(device_failure(error));
    }
  };
  // With pageable memory the call blocks while the driver stages the bytes: a thread waits instead
  // of the caller. While that thread has work, later copies queue behind it: lanes keep their
  // order.
  if (lane.worker.pending() == 0 && device::is_pinned(host, copy.bytes, copy.device))
    carry_out();
  else
    lane.worker.post(std::move(carry_out));
}

void CopyEngine::close() {
  std::map<std::pair<int, int>, std::shared_ptr<Lane>> lanes;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    lanes.swap(lanes_);
  }
  for (auto& entry : lanes) {
    entry.second->worker.close();
    if (!entry.second->stream) continue;
    try {
      device::synchronize(
          device::record(entry.second->stream->device(), entry.second->stream->get()));
    } catch (const std::exception&) {
      // The device is gone or broken: its jobs tell that themselves.
    }
  }
}

}  // namespace ts::paging
