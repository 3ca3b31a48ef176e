// Bindings: checks, the GIL, and the Python references that keep memory alive while it is copied.
#include "bindings.h"

#include <unistd.h>

#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "copy_engine.h"
#include "disk.h"
#include "host_memory.h"

namespace ts::paging {
namespace {

void expect_owner(int owner, const char* what) {
  if (owner != getpid())
    raise({Failure::kState, 0,
           std::string("[") + what + "] belongs to process " + std::to_string(owner) +
               ", this is its forked child: make a new one here",
           ""});
}

// Python references to the memory of running jobs. Touched with the GIL only.
class Keeper {
 public:
  void add(int queue, std::shared_ptr<Job> job, std::vector<nb::object> objects) {
    if (queue >= static_cast<int>(queues_.size())) queues_.resize(queue + 1);
    queues_[queue].push_back({std::move(job), std::move(objects)});
  }
  // Lets go of what has finished. Dropping a reference may run Python code that comes back here, so
  // an entry leaves its queue first.
  void reap() {
    for (size_t q = 0; q < queues_.size(); ++q)
      while (!queues_[q].empty() && queues_[q].front().job->finished()) {
        const Entry done = std::move(queues_[q].front());
        queues_[q].pop_front();
      }
  }
  std::shared_ptr<Job> oldest() const {
    for (const auto& queue : queues_)
      if (!queue.empty()) return queue.front().job;
    return nullptr;
  }
  int64_t size() const {
    int64_t n = 0;
    for (const auto& queue : queues_) n += static_cast<int64_t>(queue.size());
    return n;
  }

 private:
  struct Entry {
    std::shared_ptr<Job> job;
    std::vector<nb::object> objects;
  };
  std::vector<std::deque<Entry>> queues_;
};

class Ticket {
 public:
  Ticket(std::shared_ptr<Job> job, std::shared_ptr<Keeper> keeper, WaitPolicy policy, int device,
         std::weak_ptr<Lane> lane = {})
      : job_(std::move(job)),
        keeper_(std::move(keeper)),
        policy_(policy),
        device_(device),
        lane_(std::move(lane)) {}

  bool done() {
    if (owner_ != getpid()) expect_owner(owner_, "ticket");
    if (!job_->finished()) return false;
    keeper_->reap();
    return true;
  }
  void wait() {
    expect_owner(owner_, "ticket");
    const std::shared_ptr<Job> job = job_;
    if (!job->finished()) {
      promote();
      wait_with_signals([this, &job] { return job->wait(policy_, kSliceUs); });
    }
    keeper_->reap();
    if (const auto failure = job->failure()) raise(*failure);
  }
  void wait_stream(nb::object stream) {
    if (device_ < 0) return wait();
    const std::shared_ptr<Job> job = handed_over();
    int device = device_;
    void* handle = nullptr;
    if (stream.is_none()) {
      if (torch_api()->current_stream(dl::kCUDA, device, &handle) != 0) throw nb::python_error();
    } else {
      handle = reinterpret_cast<void*>(nb::cast<uintptr_t>(stream.attr("cuda_stream")));
      device = nb::cast<int>(stream.attr("device_index"));
    }
    job->wait_on_device(device, handle);
  }
  // Needed now: it passes the copies that are still queued.
  void promote() {
    expect_owner(owner_, "ticket");
    if (job_->submitted()) return;
    if (const std::shared_ptr<Lane> lane = lane_.lock()) {
      const nb::gil_scoped_release release;
      lane->promote(job_);
    }
  }
  // What a later copy to or from the device `other` waits for. Between CPU tensors this thread
  // waits.
  DeviceEvent event_for(int other) {
    if (device_ < 0 || other < 0) {
      wait();
      return nullptr;
    }
    return handed_over()->event();
  }
  int64_t bytes() const { return job_->bytes(); }

 private:
  // The job, once the device has all of it.
  std::shared_ptr<Job> handed_over() {
    expect_owner(owner_, "ticket");
    const std::shared_ptr<Job> job = job_;
    if (!job->submitted()) {
      promote();
      if (!job->submitted())
        wait_with_signals([this, &job] { return job->wait_submitted(policy_, kSliceUs); });
    }
    if (const auto failure = job->failure()) raise(*failure);
    return job;
  }

