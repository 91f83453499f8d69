// Requests, and the threads that carry them out.
//
//     start ---> waiting, in order ---> blocks of the middle ---> head and tail ---> done
//                                       (several in flight)       (when the middle is done)
//
// Each submitter is one thread with a ring of its own. All of them take blocks of the first waiting request that has some left;
// only one request at a time is partly begun. One lock guards requests and queue; per block it is taken twice.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "io/ring.h"

namespace ds::io {

// What deepspeed/ops/aio/backend.py calls a transfer.
struct Transfer {
  bool is_write;
  int middle_fd;
  int edge_fd;
  int64_t offset;
  int64_t nbytes;
  char* address;
  int64_t middle_start;
  int64_t middle_nbytes;
};

class Request {
 public:
  explicit Request(const Transfer& transfer) : transfer(transfer), next(transfer.middle_start) {}

  int64_t middle_end() const { return transfer.middle_start + transfer.middle_nbytes; }

  // Remember the failure that lies first in the file; no further block is begun.
  void fail(int number, int64_t at);

  // Let waiters go. The request may be gone when this returns.
  void finish();

  // Whether it is done, after at most so long.
  bool wait(int64_t microseconds);

  const Transfer transfer;

  // Guarded by the engine's lock until the request is done.
  int64_t next;              // where in the middle the next block begins; its end when there is none
  int64_t open_blocks = 0;   // begun, or to be continued
  bool has_edges_begun = false;
  int error = 0;
  int64_t failed_at = 0;

 private:
  // A lock of its own: who waits may outlast the engine.
  std::mutex lock_;
  std::condition_variable over_;
  bool is_done_ = false;
};

struct Settings {
  int64_t block_nbytes;  // whole pages
  uint32_t queue_depth;
  uint32_t threads;
  bool single_submit;
  bool overlap_events;
  std::unique_ptr<Ring> (*make_ring)(uint32_t depth, int& error);
};

class Engine {
 public:
  explicit Engine(const Settings& settings) : settings_(settings) {}
  ~Engine();  // waits for all requests

  // Start the threads; 0 or a negative errno.
  int start();

  // The request stays the caller's, who must not free it before it is done.
  void add(Request* request);

 private:
  struct Block {
    Request* request;
    int64_t start;
    int64_t nbytes;
    int fd;
  };

  struct Submitter {
    std::unique_ptr<Ring> ring;
    std::vector<Block> blocks;    // by slot
    std::vector<uint32_t> free;   // slots
    std::vector<uint32_t> fresh;  // slots taken and not pushed yet
    bool wants_more = false;      // waits in its ring with room for more; guarded by the lock
    std::thread thread;
  };

  void serve(Submitter& submitter);
  bool make_ring(Submitter& submitter);
  void work(Submitter& submitter);
  void take(Submitter& submitter);
  bool next_block(Block& block);
  void push(Submitter& submitter, std::vector<Result>& results);
  void settle(const Block& block, int64_t moved);
  void advance(Request* request);
  void leave_queue(const Request* request);

  const Settings settings_;
  std::mutex lock_;
  std::condition_variable changed_;  // more to do, or the end
  std::condition_variable begun_;    // a thread has its ring, or failed to get it
  std::deque<Request*> waiting_;
  std::deque<Block> extra_;  // edges, and what is left of blocks that were cut short
  std::vector<std::unique_ptr<Submitter>> submitters_;
  uint32_t begun_count_ = 0;
  int error_ = 0;
  bool is_over_ = false;
};

}  // namespace ds::io
