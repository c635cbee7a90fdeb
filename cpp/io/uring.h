// io_uring by its three system calls. The layouts and numbers are the kernel's binary interface (io_uring(7)), written
// down here because the headers of a machine may be older than its kernel.
#pragma once

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>

namespace zs {

struct UringEntry {  // of the submission queue
  uint8_t opcode, flags;
  uint16_t priority;
  int32_t fd;
  uint64_t offset, address;
  uint32_t nbytes, call_flags;
  uint64_t user_data;
  uint16_t buffer_index, personality;
  int32_t unused;
  uint64_t padding[2];
};

struct UringResult {  // of the completion queue
  uint64_t user_data;
  int32_t result;
  uint32_t flags;
};

struct UringParams {
  uint32_t entries, results, flags, thread_cpu, thread_idle, features, worker_fd, reserved[3];
  struct {
    uint32_t head, tail, mask, count, flags, dropped, array, reserved;
    uint64_t address;
  } submission;
  struct {
    uint32_t head, tail, mask, count, overflow, results, flags, reserved;
    uint64_t address;
  } completion;
};

struct UringTable {  // of registered memory
  uint32_t count, flags;
  uint64_t reserved, data, tags;
};

struct UringUpdate {
  uint32_t first, reserved;
  uint64_t data, tags;
  uint32_t count, reserved2;
};

static_assert(sizeof(UringEntry) == 64 && sizeof(UringResult) == 16 && sizeof(UringParams) == 120, "the kernel's");
static_assert(sizeof(UringTable) == 32 && sizeof(UringUpdate) == 32, "the kernel's");

enum : uint8_t { kReadFixed = 4, kWriteFixed = 5, kRead = 22, kWrite = 23 };
constexpr uint32_t kOneIssuer = 1u << 12, kDeferWork = 1u << 13;  // set-up flags, Linux 6.1
constexpr uint32_t kOneMapping = 1u << 0, kCurrentPosition = 1u << 3;  // features; the latter came with kRead, Linux 5.6
constexpr unsigned kRegisterTable = 15, kUpdateTable = 16;
constexpr uint32_t kSparse = 1;  // a table without memory at first, Linux 5.19
constexpr long kSetUp = 425, kEnter = 426, kRegister = 427;  // on all architectures but Alpha

class Uring {
 public:
  Uring() = default;
  Uring(const Uring&) = delete;
  Uring& operator=(const Uring&) = delete;

  ~Uring() {
    if (entries_ != nullptr) munmap(entries_, params_.entries * sizeof(UringEntry));
    if (rings_ != nullptr) munmap(rings_, rings_bytes_);
    if (fd_ >= 0) close(fd_);
  }

  // Room for so many entries at once; 0 or an errno. Only the calling thread may use the ring afterwards.
  int open(unsigned entries) {
    for (const uint32_t flags : {kOneIssuer | kDeferWork, 0u}) {
      params_ = {};
      params_.flags = flags;
      fd_ = static_cast<int>(syscall(kSetUp, entries, &params_));
      if (fd_ >= 0 || errno != EINVAL) break;
    }
    if (fd_ < 0) return errno;
    if (!(params_.features & kOneMapping) || !(params_.features & kCurrentPosition)) return ENOSYS;
    rings_bytes_ = std::max<size_t>(params_.submission.array + params_.entries * sizeof(uint32_t),
                                    params_.completion.results + params_.results * sizeof(UringResult));
    rings_ = static_cast<char*>(map(rings_bytes_, 0));
    entries_ = static_cast<UringEntry*>(map(params_.entries * sizeof(UringEntry), 0x10000000));
    if (rings_ == nullptr || entries_ == nullptr) return ENOMEM;
    uint32_t* order = at(params_.submission.array);
    for (uint32_t i = 0; i < params_.entries; ++i) order[i] = i;
    tail_ = *at(params_.submission.tail);
    return 0;
  }

  // The next entry, cleared. There must be room.
  UringEntry& push() {
    UringEntry& entry = entries_[tail_++ & (params_.entries - 1)];
    std::memset(&entry, 0, sizeof entry);
    return entry;
  }

  // Hands over all entries and waits for a result. 0 or an errno; after an interruption not all may be handed over yet.
  int enter() {
    uint32_t* shared = at(params_.submission.tail);
    handed_over_ += tail_ - *shared;
    __atomic_store_n(shared, tail_, __ATOMIC_RELEASE);
    const long taken = syscall(kEnter, fd_, handed_over_, 1, /*wait for results*/ 1, nullptr, 0);
    if (taken < 0) return errno;
    handed_over_ -= static_cast<uint32_t>(taken);
    return 0;
  }

  // False if there is no result.
  bool pop(UringResult& result) {
    uint32_t* head = at(params_.completion.head);
    if (*head == __atomic_load_n(at(params_.completion.tail), __ATOMIC_ACQUIRE)) return false;
    const auto* results = reinterpret_cast<const UringResult*>(rings_ + params_.completion.results);
    result = results[*head & (params_.results - 1)];
    __atomic_store_n(head, *head + 1, __ATOMIC_RELEASE);
    return true;
  }

  // A table of registered memory, empty. 0 or an errno.
  int make_table(uint32_t count) {
    UringTable table = {count, kSparse, 0, 0, 0};
    return syscall(kRegister, fd_, kRegisterTable, &table, sizeof table) < 0 ? errno : 0;
  }

  // 0 or an errno: ENOMEM where RLIMIT_MEMLOCK does not allow it.
  int set_table(uint32_t index, void* memory, size_t nbytes) {
    struct {
      void* memory;
      size_t nbytes;
    } range = {memory, nbytes};
    UringUpdate update = {index, 0, reinterpret_cast<uint64_t>(&range), 0, 1, 0};
    return syscall(kRegister, fd_, kUpdateTable, &update, sizeof update) < 0 ? errno : 0;
  }

 private:
  void* map(size_t nbytes, off_t what) {
    void* found = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, what);
    return found == MAP_FAILED ? nullptr : found;
  }

  uint32_t* at(uint32_t offset) { return reinterpret_cast<uint32_t*>(rings_ + offset); }

  UringParams params_ = {};
  int fd_ = -1;
  char* rings_ = nullptr;
  size_t rings_bytes_ = 0;
  UringEntry* entries_ = nullptr;
  uint32_t tail_ = 0, handed_over_ = 0;
};

}  // namespace zs