  std::shared_ptr<Job> job_;
  std::shared_ptr<Keeper> keeper_;
  WaitPolicy policy_;
  int device_;
  std::weak_ptr<Lane> lane_;
  int owner_ = getpid();
};

WaitPolicy policy_of(int mode, int64_t spin_us, int64_t sleep_us) {
  return {static_cast<WaitPolicy::Mode>(mode), spin_us, sleep_us};
}

class Engine {
 public:
  Engine(int64_t chunk_bytes, int64_t window_bytes, int64_t max_inflight_bytes, WaitPolicy policy)
      : engine_(std::make_unique<CopyEngine>(chunk_bytes, window_bytes, policy)),
        max_inflight_(max_inflight_bytes),
        policy_(policy) {}
  ~Engine() {
    // In a forked child the threads are not there and their locks may be held for ever: let go.
    if (owner_ != getpid()) {
      (void)engine_.release();
      return;
    }
    close();
  }
  // One ticket for all the pairs. Nothing is copied if one of them is wrong.
  Ticket submit(int direction, const nb::list& dsts, const nb::list& srcs, int priority,
                const nb::list& after) {
    expect_owner(owner_, "copy engine");
    const char* op = direction == 0 ? "h2d" : "d2h";
    check(dsts.size() == srcs.size(), op, "dsts", std::to_string(srcs.size()) + " tensors",
          std::to_string(dsts.size()));
    Copy copy;
    copy.direction = static_cast<Direction>(direction);
    copy.priority = priority;
    std::vector<nb::object> objects;
    for (size_t i = 0; i < dsts.size(); ++i) {
      const nb::object dst = dsts[i], src = srcs[i];
      add_part(&copy, op, nb::cast<TensorView>(dst), nb::cast<TensorView>(src), i == 0);
      objects.push_back(dst);
      objects.push_back(src);
    }
    for (nb::handle ticket : after)
      if (DeviceEvent event = nb::cast<Ticket&>(ticket).event_for(copy.device))
        copy.after.push_back(std::move(event));
    const int64_t bytes = copy.bytes();
    // A bound on what is issued ahead; what is needed now is not held up by it.
    if (priority > 0)
      keeper_->reap();
    else
      make_room(bytes);
    const int device = copy.device;
    auto job = std::make_shared<Job>(bytes, inflight_);
    keeper_->add(((device + 1) * 2 + direction) * 2 + (priority > 0 ? 1 : 0), job,
                 std::move(objects));
    std::shared_ptr<Lane> lane;
    {
      const nb::gil_scoped_release release;
      lane = engine_->submit(job, std::move(copy));
    }
    return Ticket(std::move(job), keeper_, policy_, device, lane);
  }
  void synchronize() {
    expect_owner(owner_, "copy engine");
    keeper_->reap();
    while (const std::shared_ptr<Job> job = keeper_->oldest()) {
      wait_with_signals([this, &job] { return job->wait(policy_, kSliceUs); });
      keeper_->reap();
    }
  }
  void close() {
    if (owner_ != getpid()) return;
    {
      const nb::gil_scoped_release release;
      engine_->close();
    }
    keeper_->reap();
  }
  int64_t inflight_bytes() {
    if (owner_ == getpid()) keeper_->reap();
    return inflight_->load();
  }
  int64_t kept() const { return keeper_->size(); }

 private:
  static void add_part(Copy* copy, const char* op, const TensorView& dst, const TensorView& src,
                       bool first) {
    check(dst.is_contiguous(), op, "dst", "a contiguous tensor", dst.describe());
    check(src.is_contiguous(), op, "src", "a contiguous tensor", src.describe());
    bool same = dst.ndim() == src.ndim();
    for (int i = 0; same && i < dst.ndim(); ++i) same = dst.shape(i) == src.shape(i);
    check(same, op, "dst", "the shape of " + src.describe(), dst.describe());
    check(dst.nbytes() == src.nbytes(), op, "dst", "the dtype of " + src.describe(),
          dst.describe());
    const bool up = copy->direction == Direction::kH2D;
    check((up ? src : dst).is_cpu(), op, up ? "src" : "dst", "a CPU tensor",
          (up ? src : dst).describe());
    const TensorView& device_side = up ? dst : src;
    const int device = device_side.is_cuda() ? device_side.device_id() : -1;
    if (first) {
      copy->device = device;
      copy->stream = device_side.current_stream();
    }
    check(device == copy->device, op, up ? "dst" : "src", "tensors of one device",
          device_side.describe());
    if (src.nbytes() > 0) copy->parts.push_back({dst.data(), src.data(), src.nbytes()});
  }
  void make_room(int64_t bytes) {
    keeper_->reap();
    while (inflight_->load() > 0 && inflight_->load() + bytes > max_inflight_) {
      const std::shared_ptr<Job> job = keeper_->oldest();
      if (!job) return;
      wait_with_signals([this, &job] { return job->wait(policy_, kSliceUs); });
      keeper_->reap();
    }
  }

