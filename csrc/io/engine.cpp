#include "io/engine.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <new>
#include <system_error>

namespace ds::io {
namespace {

// Signals are for the threads of the program, whose handlers expect to interrupt them.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

}  // namespace

void Request::fail(int number, int64_t at) {
  if (error == 0 || at < failed_at) {
    error = number;
    failed_at = at;
  }
  next = middle_end();
}

void Request::finish() {
  std::lock_guard guard(lock_);
  is_done_ = true;
  over_.notify_all();
}

bool Request::wait(int64_t microseconds) {
  std::unique_lock guard(lock_);
  return over_.wait_for(guard, std::chrono::microseconds(microseconds), [this] { return is_done_; });
}

Engine::~Engine() {
  {
    std::lock_guard guard(lock_);
    is_over_ = true;
  }
  changed_.notify_all();
  for (auto& submitter : submitters_) {
    if (submitter->thread.joinable()) submitter->thread.join();
  }
}

int Engine::start() {
  SignalsBlocked blocked;  // threads inherit it
  for (uint32_t i = 0; i < settings_.threads; ++i) {
    Submitter& submitter = *submitters_.emplace_back(std::make_unique<Submitter>());
    try {
      submitter.thread = std::thread([this, &submitter] { serve(submitter); });
    } catch (const std::system_error& refused) {
      return -refused.code().value();
    }
    std::unique_lock guard(lock_);
    begun_.wait(guard, [&] { return begun_count_ > i || error_ != 0; });
    if (error_ != 0) return error_;
  }
  return 0;
}

void Engine::add(Request* request) {
  const int64_t blocks = (request->transfer.middle_nbytes + settings_.block_nbytes - 1) / settings_.block_nbytes;
  std::vector<Ring*> hungry;
  {
    std::lock_guard guard(lock_);
    waiting_.push_back(request);
    for (auto& submitter : submitters_) {
      if (submitter->wants_more) {
        submitter->wants_more = false;
        hungry.push_back(submitter->ring.get());
      }
    }
  }
  for (Ring* ring : hungry) ring->wake();
  const int64_t takers = (blocks + settings_.queue_depth - 1) / settings_.queue_depth;
  for (int64_t i = 0; i < std::min<int64_t>(takers, settings_.threads); ++i) changed_.notify_one();
}

void Engine::serve(Submitter& submitter) {
#if defined(__linux__)
  pthread_setname_np(pthread_self(), "ds-file-io");
#endif
  if (make_ring(submitter)) work(submitter);
}

bool Engine::make_ring(Submitter& submitter) {
  int error = 0;
  try {
    submitter.ring = settings_.make_ring(settings_.queue_depth, error);
    submitter.blocks.resize(settings_.queue_depth);
    submitter.fresh.reserve(settings_.queue_depth);
    for (uint32_t slot = settings_.queue_depth; slot > 0; --slot) submitter.free.push_back(slot - 1);
  } catch (const std::bad_alloc&) {
    error = -ENOMEM;
  }
  std::lock_guard guard(lock_);
  if (error != 0) error_ = error;
  ++begun_count_;
  begun_.notify_all();
  return error == 0;
}

void Engine::work(Submitter& submitter) {
  std::vector<Result> results;
  for (;;) {
    bool wants_more;
    uint32_t in_flight;
    {
      std::unique_lock guard(lock_);
      submitter.wants_more = false;
      for (const Result& result : results) {
        settle(submitter.blocks[result.slot], result.moved);
        submitter.free.push_back(result.slot);
      }
      results.clear();
      for (;;) {
        take(submitter);
        in_flight = settings_.queue_depth - static_cast<uint32_t>(submitter.free.size());
        if (in_flight > 0) break;
        if (is_over_) return;
        changed_.wait(guard);
      }
      wants_more = settings_.overlap_events && !submitter.free.empty();
      submitter.wants_more = wants_more;
    }
    push(submitter, results);
    submitter.ring->reap(results.empty() ? (settings_.overlap_events ? 1 : in_flight) : 0, wants_more, results);
  }
}

// Blocks for the free slots; without overlap only when all are free.
void Engine::take(Submitter& submitter) {
  if (!settings_.overlap_events && submitter.free.size() < settings_.queue_depth) return;
  Block block;
  while (!submitter.free.empty() && next_block(block)) {
    const uint32_t slot = submitter.free.back();
    submitter.free.pop_back();
    submitter.blocks[slot] = block;
    submitter.fresh.push_back(slot);
  }
}

bool Engine::next_block(Block& block) {
  if (!extra_.empty()) {
    block = extra_.front();
    extra_.pop_front();
    return true;
  }
  if (waiting_.empty()) return false;
  Request* request = waiting_.front();
  const int64_t nbytes = std::min(settings_.block_nbytes, request->middle_end() - request->next);
  block = {request, request->next, nbytes, request->transfer.middle_fd};
  request->next += nbytes;
  ++request->open_blocks;
  leave_queue(request);
  return true;
}

void Engine::push(Submitter& submitter, std::vector<Result>& results) {
  for (const uint32_t slot : submitter.fresh) {
    const Block& block = submitter.blocks[slot];
    const Transfer& transfer = block.request->transfer;
    submitter.ring->push({transfer.is_write, block.fd, transfer.address + block.start, block.nbytes,
                          transfer.offset + block.start, slot});
    if (settings_.single_submit) submitter.ring->submit(results);
  }
  submitter.fresh.clear();
}

// What became of a block; negative: an errno.
void Engine::settle(const Block& block, int64_t moved) {
  Request* request = block.request;
  const Transfer& transfer = request->transfer;
  const bool is_strict = moved == -EINVAL && block.fd != transfer.edge_fd;  // stricter than the file system said
  const bool is_interrupted = moved == -EINTR || moved == -EAGAIN;
  if (moved < 0 && !is_strict && !is_interrupted) {
    request->fail(static_cast<int>(-moved), block.start);
  } else if (moved == 0) {
    request->fail(transfer.is_write ? ENOSPC : ENODATA, block.start);
  }
  const int64_t done = std::max<int64_t>(moved, 0);
  const bool has_failed = request->error != 0 && request->failed_at <= block.start + done;
  if (!has_failed && done < block.nbytes) {  // what is left need not be aligned any more
    const int fd = is_interrupted ? block.fd : transfer.edge_fd;
    extra_.push_back({request, block.start + done, block.nbytes - done, fd});
    return;
  }
  --request->open_blocks;
  leave_queue(request);
  advance(request);
}

// [Note: the edges come last] in deepspeed/ops/aio/backend.py.
void Engine::advance(Request* request) {
  if (request->open_blocks > 0 || request->next < request->middle_end()) return;
  const Transfer& transfer = request->transfer;
  if (!request->has_edges_begun) {
    request->has_edges_begun = true;
    const int64_t ends[][2] = {{0, transfer.middle_start}, {request->middle_end(), transfer.nbytes}};
    for (const auto& [start, end] : ends) {
      const bool is_behind_failure = request->error != 0 && request->failed_at < start;
      if (start == end || is_behind_failure) continue;
      extra_.push_back({request, start, end - start, transfer.edge_fd});
      ++request->open_blocks;
    }
    if (request->open_blocks > 0) return;
  }
  request->finish();
}

// A request without further blocks leaves the queue. Only the first has some begun and some not.
void Engine::leave_queue(const Request* request) {
  if (!waiting_.empty() && waiting_.front() == request && request->next == request->middle_end()) waiting_.pop_front();
}

}  // namespace ds::io
