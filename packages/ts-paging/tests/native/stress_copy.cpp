// Copy lanes on a device made of threads, and the host arena, under the thread sanitizer: README.md
// says how to build it.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "arena.h"
#include "copy_engine.h"
#include "fake_device.h"

using namespace ts::paging;

namespace {

constexpr int64_t kLong = int64_t{60} * 1000 * 1000;
constexpr int64_t kChunk = 100;

void expect(bool good, const char* what) {
  if (good) return;
  fprintf(stderr, "wrong: %s\n", what);
  exit(1);
}

struct Started {
  std::shared_ptr<Job> job;
  std::shared_ptr<Lane> lane;
};

Started start(CopyEngine& engine, std::vector<Part> parts, int priority = 0, int device = 0,
              void* stream = nullptr, std::vector<DeviceEvent> after = {}) {
  Copy copy;
  copy.parts = std::move(parts);
  copy.priority = priority;
  copy.device = device;
  copy.stream = stream;
  copy.after = std::move(after);
  Started started{std::make_shared<Job>(copy.bytes()), nullptr};
  started.lane = engine.submit(started.job, std::move(copy));
  return started;
}

void finish(const Started& started, const WaitPolicy& policy) {
  expect(started.job->wait(policy, kLong), "a copy that does not end");
}

// Index of a destination among the transfers.
size_t place(const std::vector<const void*>& order, const void* dst) {
  for (size_t i = 0; i < order.size(); ++i)
    if (order[i] == dst) return i;
  expect(false, "a transfer that was not made");
  return 0;
}

// The device is held, so the order is known: two chunks are handed over, the rest is queued.
void what_is_needed_passes_what_is_queued(const WaitPolicy& policy) {
  std::vector<char> src(2000, 'x'), ahead(1000), queued(1000), needed(300), last(100);
  {
    CopyEngine engine(kChunk, 2 * kChunk, policy);
    fake::Gate gate;
    fake::forget_transfers();
    gate.close();
    const Started a = start(engine, {{ahead.data(), src.data(), 1000}}, 0, 0, gate.stream());
    const Started b = start(engine, {{queued.data(), src.data(), 1000}});
    expect(!a.job->submitted() && !b.job->submitted(), "the window");
    const Started c = start(engine, {{last.data(), src.data(), 100}});
    const Started d = start(engine, {{needed.data(), src.data(), 300}}, 1);
    expect(d.job->submitted(), "an urgent copy is handed over at once");
    c.lane->promote(c.job);
    expect(c.job->submitted(), "a promoted copy is handed over at once");
    expect(fake::transfers().empty(), "the gate");
    gate.open();
    for (const Started& each : {a, b, c, d}) finish(each, policy);
    const auto order = fake::transfers();
    expect(order.size() == 24, "every chunk once");
    expect(place(order, ahead.data()) == 0 && place(order, ahead.data() + 100) == 1, "the window");
    expect(place(order, needed.data()) == 2 && place(order, needed.data() + 200) == 4, "urgent");
    expect(place(order, last.data()) == 5, "promoted");
    expect(place(order, queued.data()) > place(order, ahead.data() + 900), "the rest in order");
  }
  expect(ahead == std::vector<char>(1000, 'x') && needed == std::vector<char>(300, 'x'), "bytes");
}

void nothing_passes_what_it_shares_memory_with(const WaitPolicy& policy) {
  std::vector<char> one(1000, '1'), two(1000, '2'), slot(1000), first(1000), other(100);
  CopyEngine engine(kChunk, kChunk, policy);
  fake::Gate gate;
  gate.close();
  start(engine, {{first.data(), one.data(), 1000}}, 0, 0, gate.stream());
  const Started a = start(engine, {{slot.data(), one.data(), 1000}});
  const Started b =
      start(engine, {{other.data(), two.data(), 100}, {slot.data() + 500, two.data(), 300}}, 5);
  expect(a.job->submitted() && b.job->submitted(), "what is in the way goes first");
  gate.open();
  finish(a, policy);
  finish(b, policy);
  for (int i = 0; i < 1000; ++i)
    expect(slot[i] == (i >= 500 && i < 800 ? '2' : '1'), "the order of overlapping copies");
}

void a_pageable_copy_is_passed_too(const WaitPolicy& policy) {
  std::vector<char> pageable(1000, 'p'), pinned(1000, 'x'), a(1000), b(1000), c(1000), d(1000);
  CopyEngine engine(kChunk, kChunk, policy);
  fake::set_pageable(pageable.data(), 1000);
  fake::Gate gate;
  fake::forget_transfers();
  gate.close();
  const Started slow = start(engine, {{a.data(), pageable.data(), 1000}}, 0, 0, gate.stream());
  const Started behind = start(engine, {{b.data(), pinned.data(), 1000}});
  const Started urgent = start(engine, {{c.data(), pinned.data(), 1000}}, 1);
  const Started same = start(engine, {{a.data(), pinned.data(), 1000}}, 1);
  gate.open();
  for (const Started& each : {slow, behind, urgent, same}) {
    finish(each, policy);
    expect(!each.job->failure(), "pageable");
  }
  expect(a == pinned && b == pinned && c == pinned, "bytes past a pageable copy");
  fake::set_pageable(nullptr, 0);
}

void pageable_memory_goes_both_ways(const WaitPolicy& policy, bool refused, int64_t chunk) {
  const int64_t bytes = (int64_t{21} << 20) + 12345;
  std::vector<char> src(static_cast<size_t>(bytes)), there(src.size()), back(src.size());
  std::mt19937 chance(7);
  for (char& each : src) each = static_cast<char>(chance());
  std::vector<char> expected = src;
  fake::refuse_pinning(refused);
  CopyEngine engine(chunk, 4 * chunk, policy);
  fake::Gate gate;
  fake::set_pageable(src.data(), bytes);
  gate.close();
  const Started up =
      start(engine, {{there.data(), src.data(), 5}, {there.data() + 5, src.data() + 5, bytes - 5}},
            0, 0, gate.stream());
  // What the stream held when the copy was issued may still write its source.
  src[0] = expected[0] = 'y';
  gate.open();
  finish(up, policy);
  expect(there == expected, "bytes from pageable memory");
  fake::set_pageable(back.data(), bytes);
  Copy out;
  out.direction = Direction::kD2H;
  out.parts = {{back.data(), there.data(), bytes}};
  out.device = 0;
  const auto down = std::make_shared<Job>(bytes);
  engine.submit(down, out);
  expect(down->wait(policy, kLong) && !down->failure(), "to pageable memory");
  expect(back == expected, "bytes to pageable memory");
  fake::set_pageable(nullptr, 0);
  fake::refuse_pinning(false);
}

void a_copy_waits_for_others(const WaitPolicy& policy) {
  std::vector<char> device(500, 'd'), host(500), back(500);
  CopyEngine engine(kChunk, 10 * kChunk, policy);
  fake::Gate gate;
  gate.close();
  Copy out;
  out.direction = Direction::kD2H;
  out.parts = {{host.data(), device.data(), 500}};
  out.device = 0;
  out.stream = gate.stream();
  const auto left = std::make_shared<Job>(500);
  engine.submit(left, out);
  const Started came =
      start(engine, {{back.data(), host.data(), 500}}, 1, 0, nullptr, {left->event()});
  expect(!came.job->finished(), "after");
  gate.open();
  finish(came, policy);
  expect(back == device, "bytes that went and came");
}

void a_failure_is_told_by_its_job(const WaitPolicy& policy) {
  std::vector<char> src(1000, 'x'), a(1000), b(1000);
  CopyEngine engine(kChunk, kChunk, policy);
  fake::fail_transfer_after(3);
  const Started bad = start(engine, {{a.data(), src.data(), 1000}});
  finish(bad, policy);
  expect(bad.job->failure() != nullptr, "a failed transfer");
  const Started good = start(engine, {{b.data(), src.data(), 1000}});
  finish(good, policy);
  expect(!good.job->failure() && b == src, "the one after it");
}

// Random copies of one thread among its own memory, beside those of others on the same lane.
void random_copies(CopyEngine& engine, const WaitPolicy& policy, int device, unsigned seed) {
  std::mt19937 chance(seed);
  const auto below = [&](int n) { return static_cast<int>(chance() % n); };
  std::vector<std::vector<char>> sources;
  std::vector<char> slot(3000, 0), expected(3000, 0);
  std::vector<Started> started;
  for (int i = 0; i < 150; ++i) {
    const int bytes = 1 + below(900), at = below(3000 - bytes);
    sources.emplace_back(bytes, static_cast<char>(i));
    std::vector<Part> parts{{slot.data() + at, sources.back().data(), bytes}};
    memset(expected.data() + at, i, bytes);
    if (at + 2 * bytes <= 3000) {
      parts.push_back({slot.data() + at + bytes, sources.back().data(), bytes});
      memset(expected.data() + at + bytes, i, bytes);
    }
    started.push_back(start(engine, parts, below(3), device));
    const Started& any = started[below(static_cast<int>(started.size()))];
    if (below(3) == 0 && any.lane) any.lane->promote(any.job);
    if (below(5) == 0) finish(any, policy);
  }
  for (const Started& each : started) finish(each, policy);
  expect(slot == expected, "random copies");
}

void pieces(const std::shared_ptr<Arena>& arena, unsigned seed) {
  std::mt19937 chance(seed);
  std::vector<Arena::Piece> held;
  const auto drop = [&](size_t i) {
    const char* data = static_cast<char*>(held[i].data);
    for (int64_t at = 0; at < held[i].bytes; at += 64)
      expect(data[at] == static_cast<char>(seed), "contents of a piece");
    Arena::give_back(std::move(held[i]));
    held.erase(held.begin() + static_cast<int64_t>(i));
  };
  for (int i = 0; i < 400; ++i) {
    if (!held.empty() && chance() % 2) {
      drop(chance() % held.size());
      continue;
    }
    Arena::Piece piece;
    const int64_t bytes = 1 + static_cast<int64_t>(chance() % (i % 20 ? 20000 : 150000));
    Arena::Outcome outcome = Arena::Outcome::kNotYet;
    while (outcome == Arena::Outcome::kNotYet)
      outcome = arena->allocate(bytes, int64_t{2} << 20, 0, 1000, &piece);
    if (outcome != Arena::Outcome::kGiven) continue;
    memset(piece.data, static_cast<int>(seed), static_cast<size_t>(piece.bytes));
    held.push_back(std::move(piece));
    if (i % 50 == 0) arena->trim(static_cast<int64_t>(chance() % (1 << 20)));
    if (i % 70 == 0) arena->reserve(static_cast<int64_t>(chance() % (1 << 20)), 2 << 20, 0);
    if (i % 30 == 0) (void)arena->info();
  }
  while (!held.empty()) drop(held.size() - 1);
}

void arenas() {
  const auto pool = std::make_shared<HostPool>(int64_t{1} << 40);
  {
    const auto arena = std::make_shared<Arena>(pool, 65536);
    std::vector<std::thread> threads;
    for (unsigned i = 1; i < 5; ++i) threads.emplace_back([&, i] { pieces(arena, i); });
    for (std::thread& thread : threads) thread.join();
    const Arena::Info info = arena->info();
    expect(info.live_bytes == 0 && info.pieces == 0, "live bytes");
    for (const auto& slab : info.slabs)
      expect(slab.free_extents == 1 && slab.largest_free == slab.bytes, "free extents");
  }
  // Closed while slabs are made, and while pieces are alive.
  auto arena = std::make_shared<Arena>(pool, 65536);
  Arena::Piece piece;
  expect(arena->allocate(100, int64_t{1} << 40, 0, kLong, &piece) == Arena::Outcome::kGiven,
         "give");
  arena->reserve(int64_t{1} << 30, int64_t{1} << 40, 0);
  arena->close();
  memset(piece.data, 1, 100);
  arena.reset();
  std::thread([&] { Arena::give_back(std::move(piece)); }).join();
  expect(pool->pinned_bytes == 0 && pool->pageable_bytes == 0, "memory of a closed arena");
}

}  // namespace

