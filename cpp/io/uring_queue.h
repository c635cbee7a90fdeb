// Blocks by io_uring. A thread of its own has the ring to itself and sleeps in it; so blocks move on while those who
// submitted them compute. What wakes it is a read of an eventfd that is always under way beside the blocks.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <thread>

#include "queue.h"
#include "uring.h"

namespace zs {

class UringQueue final : public Queue {
 public:
  // `error` becomes 0, or an errno where the kernel refuses.
  UringQueue(unsigned depth, uint64_t block_bytes, int* error) : Queue(block_bytes), slots_(depth) {
    for (unsigned slot = 0; slot < depth; ++slot) free_.push_back(slot);
    event_ = eventfd(0, EFD_CLOEXEC);
    *error = event_ < 0 ? errno : 0;
    if (*error != 0) return;
    try {
      SignalsBlocked blocked;
      thread_ = std::thread([this] { work(); });
    } catch (...) {
      close(event_);
      throw;
    }
    std::unique_lock<std::mutex> lock(mutex_);
    wait_until(told_, lock, [&] { return opened_ >= 0; });
    *error = opened_;
  }

  ~UringQueue() override {
    settle(0);
    if (event_ >= 0) (void)eventfd_write(event_, 1);  // also if it is awake: its last read of the eventfd must end
    if (thread_.joinable()) thread_.join();
    if (event_ >= 0) close(event_);
  }

  int register_memory(char* memory, uint64_t nbytes) override {
    std::unique_lock<std::mutex> lock(mutex_);
    if (closing_ || broken_) return ESHUTDOWN;
    wanted_ = {memory, nbytes};
    registered_ = -1;
    wake();
    wait_until(told_, lock, [&] { return registered_ >= 0 || broken_; });
    return registered_ >= 0 ? registered_ : ESHUTDOWN;
  }

 private:
  struct Region {
    char* memory;
    uint64_t nbytes;
  };
  static constexpr uint64_t kWoken = ~0ull;
  static constexpr uint32_t kMostRegions = 64;
  static constexpr uint64_t kMostRegionBytes = 1ull << 30;  // the kernel's bound

  void wake() override {
    if (asleep_) {
      asleep_ = false;
      (void)eventfd_write(event_, 1);
    }
  }

  void work() {
    Uring ring;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      opened_ = ring.open(static_cast<unsigned>(slots_.size()) + 1);
      told_.notify_all();
      if (opened_ != 0) return;
    }
    bool armed = false;
    while (hand_out(ring)) {
      if (!armed) {
        arm(ring);
        armed = true;
      }
      const int error = ring.enter();
      if (error != 0 && error != EINTR && error != EAGAIN && error != EBUSY) {
        give_up(error);
        return;
      }
      reap(ring, armed);
    }
    while (armed) {  // the kernel must not write to `woken_` when it is gone
      const int error = ring.enter();
      if (error != 0 && error != EINTR && error != EAGAIN && error != EBUSY) return;
      reap(ring, armed);
    }
  }

  // Submits as many blocks as may be under way. False if it is time to end.
  bool hand_out(Uring& ring) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (wanted_.memory != nullptr) register_wanted(ring);
    Block block;
    while (!free_.empty() && take(block)) {
      const unsigned slot = free_.back();
      free_.pop_back();
      slots_[slot] = block;
      push(ring, slot);
    }
    if (closing_ && free_.size() == slots_.size()) return false;
    asleep_ = true;
    return true;
  }

  void push(Uring& ring, unsigned slot) {
    const Block& block = slots_[slot];
    const auto nbytes = static_cast<uint32_t>(most_bytes(block));
    UringEntry& entry = ring.push();
    const int region = region_of(block.memory(), nbytes);
    const bool write = block.request->write;
    entry.opcode = region >= 0 ? (write ? kWriteFixed : kReadFixed) : (write ? kWrite : kRead);
    entry.buffer_index = static_cast<uint16_t>(region >= 0 ? region : 0);
    entry.fd = block.range.fd;
    entry.offset = block.offset();
    entry.address = reinterpret_cast<uint64_t>(block.memory());
    entry.nbytes = nbytes;
    entry.user_data = slot;
  }

  void arm(Uring& ring) {
    UringEntry& entry = ring.push();
    entry.opcode = kRead;
    entry.fd = event_;
    entry.address = reinterpret_cast<uint64_t>(&woken_);
    entry.nbytes = sizeof woken_;
    entry.user_data = kWoken;
  }

  void reap(Uring& ring, bool& armed) {
    std::lock_guard<std::mutex> lock(mutex_);
    asleep_ = false;
    UringResult result;
    while (ring.pop(result)) {
      if (result.user_data == kWoken) {
        armed = false;
        continue;
      }
      const auto slot = static_cast<unsigned>(result.user_data);
      ++calls_;
      if (again(slots_[slot], result.result)) {
        push(ring, slot);
      } else {
        finish(slots_[slot]);
        free_.push_back(slot);
      }
    }
  }

  void register_wanted(Uring& ring) {
    registered_ = 0;
    if (regions_.empty()) registered_ = ring.make_table(kMostRegions);
    while (registered_ == 0 && wanted_.nbytes != 0) {
      const uint64_t nbytes = std::min(wanted_.nbytes, kMostRegionBytes);
      if (regions_.size() == kMostRegions) {
        registered_ = ENOBUFS;
        break;
      }
      registered_ = ring.set_table(static_cast<uint32_t>(regions_.size()), wanted_.memory, nbytes);
      if (registered_ == 0) regions_.push_back({wanted_.memory, nbytes});
      wanted_ = {wanted_.memory + nbytes, wanted_.nbytes - nbytes};
    }
    wanted_ = {nullptr, 0};
    told_.notify_all();
  }

  int region_of(const char* memory, uint64_t nbytes) const {
    for (size_t i = 0; i < regions_.size(); ++i) {
      const Region& region = regions_[i];
      if (memory >= region.memory && memory + nbytes <= region.memory + region.nbytes) return static_cast<int>(i);
    }
    return -1;
  }

  // The ring no longer answers: nobody may wait for it.
  void give_up(int error) {
    std::lock_guard<std::mutex> lock(mutex_);
    broken_ = error;
    cancel_waiting(error);
    std::vector<bool> idle(slots_.size());
    for (const unsigned slot : free_) idle[slot] = true;
    for (size_t slot = 0; slot < slots_.size(); ++slot) {
      if (idle[slot]) continue;
      slots_[slot].error = error;
      finish(slots_[slot]);
    }
    told_.notify_all();
  }

  std::vector<Block> slots_;
  std::vector<unsigned> free_;
  std::vector<Region> regions_;
  Region wanted_ = {nullptr, 0};
  int registered_ = 0, opened_ = -1;  // -1: not known yet
  bool asleep_ = false;
  int event_ = -1;
  uint64_t woken_ = 0;
  std::condition_variable told_;
  std::thread thread_;
};

}  // namespace zs
