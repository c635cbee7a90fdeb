// Transfers between files and memory, cut into blocks of which a bounded number is under way at any time.
//
//     submit --> waiting_ (requests, first come first served) --take--> block --again--> ... --finish--> wait
//
// A block is worked on until all of it has moved: short reads and writes go on where they ended, or, where the file wants
// aligned offsets, at the last boundary before that, which moves some bytes twice. After a request's first error its
// other blocks are not begun, and it is over when those under way are. Memory must stay until a request is over.
#pragma once

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdint>
#include <deque>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace zs {

constexpr int kFileEnded = -1;  // beside the values of errno
constexpr int kMostRetries = 100;  // of a call that was interrupted or told to come again
constexpr int kMostStalls = 1;  // of calls in a row that moved too little to go on

// Waits as `condition.wait(lock, over)` does, which asks for a newer libstdc++ than the oldest that wheels support.
template <class Over>
void wait_until(std::condition_variable& condition, std::unique_lock<std::mutex>& lock, Over over) {
  while (!condition.wait_for(lock, std::chrono::hours(1), over)) {
  }
}

// A range of a file and the memory of its bytes; offload/file_queues.py has the same fields.
struct Extent {
  int32_t fd;
  uint32_t alignment;  // at what multiples of bytes of the file a call may begin
  char* memory;
  uint64_t offset, nbytes;
};

struct Outcome {
  int32_t error;  // 0, an errno, or kFileEnded
  uint32_t extent;
  uint64_t offset, nbytes;  // in the file, what was left to do of the block that failed
};

struct Request {
  bool write;
  std::vector<Extent> extents;
  size_t extent = 0;  // the next block begins here,
  uint64_t begin = 0;  // at this byte of it
  unsigned under_way = 0;
  Outcome outcome = {};

  bool handed_out() const { return extent == extents.size() || outcome.error != 0; }
  bool over() const { return handed_out() && under_way == 0; }
  void skip_empty() {
    while (extent < extents.size() && begin == extents[extent].nbytes) {
      ++extent;
      begin = 0;
    }
  }
};

struct Block {
  Request* request;
  uint32_t index;  // of the extent
  Extent range;  // what this block is to move
  uint64_t done;
  int retries, stalls, error;

  uint64_t offset() const { return range.offset + done; }
  uint64_t left() const { return range.nbytes - done; }
  char* memory() const { return range.memory + done; }
};

// Takes the result of a call (bytes, or -errno) to account. True if the block needs another call.
inline bool again(Block& block, int64_t result) {
  if (result < 0) {
    const int error = static_cast<int>(-result);
    if ((error == EINTR || error == EAGAIN) && block.retries++ < kMostRetries) return true;
    block.error = error;
    return false;
  }
  const uint64_t moved = block.done + static_cast<uint64_t>(result);
  if (moved >= block.range.nbytes) {
    block.done = block.range.nbytes;
    return false;
  }
  const uint64_t kept = moved - moved % block.range.alignment;
  if (kept > block.done) {
    block.done = kept;
    block.stalls = 0;
    return true;
  }
  if (block.stalls++ < kMostStalls) return true;
  block.error = block.request->write ? EIO : kFileEnded;
  return false;
}

// Threads that are started inside leave all signals to the others.
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

class Queue {
 public:
  explicit Queue(uint64_t block_bytes) : block_bytes_(block_bytes) {}
  virtual ~Queue() = default;