int main() {
  for (const auto mode : {WaitPolicy::kPoll, WaitPolicy::kSpin, WaitPolicy::kBlock}) {
    const WaitPolicy policy{mode, 10, 10};
    what_is_needed_passes_what_is_queued(policy);
    nothing_passes_what_it_shares_memory_with(policy);
    a_pageable_copy_is_passed_too(policy);
    set_staging_threads(3);
    pageable_memory_goes_both_ways(policy, false, int64_t{32} << 20);
    set_staging_threads(0);
    pageable_memory_goes_both_ways(policy, false, 1 << 20);
    pageable_memory_goes_both_ways(policy, true, 1 << 20);
    a_copy_waits_for_others(policy);
    a_failure_is_told_by_its_job(policy);
    CopyEngine engine(kChunk, 3 * kChunk, policy);
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < 3; ++i) {
      threads.emplace_back([&, i] { random_copies(engine, policy, 0, i); });
      threads.emplace_back([&, i] { random_copies(engine, policy, -1, i + 10); });
    }
    for (std::thread& thread : threads) thread.join();
    // Closing carries out what is queued.
    std::vector<char> src(5000, 'x'), dst(5000);
    const Started cut = start(engine, {{dst.data(), src.data(), 5000}});
    engine.close();
    finish(cut, policy);
    expect(dst == src, "closed");
    expect(start(engine, {{dst.data(), src.data(), 10}}).job->failure() != nullptr, "after close");
  }
  simulate_pinning(true);
  arenas();
  puts("ok");
  return 0;
}
