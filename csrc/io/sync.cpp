// Plain calls that block: what is pushed is done when `push` returns. Depth comes from several threads, each with one of these.
#include <cerrno>
#include <sys/types.h>
#include <unistd.h>

#include "io/ring.h"

namespace ds::io {

int64_t move_now(const Operation& op) {
  const size_t nbytes = static_cast<size_t>(op.nbytes);
  ssize_t moved;
  do {
    moved = op.is_write ? pwrite(op.fd, op.address, nbytes, op.offset) : pread(op.fd, op.address, nbytes, op.offset);
  } while (moved < 0 && errno == EINTR);
  return moved < 0 ? -errno : moved;
}

namespace {

class Sync final : public Ring {
 public:
  void push(const Operation& op) override { done_.push_back({op.slot, move_now(op)}); }

  void submit(std::vector<Result>& results) override { reap(0, false, results); }

  void reap(uint32_t, bool, std::vector<Result>& results) override {
    results.insert(results.end(), done_.begin(), done_.end());
    done_.clear();
  }

  void wake() override {}  // it never waits

 private:
  std::vector<Result> done_;
};

}  // namespace

std::unique_ptr<Ring> make_sync(uint32_t, int& error) {
  error = 0;
  return std::make_unique<Sync>();
}

}  // namespace ds::io