  // A number above 0, or -errno.
  int64_t submit(bool write, const Extent* extents, size_t count) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closing_ || broken_) return -(broken_ ? broken_ : ESHUTDOWN);
    const int64_t id = ++last_id_;
    Request& request = requests_[id];
    request.write = write;
    request.extents.assign(extents, extents + count);
    request.skip_empty();
    if (!request.handed_out()) {
      waiting_.push_back(&request);
      wake();
    }
    return id;
  }

  // 1 if the request is over, 0 if it is not over in time, -ENOENT if there is none of this number.
  int wait(int64_t id, int milliseconds, Outcome* outcome) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto found = requests_.find(id);
    if (found == requests_.end()) return -ENOENT;
    Request& request = found->second;
    ++waiters_;
    const bool over = finished_.wait_for(lock, std::chrono::milliseconds(milliseconds), [&] { return request.over(); });
    if (--waiters_ == 0) finished_.notify_all();
    if (!over) return 0;
    *outcome = request.outcome;
    return 1;
  }

  // Of a request that is over, and that nobody waits for any more.
  void forget(int64_t id) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = requests_.find(id);
    if (found == requests_.end() || !found->second.over()) return;
    const auto waiting = std::find(waiting_.begin(), waiting_.end(), &found->second);
    if (waiting != waiting_.end()) waiting_.erase(waiting);
    requests_.erase(id);
  }

  // Takes nothing more and cancels what is not begun. False if blocks are still under way after this time.
  bool settle(int milliseconds) {
    std::unique_lock<std::mutex> lock(mutex_);
    closing_ = true;
    cancel_waiting(ECANCELED);
    return finished_.wait_for(lock, std::chrono::milliseconds(milliseconds),
                              [&] { return under_way_ == 0 && waiters_ == 0; });
  }

  // Calls that ended: who waits sees by it whether anything moves.
  uint64_t calls() {
    std::lock_guard<std::mutex> lock(mutex_);
    return calls_;
  }

  // For tests: asks each call for so many bytes at most, so that it comes back short. 0 for no bound.
  void shorten(uint64_t nbytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    most_ = nbytes;
  }

  // Tells that much of the traffic will be with this memory. 0 or an errno; either way it may be used.
  virtual int register_memory(char*, uint64_t) { return ENOTSUP; }

 protected:
  // All of these with mutex_ held.
  virtual void wake() = 0;

  bool take(Block& block) {
    while (!waiting_.empty()) {
      Request& request = *waiting_.front();
      if (request.handed_out()) {
        waiting_.pop_front();
        continue;
      }
      const Extent& whole = request.extents[request.extent];
      const uint64_t left = whole.nbytes - request.begin;
      const uint64_t nbytes = left < block_bytes_ ? left : block_bytes_;
      const Extent range = {
          whole.fd, whole.alignment, whole.memory + request.begin, whole.offset + request.begin, nbytes};
      block = {&request, static_cast<uint32_t>(request.extent), range, 0, 0, 0, 0};
      request.begin += nbytes;
      request.skip_empty();
      ++request.under_way;
      ++under_way_;
      return true;
    }
    return false;
  }

  uint64_t most_bytes(const Block& block) const {
    return most_ != 0 && most_ < block.left() ? most_ : block.left();
  }

  void finish(const Block& block) {
    Request& request = *block.request;
    --request.under_way;
    --under_way_;
    if (block.error != 0 && request.outcome.error == 0) {
      request.outcome = {block.error, block.index, block.offset(), block.left()};
    }
    if (request.over() || under_way_ == 0) finished_.notify_all();
  }

  void cancel_waiting(int error) {
    for (Request* request : waiting_) {
      if (request->handed_out()) continue;
      const Extent& extent = request->extents[request->extent];
      request->outcome = {error, static_cast<uint32_t>(request->extent), extent.offset + request->begin,
                          extent.nbytes - request->begin};
    }
    waiting_.clear();
    finished_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable finished_;
  uint64_t calls_ = 0;
  int broken_ = 0;  // the errno that ended the work for good
  bool closing_ = false;

 private:
  const uint64_t block_bytes_;
  uint64_t most_ = 0;
  unsigned under_way_ = 0;  // blocks
  unsigned waiters_ = 0;
  int64_t last_id_ = 0;
  std::unordered_map<int64_t, Request> requests_;  // its elements stay where they are
  std::deque<Request*> waiting_;
};

}  // namespace zs
