// The kernel's older interface for asynchronous I/O (io_submit; what libaio wraps), by its system calls.
//
// Results and calls of `wake` both raise one eventfd, so that a thread can wait for either.
#include <cerrno>

#include "io/ring.h"

#if defined(__linux__) && __has_include(<linux/aio_abi.h>)
#include <linux/aio_abi.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace ds::io {
namespace {

class KernelAio final : public Ring {
 public:
  KernelAio(uint32_t depth, int& error) : blocks_(depth), events_(depth) {
    pending_.reserve(depth);
    event_fd_ = eventfd(0, EFD_CLOEXEC);
    error = event_fd_ < 0 || syscall(SYS_io_setup, depth, &context_) != 0 ? -errno : 0;
  }

  ~KernelAio() override {
    if (context_ != 0) syscall(SYS_io_destroy, context_);
    if (event_fd_ >= 0) close(event_fd_);
  }

  void push(const Operation& op) override {
    iocb& block = blocks_[op.slot];
    block = {};
    block.aio_data = op.slot;
    block.aio_lio_opcode = op.is_write ? IOCB_CMD_PWRITE : IOCB_CMD_PREAD;
    block.aio_fildes = static_cast<uint32_t>(op.fd);
    block.aio_buf = reinterpret_cast<uint64_t>(op.address);
    block.aio_nbytes = static_cast<uint64_t>(op.nbytes);
    block.aio_offset = op.offset;
    block.aio_flags = IOCB_FLAG_RESFD;
    block.aio_resfd = static_cast<uint32_t>(event_fd_);
    pending_.push_back(&block);
  }

  void submit(std::vector<Result>& results) override {
    size_t at = 0;
    while (at < pending_.size()) {
      const long taken = syscall(SYS_io_submit, context_, pending_.size() - at, pending_.data() + at);
      if (taken > 0) {
        at += static_cast<size_t>(taken);
        inside_ += static_cast<uint32_t>(taken);
      } else if (taken < 0 && errno == EAGAIN && inside_ > 0) {
        wait(1, results);  // the kernel is short of room: results make some
      } else if (taken < 0 && errno != EINTR) {  // this one cannot be begun; the next may
        results.push_back({static_cast<uint32_t>(pending_[at]->aio_data), refused(*pending_[at], errno)});
        ++at;
      }
    }
    pending_.clear();
  }

  void reap(uint32_t least, bool is_interruptible, std::vector<Result>& results) override {
    const size_t before = results.size();
    submit(results);
    if (results.size() > before) least = 0;  // something to work on already
    if (least == 0 || inside_ == 0) return wait(0, results);
    if (!is_interruptible) return wait(least, results);
    uint64_t count;
    while (read(event_fd_, &count, sizeof count) < 0 && errno == EINTR) {
    }
    wait(0, results);
  }

  void wake() override {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(event_fd_, &one, sizeof one);  // cannot fail below 2**64 calls
  }

 private:
  // EINVAL stands for alignment, but also for files that know only plain calls.
  static int64_t refused(const iocb& block, int error) {
    if (error != EINVAL) return -error;
    return move_now({block.aio_lio_opcode == IOCB_CMD_PWRITE, static_cast<int>(block.aio_fildes),
                     reinterpret_cast<char*>(block.aio_buf), static_cast<int64_t>(block.aio_nbytes), block.aio_offset,
                     static_cast<uint32_t>(block.aio_data)});
  }

  void wait(uint32_t least, std::vector<Result>& results) {
    if (inside_ == 0) return;
    timespec at_once{0, 0};
    long count;
    do {
      count = syscall(SYS_io_getevents, context_, static_cast<long>(least), static_cast<long>(events_.size()), events_.data(),
                      least == 0 ? &at_once : nullptr);
    } while (count < 0 && errno == EINTR);
    for (long i = 0; i < count; ++i) {
      results.push_back({static_cast<uint32_t>(events_[i].data), events_[i].res});
    }
    if (count > 0) inside_ -= static_cast<uint32_t>(count);
  }

  std::vector<iocb> blocks_;
  std::vector<io_event> events_;
  std::vector<iocb*> pending_;
  aio_context_t context_ = 0;
  int event_fd_ = -1;
  uint32_t inside_ = 0;
};

}  // namespace

std::unique_ptr<Ring> make_kernel_aio(uint32_t depth, int& error) {
  auto ring = std::make_unique<KernelAio>(depth, error);
  if (error != 0) ring.reset();
  return ring;
}

}  // namespace ds::io

#else

std::unique_ptr<ds::io::Ring> ds::io::make_kernel_aio(uint32_t, int& error) {
  error = -ENOSYS;
  return nullptr;
}

#endif
