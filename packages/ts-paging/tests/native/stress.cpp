// The native half under the thread sanitizer, without Python: README.md says how to build it.
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "copy_engine.h"
#include "disk.h"
#include "host_memory.h"

using namespace ts::paging;

namespace {

constexpr int64_t kLong = int64_t{60} * 1000 * 1000;

void expect(bool good, const char* what) {
  if (good) return;
  fprintf(stderr, "wrong: %s\n", what);
  exit(1);
}

void copies(CopyEngine& engine, const WaitPolicy& policy, char fill) {
  auto inflight = std::make_shared<std::atomic<int64_t>>(0);
  for (int i = 0; i < 200; ++i) {
    std::vector<char> src(1000 + i, fill), dst(1000 + i, 0);
    auto job = std::make_shared<Job>(static_cast<int64_t>(src.size()), inflight);
    const Direction way = i % 2 ? Direction::kH2D : Direction::kD2H;
    Copy copy;
    copy.direction = way;
    copy.parts = {{dst.data(), src.data(), job->bytes()}};
    engine.submit(job, copy);
    std::thread other([&] { expect(job->wait(policy, kLong), "second waiter"); });
    expect(job->wait(policy, kLong) && !job->failure(), "copy");
    other.join();
    expect(src == dst, "bytes of a copy");
  }
  expect(inflight->load() == 0, "bytes in flight");
}

void files(IoPool& pool, int directory, const std::string& name, const WaitPolicy& policy) {
  std::vector<char> data(70000, name[0]), back(70000, 0);
  reserve_file(directory, name, name, 73728, 0, true);
  for (int i = 0; i < 40; ++i) {
    IoSpec spec{true, directory, name, name, data.data(), 70000, 0, false};
    const auto write = pool.submit(spec);
    expect(write->wait(policy, kLong) && !write->failure(), "write");
    spec.write = false;
    spec.data = back.data();
    const auto read = pool.submit(spec);
    expect(read->wait(policy, kLong) && !read->failure(), "read");
    expect(data == back, "bytes of a file");
  }
  unlinkat(directory, name.c_str(), 0);
}

void memory(const std::shared_ptr<HostPool>& pool) {
  for (int i = 0; i < 200; ++i) {
    std::string refused;
    const HostBlock block = allocate_host(pool, 5000, true, 0, &refused);
    memset(block.data, 1, 5000);
    free_host(block);
  }
}

}  // namespace

int main() {
  char folder[] = "/tmp/ts-paging-stress-XXXXXX";
  expect(mkdtemp(folder) != nullptr, "folder");
  const int directory = open(folder, O_RDONLY | O_DIRECTORY);
  simulate_pinning(true);
  for (const auto mode : {WaitPolicy::kPoll, WaitPolicy::kSpin, WaitPolicy::kBlock}) {
    const WaitPolicy policy{mode, 10, 10};
    CopyEngine engine(4096, 8192, policy);
    IoPool pool(3, 8192);
    auto host = std::make_shared<HostPool>(20000);
    std::vector<std::thread> threads;
    for (char i = 'a'; i < 'd'; ++i) {
      threads.emplace_back([&, i] { copies(engine, policy, i); });
      threads.emplace_back([&, i] { files(pool, directory, std::string(1, i), policy); });
      threads.emplace_back([&] { memory(host); });
    }
    for (std::thread& thread : threads) thread.join();
    expect(host->pinned_bytes == 0 && host->pageable_bytes == 0 && pinned_bytes() == 0, "counters");
    // Closing with work under way.
    std::vector<char> data(1 << 20, 'x');
    reserve_file(directory, "last", "last", 1 << 20, 0, true);
    const auto cut = pool.submit({true, directory, "last", "last", data.data(), 1 << 20, 0, false});
    pool.close();
    expect(cut->finished(), "closed");
    unlinkat(directory, "last", 0);
    engine.close();
  }
  close(directory);
  rmdir(folder);
  puts("ok");
  return 0;
}
