// Blocks by threads that read and write: as many blocks are under way as there are threads.
#pragma once

#include <sys/uio.h>
#include <unistd.h>

#include <thread>

#include "queue.h"

namespace zs {

class ThreadQueue final : public Queue {
 public:
  ThreadQueue(unsigned depth, uint64_t block_bytes) : Queue(block_bytes) {
    SignalsBlocked blocked;
    try {
      for (unsigned i = 0; i < depth; ++i) threads_.emplace_back([this] { work(); });
    } catch (...) {
      if (threads_.empty()) throw;  // fewer threads than asked for do as well
    }
  }

  ~ThreadQueue() override {
    settle(0);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      work_.notify_all();
    }
    for (std::thread& thread : threads_) thread.join();
  }

 private:
  void wake() override { work_.notify_all(); }

  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      Block block;
      if (!take(block)) {
        if (closing_) return;
        work_.wait_for(lock, std::chrono::hours(1));  // see wait_until: the loop looks again either way
        continue;
      }
      bool more = true;
      while (more) {
        const iovec range = {block.memory(), static_cast<size_t>(most_bytes(block))};
        lock.unlock();
        const auto at = static_cast<off_t>(block.offset());
        const ssize_t result = block.request->write ? pwritev(block.range.fd, &range, 1, at)
                                                    : preadv(block.range.fd, &range, 1, at);
        more = again(block, result < 0 ? -errno : result);
        lock.lock();
        ++calls_;
      }
      finish(block);
    }
  }

  std::condition_variable work_;
  std::vector<std::thread> threads_;
};

}  // namespace zs
