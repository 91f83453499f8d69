// The functions of native.h about files.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>

#include "io/engine.h"
#include "native.h"

namespace {

constexpr int64_t kMaxThreads = 64;  // MAX_THREADS of deepspeed/ops/aio/threads.py

struct Kind {
  const char* name;
  std::unique_ptr<ds::io::Ring> (*make_ring)(uint32_t depth, int& error);
  bool is_blocking;
};

constexpr Kind kKinds[] = {
    {"io_uring", ds::io::make_uring, false},
    {"libaio", ds::io::make_kernel_aio, false},
    {"threads", ds::io::make_sync, true},
};

}  // namespace

int32_t ds_io_open(const char* name, int64_t block_nbytes, int32_t queue_depth, int32_t threads, int32_t single_submit,
                   int32_t overlap_events, void** engine) {
  for (const Kind& kind : kKinds) {
    if (std::strcmp(kind.name, name) != 0) continue;
    ds::io::Settings settings{block_nbytes,
                              static_cast<uint32_t>(queue_depth),
                              static_cast<uint32_t>(threads),
                              single_submit != 0,
                              overlap_events != 0,
                              kind.make_ring};
    if (kind.is_blocking) {  // depth is threads there
      settings.threads = static_cast<uint32_t>(std::min<int64_t>(int64_t{threads} * queue_depth, kMaxThreads));
      settings.queue_depth = 1;
    }
    try {
      auto made = std::make_unique<ds::io::Engine>(settings);
      const int error = made->start();
      if (error == 0) *engine = made.release();
      return error;
    } catch (const std::bad_alloc&) {
      return -ENOMEM;
    }
  }
  return -EINVAL;
}

void ds_io_close(void* engine) { delete static_cast<ds::io::Engine*>(engine); }

int32_t ds_io_start(void* engine, int32_t is_write, int32_t middle_fd, int32_t edge_fd, int64_t offset, int64_t nbytes,
                    void* address, int64_t middle_start, int64_t middle_nbytes, void** request) {
  try {
    auto made = std::make_unique<ds::io::Request>(ds::io::Transfer{
        is_write != 0, middle_fd, edge_fd, offset, nbytes, static_cast<char*>(address), middle_start, middle_nbytes});
    static_cast<ds::io::Engine*>(engine)->add(made.get());
    *request = made.release();
    return 0;
  } catch (const std::bad_alloc&) {
    return -ENOMEM;
  }
}

int32_t ds_io_wait(void* request, int64_t microseconds) {
  return static_cast<ds::io::Request*>(request)->wait(microseconds) ? 1 : 0;
}

int32_t ds_io_outcome(const void* request, int64_t* moved_nbytes) {
  const auto* done = static_cast<const ds::io::Request*>(request);
  *moved_nbytes = done->error != 0 ? done->failed_at : done->transfer.nbytes;
  return done->error;
}

void ds_io_release(void* request) { delete static_cast<ds::io::Request*>(request); }
