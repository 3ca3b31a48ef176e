// The CPU thread pool: made by the first native module loaded, which leaves a capsule with its
// function table in ts_core.runtime; later modules take the table from there, so none carries
// workers of its own. Workers sleep when idle, block every signal, and are made anew in a forked
// child.
#pragma once

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>

#include "ts/thread_pool.h"

namespace ts {

inline constexpr uint32_t kPoolVersion = 1;
inline constexpr const char* kPoolCapsule = "ts_core.thread_pool.v1";

namespace detail {

class Pool {
 public:
  Pool() : pid_(getpid()) {}
  pid_t pid() const { return pid_; }

  void run(int64_t chunks, void (*fn)(void*, int64_t), void* context, int threads) {
    Job job{fn, context, chunks, threads - 1};
    {
      std::lock_guard<std::mutex> lock(mutex_);
      grow(threads - 1);
      jobs_.push_back(&job);
    }
    if (threads == 2)
      wake_.notify_one();
    else
      wake_.notify_all();
    job.work();
    std::unique_lock<std::mutex> lock(mutex_);
    for (auto it = jobs_.begin(); it != jobs_.end(); ++it) {
      if (*it == &job) {
        jobs_.erase(it);
        break;
      }
    }
    left_.wait(lock, [&] { return job.inside == 0; });
  }

  int workers() {
    std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<int>(count_);
  }

 private:
  struct Job {
    void (*fn)(void*, int64_t);
    void* context;
    int64_t chunks;
    int places;      // workers that may still join; guarded by mutex_
    int inside = 0;  // workers now working; guarded by mutex_
    std::atomic<int64_t> next{0};

    Job(void (*f)(void*, int64_t), void* c, int64_t n, int p)
        : fn(f), context(c), chunks(n), places(p) {}
    void work() {
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < chunks;) fn(context, i);
    }
  };

  void grow(int wanted) {
    // Workers never see a signal: Ctrl-C must reach the interpreter's main thread.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (; count_ < wanted; ++count_) std::thread([this] { loop(); }).detach();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  Job* pick() {
    for (Job* job : jobs_)
      if (job->places > 0 && job->next.load(std::memory_order_relaxed) < job->chunks) return job;
    return nullptr;
  }

  void loop() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      Job* job = nullptr;
      wake_.wait(lock, [&] { return (job = pick()) != nullptr; });
      --job->places;
      ++job->inside;
      lock.unlock();
      job->work();
      lock.lock();
      if (--job->inside == 0) left_.notify_all();
    }
  }

  const pid_t pid_;
  std::mutex mutex_;
  std::condition_variable wake_, left_;
  std::deque<Job*> jobs_;
  int count_ = 0;
};

inline Pool& pool() {
  // Never destroyed: detached workers may outlive static destructors. A forked child has no workers
  // and may hold a locked mutex, so it gets a pool of its own.
  static std::atomic<Pool*> current{new Pool()};
  Pool* seen = current.load(std::memory_order_acquire);
  if (seen->pid() != getpid()) {
    Pool* fresh = new Pool();
    if (current.compare_exchange_strong(seen, fresh, std::memory_order_acq_rel)) return *fresh;
    delete fresh;
  }
  return *seen;
}

inline const PoolTable& own_pool_table() {
  static const PoolTable table{kPoolVersion,
                               [](int64_t chunks, void (*fn)(void*, int64_t), void* context,
                                  int threads) { pool().run(chunks, fn, context, threads); },
                               [] { return pool().workers(); }};
  return table;
}

}  // namespace detail

}  // namespace ts