  std::unique_ptr<CopyEngine> engine_;
  std::shared_ptr<Keeper> keeper_ = std::make_shared<Keeper>();
  std::shared_ptr<std::atomic<int64_t>> inflight_ = std::make_shared<std::atomic<int64_t>>(0);
  const int64_t max_inflight_;
  const WaitPolicy policy_;
  const int owner_ = getpid();
};

class Disk {
 public:
  Disk(int threads, int64_t chunk_bytes, WaitPolicy policy, IoBackend backend)
      : pool_(std::make_unique<IoPool>(threads, chunk_bytes, backend)), policy_(policy) {}
  ~Disk() {
    if (owner_ != getpid()) {
      (void)pool_.release();
      return;
    }
    close();
  }
  Ticket submit(bool write, int directory, std::string name, std::string path,
                nb::object bytes_object, int64_t offset, bool direct,
                const FileIdentity& expected) {
    expect_owner(owner_, "disk store");
    const TensorView bytes = nb::cast<TensorView>(bytes_object);
    expect(bytes, "disk", "tensor", DType::kU8);
    check(bytes.is_cpu(), "disk", "tensor", "host memory", bytes.describe());
    check(offset >= 0, "disk", "offset", "an integer >= 0", std::to_string(offset));
    keeper_->reap();
    IoSpec spec;
    spec.write = write;
    spec.directory = directory;
    spec.name = std::move(name);
    spec.path = std::move(path);
    spec.data = bytes.data();
    spec.bytes = bytes.nbytes();
    spec.offset = offset;
    spec.direct = direct && (!write || offset % kDirectAlign == 0);
    spec.expected = expected;
    std::shared_ptr<Job> job;
    {
      const nb::gil_scoped_release release;
      job = pool_->submit(spec);
    }
    keeper_->add(0, job, {std::move(bytes_object)});
    return Ticket(std::move(job), keeper_, policy_, -1);
  }
  void close() {
    if (owner_ != getpid()) return;
    {
      const nb::gil_scoped_release release;
      pool_->close();
    }
    keeper_->reap();
  }
  bool uses_uring() {
    expect_owner(owner_, "disk store");
    return pool_->uses_uring();
  }

 private:
  std::unique_ptr<IoPool> pool_;
  std::shared_ptr<Keeper> keeper_ = std::make_shared<Keeper>();
  const WaitPolicy policy_;
  const int owner_ = getpid();
};

void reserve(int directory, const std::string& name, const std::string& path, int64_t bytes,
             int64_t old_bytes, bool create) {
  try {
    const nb::gil_scoped_release release;
    reserve_file(directory, name, path, bytes, old_bytes, create);
  } catch (const Failure& failure) {
    raise(failure);
  }
}

FileIdentity identity(const std::string& path) {
  try {
    return identify(path);
  } catch (const Failure& failure) {
    raise(failure);
  }
}

void bind(nb::module_& m) {
  // A process may keep its engine, allocator or store to the end: that is no leak.
  nb::set_leak_warnings(false);
  nb::class_<Ticket>(m, "Ticket")
      .def("done", &Ticket::done)
      .def("wait", &Ticket::wait)
      .def("promote", &Ticket::promote)
      .def("wait_stream", &Ticket::wait_stream, "stream"_a = nb::none())
      .def_prop_ro("nbytes", &Ticket::bytes);
  nb::class_<Engine>(m, "Engine")
      .def(
          "__init__",
          [](Engine* self, int64_t chunk, int64_t window, int64_t inflight, int mode, int64_t spin,
             int64_t sleep) {
            new (self) Engine(chunk, window, inflight, policy_of(mode, spin, sleep));
          },
          "chunk_bytes"_a, "window_bytes"_a, "max_inflight_bytes"_a, "mode"_a, "spin_us"_a,
          "sleep_us"_a)
      .def("submit", &Engine::submit, "direction"_a, "dsts"_a, "srcs"_a, "priority"_a, "after"_a)
      .def("synchronize", &Engine::synchronize)
      .def("close", &Engine::close)
      .def_prop_ro("inflight_bytes", &Engine::inflight_bytes)
      .def_prop_ro("kept", &Engine::kept);
  nb::class_<FileIdentity>(m, "FileIdentity")
      .def(nb::init<>())
      .def_ro("device", &FileIdentity::device)
      .def_ro("inode", &FileIdentity::inode)
      .def_ro("nbytes", &FileIdentity::bytes)
      .def_ro("modified_ns", &FileIdentity::modified_ns);
  nb::class_<Disk>(m, "Disk")
      .def(
          "__init__",
          [](Disk* self, int threads, int64_t chunk, int mode, int64_t spin, int64_t sleep,
             int backend) {
            new (self)
                Disk(threads, chunk, policy_of(mode, spin, sleep), static_cast<IoBackend>(backend));
          },
          "threads"_a, "chunk_bytes"_a, "mode"_a, "spin_us"_a, "sleep_us"_a, "backend"_a = 0)
      .def("submit", &Disk::submit, "write"_a, "directory"_a, "name"_a, "path"_a, "data"_a,
           "offset"_a, "direct"_a, "expected"_a = FileIdentity{})
      .def("close", &Disk::close)
      .def_prop_ro("uses_uring", &Disk::uses_uring);
  m.def("identify", &identity, "path"_a);
  bind_look(m);
  bind_memory(m);
  m.def("reserve", &reserve, "directory"_a, "name"_a, "path"_a, "nbytes"_a, "old_bytes"_a,
        "create"_a);
  m.def("takes_direct_io", &takes_direct_io, "directory"_a);
  m.attr("direct_align") = kDirectAlign;
  // Test hooks.
  m.def("fail_pinned_after", &fail_pinned_after, "n"_a);
  m.def("simulate_pinning", &simulate_pinning, "on"_a);
  m.def("fail_copy_after", &fail_copy_after, "n"_a);
  m.def("fail_io_after", &fail_io_after, "n"_a, "code"_a);
  m.def("hold_io", &hold_io, "on"_a);
}

}  // namespace
}  // namespace ts::paging

NB_MODULE(_C, m) {
  ts::init_module(m);
  ts::paging::bind(m);
}
