#include "core/parallel.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

namespace ds {
namespace {

constexpr int kSpins = 2000;  // some ten microseconds: two calls in a row find the workers awake

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

class Pool {
 public:
  Pool() : owner_(getpid()) {}

  ~Pool() {
    if (owner_ != getpid()) {  // after a fork the threads are the parent's
      for (std::thread& thread : threads_) thread.detach();
      return;
    }
    is_over_ = true;
    call_.fetch_add(1);
    call_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  bool is_own() const { return owner_ == getpid(); }

  void run(int64_t tasks, int32_t helpers, const std::function<void(int64_t)>& task) {
    helpers = std::min(helpers, grow(helpers));
    task_ = &task;
    tasks_ = tasks;
    next_ = 0;
    helpers_ = helpers;
    busy_ = static_cast<int32_t>(threads_.size());
    call_.fetch_add(1);
    call_.notify_all();
    work();
    for (int spin = 0; busy_.load() > 0; ++spin) {
      if (spin < kSpins) {
        pause();
        continue;
      }
      const int32_t still = busy_.load();
      if (still > 0) busy_.wait(still);
    }
  }

 private:
  // As many workers as asked for, or as the system grants; how many there are.
  int32_t grow(int32_t wanted) {
    try {
      while (static_cast<int32_t>(threads_.size()) < wanted) {
        const int32_t number = static_cast<int32_t>(threads_.size());
        threads_.emplace_back([this, number, seen = call_.load()] { serve(number, seen); });
      }
    } catch (const std::system_error&) {  // a limit on threads: the caller does their part
    }
    return static_cast<int32_t>(threads_.size());
  }

  void work() {
    for (int64_t i = next_.fetch_add(1); i < tasks_; i = next_.fetch_add(1)) (*task_)(i);
  }

  // `seen`: the last call before this worker was made, which is none of its business.
  void serve(int32_t number, uint64_t seen) {
    for (;;) {
      for (int spin = 0; spin < kSpins && call_.load() == seen; ++spin) pause();
      call_.wait(seen);
      seen = call_.load();
      if (is_over_) return;
      if (number < helpers_) work();
      if (busy_.fetch_sub(1) == 1) busy_.notify_all();
    }
  }

  const pid_t owner_;
  std::vector<std::thread> threads_;
  std::atomic<uint64_t> call_{0};
  std::atomic<int32_t> busy_{0};
  std::atomic<int64_t> next_{0};
  std::atomic<bool> is_over_{false};
  const std::function<void(int64_t)>* task_ = nullptr;
  int64_t tasks_ = 0;
  int32_t helpers_ = 0;
};

}  // namespace

void parallel(int64_t tasks, int32_t threads, const std::function<void(int64_t)>& task) {
  const int32_t helpers = static_cast<int32_t>(std::min<int64_t>(threads, tasks)) - 1;
  if (helpers < 1) {
    for (int64_t i = 0; i < tasks; ++i) task(i);
    return;
  }
  static thread_local Pool* pool = nullptr;
  static thread_local struct Owner {
    ~Owner() { delete pool; }
  } owner;
  (void)owner;
  if (pool != nullptr && !pool->is_own()) pool = nullptr;  // forked: the parent's threads are not here; a small leak
  if (pool == nullptr) pool = new Pool();
  pool->run(tasks, helpers, task);
}

}  // namespace ds
