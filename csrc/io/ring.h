// One thread's way to the system: operations go in, results come out, in any order.
//
// Implementations: io_uring (uring.cpp), the older kernel interface for asynchronous I/O (kernel_aio.cpp) and plain blocking
// calls (sync.cpp). Used by engine.cpp, which cuts requests into operations.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace ds::io {

// A read or write of the system. `slot` comes back with its result.
struct Operation {
  bool is_write;
  int fd;
  char* address;
  int64_t nbytes;
  int64_t offset;
  uint32_t slot;
};

struct Result {
  uint32_t slot;
  int64_t moved;  // bytes, or a negative errno
};

class Ring {
 public:
  virtual ~Ring() = default;

  // Take one operation. At most as many as the depth may be inside.
  virtual void push(const Operation& operation) = 0;

  // Hand what was pushed to the system.
  virtual void submit(std::vector<Result>& results) = 0;

  // Submit, wait for `least` results, and append all there are. With `is_interruptible` it also returns, perhaps with fewer,
  // after a call of `wake`.
  virtual void reap(uint32_t least, bool is_interruptible, std::vector<Result>& results) = 0;

  // Let `reap` return. From any thread.
  virtual void wake() = 0;
};

// The operation as one call that blocks: bytes moved, or a negative errno.
int64_t move_now(const Operation& operation);

// Make a ring for `depth` operations, for the thread that calls; null and a negative errno where the system refuses.
std::unique_ptr<Ring> make_uring(uint32_t depth, int& error);
std::unique_ptr<Ring> make_kernel_aio(uint32_t depth, int& error);
std::unique_ptr<Ring> make_sync(uint32_t depth, int& error);

}  // namespace ds::io
