// Bindings of host memory: tensors over it, the arena, files mapped into memory.
#include <memory>
#include <utility>

#include "arena.h"
#include "bindings.h"
#include "host_memory.h"
#include "mapping.h"

namespace ts::paging {
namespace {

// A uint8 tensor over memory of our own; torch's last reference frees it, on whatever thread.
struct Managed {
  dl::ManagedTensorVersioned tensor{};
  int64_t shape = 0;
  int64_t stride = 1;
  HostBlock block;
  FileMapping mapping;
  Arena::Piece piece;

  ~Managed() {
    Arena::give_back(std::move(piece));
    free_host(block);
    unmap(mapping);
  }
};

nb::object to_tensor(std::unique_ptr<Managed> managed, void* data, int64_t nbytes) {
  managed->shape = nbytes;
  managed->tensor.version = {1, 0};
  managed->tensor.manager_ctx = managed.get();
  managed->tensor.deleter = [](dl::ManagedTensorVersioned* self) {
    delete static_cast<Managed*>(self->manager_ctx);
  };
  managed->tensor.dl_tensor = {
      data, {dl::kCPU, 0}, 1, {dl::kUInt, 8, 1}, &managed->shape, &managed->stride, 0};
  void* object = nullptr;
  Managed* handed_over = managed.release();
  if (torch_api()->object_from_managed(&handed_over->tensor, &object) != 0)
    throw nb::python_error();
  return nb::steal(static_cast<PyObject*>(object));
}

// nanobind's own shared_ptr would take the GIL when torch frees a tensor on some thread.
struct Pool {
  std::shared_ptr<HostPool> pool;
};

nb::tuple host_empty(const Pool& pool, int64_t nbytes, bool pin, int device) {
  check(nbytes > 0, "host_empty", "nbytes", "an integer > 0", std::to_string(nbytes));
  auto managed = std::make_unique<Managed>();
  std::string refused;
  {
    const nb::gil_scoped_release release;
    managed->block = allocate_host(pool.pool, nbytes, pin, device, &refused);
  }
  const bool pinned = managed->block.pinned;
  void* data = managed->block.data;
  return nb::make_tuple(to_tensor(std::move(managed), data, nbytes), pinned, refused);
}

class HostArena {
 public:
  HostArena(const Pool& pool, int64_t slab_bytes, int64_t step_bytes)
      : arena_(std::make_shared<Arena>(pool.pool, slab_bytes, step_bytes)) {}
  ~HostArena() {
    if (arena_->mine())
      close();
    else
      (void)new std::shared_ptr<Arena>(std::move(arena_));  // a forked child: never destroyed
  }
  // A tensor, or None where it would take more than the limit or page-locking was refused.
  nb::object empty(int64_t nbytes, int64_t limit, int device) {
    expect_arena();
    auto managed = std::make_unique<Managed>();
    Arena::Outcome outcome = Arena::Outcome::kNotYet;
    wait_with_signals([&] {
      outcome = arena_->allocate(nbytes, limit, device, kSliceUs, &managed->piece);
      return outcome != Arena::Outcome::kNotYet;
    });
    if (outcome == Arena::Outcome::kClosed)
      raise({Failure::kState, 0, "[host arena] it is closed", ""});
    if (outcome == Arena::Outcome::kFull) return nb::none();
    void* data = managed->piece.data;
    return to_tensor(std::move(managed), data, nbytes);
  }
  // What is there already, or None.
  nb::object find(int64_t nbytes) {
    expect_arena();
    auto managed = std::make_unique<Managed>();
    if (!arena_->find(nbytes, &managed->piece)) return nb::none();
    void* data = managed->piece.data;
    return to_tensor(std::move(managed), data, nbytes);
  }
  int64_t reserve(int64_t nbytes, int64_t limit, int device) {
    expect_arena();
    return arena_->reserve(nbytes, limit, device);
  }
  void synchronize() {
    expect_arena();
    wait_with_signals([this] { return arena_->wait_reserved(kSliceUs); });
  }
  int64_t trim(int64_t keep_bytes) {
    expect_arena();
    const nb::gil_scoped_release release;
    return arena_->trim(keep_bytes);
  }
  int64_t trim_unused(int64_t calls) {
    expect_arena();
    const nb::gil_scoped_release release;
    return arena_->trim_unused(calls);
  }
  void close() {
    if (!arena_->mine()) return;
    const nb::gil_scoped_release release;
    arena_->close();
  }
  nb::dict info() {
    expect_arena();
    const Arena::Info info = arena_->info();
    nb::list slabs;
    for (const Arena::SlabInfo& slab : info.slabs)
      slabs.append(nb::make_tuple(slab.bytes, slab.live_bytes, slab.free_extents, slab.largest_free,
                                  slab.pinned));
    nb::dict found;
    found["slabs"] = slabs;
    found["reserved_bytes"] = info.reserved_bytes;
    found["live_bytes"] = info.live_bytes;
    found["pieces"] = info.pieces;
    found["coming_bytes"] = info.coming_bytes;
    found["lock_seconds"] = info.lock_seconds;
    found["refused_bytes"] = info.refused_bytes;
    found["refused"] = info.refused;
    return found;
  }

