// The disk tier under the thread sanitizer, without Python: README.md says how to build it.
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "disk.h"
#include "mapping.h"

using namespace ts::paging;

namespace {

constexpr int64_t kLong = int64_t{60} * 1000 * 1000;
constexpr int64_t kBytes = 20 * kDirectAlign + 123;
const WaitPolicy kPolicy{WaitPolicy::kPoll, 10, 10};

void expect(bool good, const char* what) {
  if (good) return;
  fprintf(stderr, "wrong: %s\n", what);
  exit(1);
}

// Random parts of a file against a copy of it in memory. With `faults`, transfers may fail: a read
// is then asked again, and a write repeated.
void parts(IoPool& pool, int directory, const std::string& folder, const std::string& name,
           bool faults) {
  std::minstd_rand random(static_cast<unsigned>(name[0]));
  const auto draw = [&random](int64_t n) { return static_cast<int64_t>(random() % n); };
  const int64_t padded = (kBytes + kDirectAlign - 1) / kDirectAlign * kDirectAlign;
  reserve_file(directory, name, name, padded, 0, true);
  std::vector<char> model(static_cast<size_t>(kBytes), 0), buffer(model.size() + 64);
  const auto finish = [&](const IoSpec& spec) {
    while (true) {
      const auto job = pool.submit(spec);
      expect(job->wait(kPolicy, kLong), "finished");
      const auto failure = job->failure();
      if (!failure) return;
      expect(faults && failure->kind == Failure::kStorage, "no failure without a fault");
    }
  };
  for (int i = 0; i < 150; ++i) {
    IoSpec spec;
    spec.directory = directory;
    spec.name = spec.path = name;
    spec.direct = true;
    spec.write = draw(2) == 0;
    char* const data = buffer.data() + draw(64);
    spec.data = data;
    if (spec.write) {
      spec.offset = draw(padded / kDirectAlign) * kDirectAlign;
      spec.bytes = std::min(kBytes - spec.offset, (1 + draw(6)) * kDirectAlign);
      for (int64_t k = 0; k < spec.bytes; ++k) data[k] = static_cast<char>(draw(251));
      memcpy(&model[static_cast<size_t>(spec.offset)], data, static_cast<size_t>(spec.bytes));
      finish(spec);
      continue;
    }
    spec.offset = draw(kBytes);
    spec.bytes = 1 + draw(kBytes - spec.offset);
    if (i % 3 == 0) {
      spec.directory = AT_FDCWD;
      spec.name = folder + "/" + name;
      spec.expected = identify(spec.name);
    }
    finish(spec);
    expect(memcmp(data, &model[static_cast<size_t>(spec.offset)],
                  static_cast<size_t>(spec.bytes)) == 0,
           "bytes of a part");
  }
  unlinkat(directory, name.c_str(), 0);
}

void mappings(int directory, const std::string& name) {
  reserve_file(directory, name, name, kDirectAlign, 0, true);
  for (int i = 0; i < 300; ++i) {
    const FileMapping made = map_shared(directory, name, name, kDirectAlign);
    auto* const bytes = static_cast<char*>(made.data);
    const MappedPlace place = find_mapping(bytes + 10);
    expect(place.number == made.number && place.offset == 10, "place");
    expect(is_mapped(made.number), "there");
    bytes[0] = static_cast<char>(i);
    unmap(made);
    expect(!is_mapped(made.number), "gone");
  }
  unlinkat(directory, name.c_str(), 0);
}

void closing(IoBackend backend, int directory) {
  std::vector<char> data(1 << 20, 'x');
  reserve_file(directory, "last", "last", 1 << 20, 0, true);
  for (int i = 0; i < 20; ++i) {
    IoPool pool(3, 2 * kDirectAlign, backend);
    IoSpec spec;
    spec.write = spec.direct = true;
    spec.directory = directory;
    spec.name = spec.path = "last";
    spec.data = data.data();
    spec.bytes = 1 << 20;
    hold_io(i % 2 == 0);
    std::vector<std::shared_ptr<Job>> jobs;
    for (int k = 0; k < 4; ++k) jobs.push_back(pool.submit(spec));
    std::thread other([&pool] { pool.close(); });
    hold_io(false);
    other.join();
    for (const auto& job : jobs) expect(job->finished(), "closed");
    expect(pool.submit(spec)->failure() != nullptr, "refused");
  }
  unlinkat(directory, "last", 0);
}

}  // namespace

int main() {
  char folder[] = "/tmp/ts-paging-disk-XXXXXX";
  expect(mkdtemp(folder) != nullptr, "folder");
  const int directory = open(folder, O_RDONLY | O_DIRECTORY);
  printf("direct: %d\n", takes_direct_io(directory));
  for (const auto backend : {IoBackend::kUring, IoBackend::kThreads}) {
    for (const bool faults : {false, true}) {
      IoPool pool(4, 2 * kDirectAlign, backend);
      std::vector<std::thread> threads;
      for (char i = 'a'; i < 'e'; ++i)
        threads.emplace_back([&, i] { parts(pool, directory, folder, std::string(1, i), faults); });
      for (char i = 'k'; i < 'm'; ++i)
        threads.emplace_back([&, i] { mappings(directory, std::string(1, i)); });
      std::thread faulty([faults] {
        for (int i = 0; faults && i < 60; ++i) {
          const int codes[] = {EIO, 0, EINTR, ENOSPC};
          fail_io_after(i % 7, codes[i % 4]);
          (void)usleep(2000);
        }
        fail_io_after(-1, 0);
      });
      for (std::thread& thread : threads) thread.join();
      faulty.join();
      printf("io_uring: %d, faults: %d\n", pool.uses_uring(), faults);
    }
    closing(backend, directory);
  }
  close(directory);
  rmdir(folder);
  puts("ok");
  return 0;
}
