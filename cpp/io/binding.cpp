// The C interface of the file queues, called by offload/file_queues.py. Nothing here throws.
#include <new>

#include "thread_queue.h"
#include "uring_queue.h"

#define ZS_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr uint64_t kMostBlockBytes = 1ull << 30;  // a call moves less than 2 GiB

template <class Call>
auto guarded(Call call, decltype(call()) failed) -> decltype(call()) {
  try {
    return call();
  } catch (...) {
    return failed;
  }
}

}  // namespace

// Null, with an errno, where it cannot be opened.
ZS_EXPORT zs::Queue* zs_io_open(int uring, unsigned depth, uint64_t block_bytes, int* error) {
  *error = depth == 0 || depth > 4096 || block_bytes == 0 || block_bytes > kMostBlockBytes ? EINVAL : 0;
  if (*error != 0) return nullptr;
  *error = ENOMEM;
  return guarded(
      [&]() -> zs::Queue* {
        if (!uring) {
          zs::Queue* queue = new zs::ThreadQueue(depth, block_bytes);
          *error = 0;
          return queue;
        }
        auto* queue = new zs::UringQueue(depth, block_bytes, error);
        if (*error == 0) return queue;
        delete queue;
        return nullptr;
      },
      nullptr);
}

ZS_EXPORT int64_t zs_io_submit(zs::Queue* queue, int write, const zs::Extent* extents, uint64_t count) {
  return guarded([&] { return queue->submit(write != 0, extents, count); }, int64_t{-ENOMEM});
}

ZS_EXPORT int zs_io_wait(zs::Queue* queue, int64_t request, int milliseconds, zs::Outcome* outcome) {
  return guarded([&] { return queue->wait(request, milliseconds, outcome); }, -ENOMEM);
}

ZS_EXPORT uint64_t zs_io_calls(zs::Queue* queue) { return queue->calls(); }

ZS_EXPORT void zs_io_shorten(zs::Queue* queue, uint64_t nbytes) { queue->shorten(nbytes); }

ZS_EXPORT int zs_io_register(zs::Queue* queue, char* memory, uint64_t nbytes) {
  return guarded([&] { return queue->register_memory(memory, nbytes); }, ENOMEM);
}

ZS_EXPORT void zs_io_forget(zs::Queue* queue, int64_t request) { queue->forget(request); }

// Cancels what is not begun. 0, or ETIMEDOUT if blocks are still under way after this time: the queue then still exists.
ZS_EXPORT int zs_io_close(zs::Queue* queue, int milliseconds) {
  return guarded(
      [&] {
        if (!queue->settle(milliseconds)) return ETIMEDOUT;
        delete queue;
        return 0;
      },
      ENOMEM);
}