 private:
  void expect_arena() const {
    if (!arena_->mine())
      raise({Failure::kState, 0,
             "[host arena] it belongs to the parent of this forked process: make a new one here",
             ""});
  }
  std::shared_ptr<Arena> arena_;
};

nb::object map_file(const std::string& path, int64_t offset, int64_t nbytes,
                    const FileIdentity& expected) {
  auto managed = std::make_unique<Managed>();
  try {
    managed->mapping = map_privately(path, offset, nbytes, expected);
  } catch (const Failure& failure) {
    raise(failure);
  }
  void* data = managed->mapping.data;
  return to_tensor(std::move(managed), data, nbytes);
}

nb::object map_own_file(int directory, const std::string& name, const std::string& path,
                        int64_t nbytes) {
  auto managed = std::make_unique<Managed>();
  try {
    managed->mapping = map_shared(directory, name, path, nbytes);
  } catch (const Failure& failure) {
    raise(failure);
  }
  void* data = managed->mapping.data;
  return to_tensor(std::move(managed), data, nbytes);
}

bool was_written(const TensorView& mapped) { return written_since(mapped.data(), mapped.nbytes()); }

int move_to_memory(const TensorView& mapped, const TensorView& bytes) {
  expect_numel(mapped, "move_to_memory", "mapped", bytes.numel());
  const nb::gil_scoped_release release;
  return replace_pages(mapped.data(), bytes.data(), bytes.nbytes());
}

}  // namespace

void bind_memory(nb::module_& m) {
  m.def("map_file", &map_file, "path"_a, "offset"_a, "nbytes"_a, "expected"_a);
  m.def("map_own_file", &map_own_file, "directory"_a, "name"_a, "path"_a, "nbytes"_a);
  m.def(
      "find_mapping",
      [](uintptr_t address) {
        const MappedPlace place = find_mapping(reinterpret_cast<const void*>(address));
        return nb::make_tuple(place.number, place.offset);
      },
      "address"_a);
  m.def("is_mapped", &is_mapped, "number"_a);
  m.def("was_written", &was_written, "mapped"_a);
  m.def("move_to_memory", &move_to_memory, "mapped"_a, "data"_a);
  nb::class_<Pool>(m, "HostPool")
      .def(
          "__init__",
          [](Pool* self, int64_t budget) { new (self) Pool{std::make_shared<HostPool>(budget)}; },
          "budget_bytes"_a)
      .def("empty", &host_empty, "nbytes"_a, "pin"_a, "device"_a)
      .def_prop_ro("pinned_bytes", [](const Pool& self) { return self.pool->pinned_bytes.load(); })
      .def_prop_ro("pageable_bytes",
                   [](const Pool& self) { return self.pool->pageable_bytes.load(); });
  nb::class_<HostArena>(m, "Arena")
      .def(nb::init<const Pool&, int64_t, int64_t>(), "pool"_a, "slab_bytes"_a, "step_bytes"_a)
      .def("empty", &HostArena::empty, "nbytes"_a, "limit"_a, "device"_a)
      .def("find", &HostArena::find, "nbytes"_a)
      .def("reserve", &HostArena::reserve, "nbytes"_a, "limit"_a, "device"_a)
      .def("synchronize", &HostArena::synchronize)
      .def("trim", &HostArena::trim, "keep_bytes"_a)
      .def("trim_unused", &HostArena::trim_unused, "calls"_a)
      .def("close", &HostArena::close)
      .def("info", &HostArena::info);
  m.def("pinned_bytes", &pinned_bytes);
}

}  // namespace ts::paging
