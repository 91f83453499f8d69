// io_uring by its system calls: submissions and results lie in memory that the kernel shares with this thread.
//
// [Note: waking] The thread waits for results in the kernel. New requests must reach it there while its queue has room, so an
// eventfd is polled by the ring itself: raising it gives a result of its own, which ends the wait.
#include <cerrno>

#include "io/ring.h"

#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif

#if defined(IORING_FEAT_EXT_ARG)  // headers of Linux 5.11 or later: they have all that is used here
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

#if !defined(SYS_io_uring_setup)
#define SYS_io_uring_setup 425
#define SYS_io_uring_enter 426
#endif

// Newer than some headers; refused by kernels that do not know them, and then left out.
#if !defined(IORING_SETUP_COOP_TASKRUN)
#define IORING_SETUP_COOP_TASKRUN (1U << 8)
#endif
#if !defined(IORING_SETUP_SINGLE_ISSUER)
#define IORING_SETUP_SINGLE_ISSUER (1U << 12)
#endif
#if !defined(IORING_SETUP_DEFER_TASKRUN)
#define IORING_SETUP_DEFER_TASKRUN (1U << 13)
#endif

namespace ds::io {
namespace {

constexpr uint64_t kWakeTag = UINT64_MAX;

// A mapping of the ring's memory.
class Shared {
 public:
  bool map(int fd, size_t nbytes, off_t what) {
    void* found = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, what);
    if (found == MAP_FAILED) return false;
    memory_ = static_cast<char*>(found);
    nbytes_ = nbytes;
    return true;
  }
  ~Shared() {
    if (memory_ != nullptr) munmap(memory_, nbytes_);
  }
  template <typename T>
  T* at(uint32_t place) const {
    return reinterpret_cast<T*>(memory_ + place);
  }

 private:
  char* memory_ = nullptr;
  size_t nbytes_ = 0;
};

inline uint32_t acquire(uint32_t* place) { return std::atomic_ref<uint32_t>(*place).load(std::memory_order_acquire); }
inline void release(uint32_t* place, uint32_t value) {
  std::atomic_ref<uint32_t>(*place).store(value, std::memory_order_release);
}

class Uring final : public Ring {
 public:
  Uring(uint32_t depth, int& error) { error = open(depth + 1); }  // one more: the poll of the eventfd

  ~Uring() override {
    if (fd_ >= 0) close(fd_);
    if (event_fd_ >= 0) close(event_fd_);
  }

  void push(const Operation& op) override {
    io_uring_sqe& entry = next();
    entry.opcode = op.is_write ? IORING_OP_WRITE : IORING_OP_READ;
    entry.fd = op.fd;
    entry.addr = reinterpret_cast<uint64_t>(op.address);
    entry.len = static_cast<uint32_t>(op.nbytes);
    entry.off = static_cast<uint64_t>(op.offset);
    entry.user_data = op.slot;
  }

  void submit(std::vector<Result>& results) override {
    while (pushed_ > 0) enter(0, results);
  }

  void reap(uint32_t least, bool is_interruptible, std::vector<Result>& results) override {
    if (is_interruptible && !is_polling_) {
      io_uring_sqe& entry = next();
      entry.opcode = IORING_OP_POLL_ADD;
      entry.fd = event_fd_;
      entry.poll32_events = POLLIN;
      entry.user_data = kWakeTag;
      is_polling_ = true;
    }
    // The poll is inside as well when it was begun by an earlier call; its result then counts for one.
    do {
      enter(least, results);
    } while (pushed_ > 0);
  }

  void wake() override {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(event_fd_, &one, sizeof one);  // cannot fail below 2**64 calls
  }

 private:
  int open(uint32_t entries) {
    event_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (event_fd_ < 0) return -errno;
    io_uring_params params{};
    // Best first: results are handled when this thread asks for them, and interrupt nobody.
    for (const uint32_t flags : {IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN, IORING_SETUP_COOP_TASKRUN, 0U}) {
      params = {};
      params.flags = flags;
      fd_ = static_cast<int>(syscall(SYS_io_uring_setup, entries, &params));
      if (fd_ >= 0 || errno != EINVAL) break;
    }
    if (fd_ < 0) return -errno;
    if ((params.features & IORING_FEAT_RW_CUR_POS) == 0) return -ENOSYS;  // before Linux 5.6: no plain reads and writes
    return map(params);
  }

  int map(const io_uring_params& params) {
    const size_t submissions = params.sq_off.array + params.sq_entries * sizeof(uint32_t);
    const size_t completions = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
    if (!submissions_.map(fd_, submissions, IORING_OFF_SQ_RING) || !completions_.map(fd_, completions, IORING_OFF_CQ_RING) ||
        !entries_.map(fd_, params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES)) {
      return -errno;
    }
    sq_tail_ = submissions_.at<uint32_t>(params.sq_off.tail);
    sq_mask_ = *submissions_.at<uint32_t>(params.sq_off.ring_mask);
    cq_head_ = completions_.at<uint32_t>(params.cq_off.head);
    cq_tail_ = completions_.at<uint32_t>(params.cq_off.tail);
    cq_mask_ = *completions_.at<uint32_t>(params.cq_off.ring_mask);
    cqes_ = completions_.at<io_uring_cqe>(params.cq_off.cqes);
    sqes_ = entries_.at<io_uring_sqe>(0);
    uint32_t* array = submissions_.at<uint32_t>(params.sq_off.array);
    for (uint32_t i = 0; i < params.sq_entries; ++i) array[i] = i;
    return 0;
  }

  io_uring_sqe& next() {
    io_uring_sqe& entry = sqes_[(*sq_tail_ + pushed_) & sq_mask_];
    entry = {};
    ++pushed_;
    return entry;
  }

  // Hand over what was pushed, wait, and collect.
  void enter(uint32_t least, std::vector<Result>& results) {
    release(sq_tail_, *sq_tail_ + pushed_);
    const uint32_t flags = IORING_ENTER_GETEVENTS;
    long taken = syscall(SYS_io_uring_enter, fd_, pushed_, least, flags, nullptr, 0);
    const int error = taken < 0 ? errno : 0;
    taken = std::max(taken, 0L);
    // The kernel takes entries from the front; those it left are pushed again by moving the tail back.
    release(sq_tail_, *sq_tail_ - (pushed_ - static_cast<uint32_t>(taken)));
    pushed_ -= static_cast<uint32_t>(taken);
    if (error != 0 && error != EINTR && error != EAGAIN && error != EBUSY) fail(error, results);
    collect(results);
  }

  // The kernel refused a call as a whole: what was pushed has failed.
  void fail(int error, std::vector<Result>& results) {
    for (uint32_t i = 0; i < pushed_; ++i) {
      const uint64_t tag = sqes_[(*sq_tail_ + i) & sq_mask_].user_data;
      if (tag == kWakeTag) {
        is_polling_ = false;
      } else {
        results.push_back({static_cast<uint32_t>(tag), -error});
      }
    }
    pushed_ = 0;
  }

  void collect(std::vector<Result>& results) {
    uint32_t head = *cq_head_;
    for (const uint32_t tail = acquire(cq_tail_); head != tail; ++head) {
      const io_uring_cqe& done = cqes_[head & cq_mask_];
      if (done.user_data == kWakeTag) {
        uint64_t count;
        [[maybe_unused]] const ssize_t nbytes = read(event_fd_, &count, sizeof count);
        is_polling_ = false;
      } else {
        results.push_back({static_cast<uint32_t>(done.user_data), done.res});
      }
    }
    release(cq_head_, head);
  }

  int fd_ = -1;
  int event_fd_ = -1;
  bool is_polling_ = false;
  uint32_t pushed_ = 0;
  Shared submissions_, completions_, entries_;
  io_uring_sqe* sqes_ = nullptr;
  io_uring_cqe* cqes_ = nullptr;
  uint32_t* sq_tail_ = nullptr;
  uint32_t* cq_head_ = nullptr;
  uint32_t* cq_tail_ = nullptr;
  uint32_t sq_mask_ = 0, cq_mask_ = 0;
};

}  // namespace

std::unique_ptr<Ring> make_uring(uint32_t depth, int& error) {
  auto ring = std::make_unique<Uring>(depth, error);
  if (error != 0) ring.reset();
  return ring;
}

}  // namespace ds::io

#else

std::unique_ptr<ds::io::Ring> ds::io::make_uring(uint32_t, int& error) {
  error = -ENOSYS;
  return nullptr;
}

#endif
