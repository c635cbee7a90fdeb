// Takes the place of zero_strategy/cpp/cuda/launch.cuh where the kernels are compiled by a C++ compiler and run on the
// host: blocks one after the other, the threads of a block as coroutines that change places at its barriers and, 32 by
// 32, at shuffles. A kernel that touched memory that is not its own, or forgot a barrier, may go unnoticed; a wrong
// number or index does not, nor a barrier or a shuffle that only some threads come to: that ends the process.
#pragma once

#include <cuda_runtime.h>
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>

namespace on_host {

constexpr size_t kStack = 64 << 10;
constexpr unsigned kMostThreads = 1024, kWarp = 32;

enum class At { work, barrier, shuffle, end };

// A coroutine, which lives on from one block to the next. setjmp, since swapcontext asks the kernel for signals.
struct Thread {
  jmp_buf place;
  char* stack = nullptr;
  At at = At::end;
  int parity = 0;
  char sent[2][8];  // by turns, so that a shuffle need not wait until all have read
};

struct State {
  uint3 thread, block;
  dim3 blocks;
  jmp_buf scheduler;
  Thread threads[kMostThreads];
  std::function<void()> body;
  int votes = 0;
};

inline State one;
inline State& state() { return one; }

[[noreturn]] inline void fail(const char* why) {
  std::fprintf(stderr, "cuda_on_host: %s\n", why);
  std::abort();
}

__attribute__((noinline)) inline void give_way(At at) {
  Thread& self = one.threads[one.thread.x];
  self.at = at;
  if (_setjmp(self.place) == 0) _longjmp(one.scheduler, 1);
}

inline void run_thread() {
  for (;;) {
    one.body();
    give_way(At::end);
  }
}

__attribute__((noinline)) inline void resume(unsigned number) {
  Thread& thread = one.threads[number];
  one.thread = {number, 0, 0};
  if (_setjmp(one.scheduler) != 0) return;
  if (thread.stack != nullptr) _longjmp(thread.place, 1);
  thread.stack = static_cast<char*>(std::malloc(kStack));
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = thread.stack;
  context.uc_stack.ss_size = kStack;
  makecontext(&context, run_thread, 0);
  setcontext(&context);
}

// Whether all of some threads that have not ended are at a place; then they may go on.
inline bool release(unsigned begin, unsigned end, At place, bool of_all) {
  unsigned there = 0, ended = 0;
  for (unsigned i = begin; i < end; ++i) {
    there += one.threads[i].at == place;
    ended += one.threads[i].at == At::end;
  }
  if (there == 0 || there + (of_all ? 0 : ended) < end - begin) return false;
  for (unsigned i = begin; i < end; ++i) {
    if (one.threads[i].at == place) one.threads[i].at = At::work;
  }
  return true;
}

inline void run_block(unsigned threads) {
  if (threads == 0 || threads > kMostThreads) fail("a block has 1 to 1024 threads");
  for (unsigned i = 0; i < threads; ++i) one.threads[i].at = At::work;
  do {
    for (unsigned begin = 0; begin < threads; begin += kWarp) {
      const unsigned end = begin + kWarp < threads ? begin + kWarp : threads;
      do {
        for (unsigned i = begin; i < end; ++i) {
          if (one.threads[i].at == At::work) resume(i);
        }
      } while (release(begin, end, At::shuffle, true));
    }
  } while (release(0, threads, At::barrier, false));
  for (unsigned i = 0; i < threads; ++i) {
    if (one.threads[i].at != At::end) fail("threads wait for others that do not come");
  }
}

// Two rounds: no thread reads the votes before all have voted, and none votes again before all have read.
inline int vote(int value) {
  if (one.thread.x == 0) one.votes = 0;
  give_way(At::barrier);
  one.votes |= value;
  give_way(At::barrier);
  const int all = one.votes;
  give_way(At::barrier);
  return all;
}

template <class T>
inline T shuffle_xor(unsigned mask, T value, int apart) {
  static_assert(sizeof(T) <= sizeof Thread::sent[0]);
  if (mask != 0xffffffffu || apart <= 0 || apart >= int(kWarp)) fail("only whole warps shuffle here");
  const unsigned number = one.thread.x;
  Thread& self = one.threads[number];
  const int parity = self.parity ^= 1;
  std::memcpy(self.sent[parity], &value, sizeof value);
  give_way(At::shuffle);
  const Thread& other = one.threads[number ^ unsigned(apart)];
  std::memcpy(&value, other.sent[parity], sizeof value);
  return value;
}

}  // namespace on_host

#undef __shared__
#undef __launch_bounds__
#define __shared__ static
#define __launch_bounds__(threads)
#define threadIdx (on_host::state().thread)
#define blockIdx (on_host::state().block)
#define gridDim (on_host::state().blocks)
#define __syncthreads() on_host::give_way(on_host::At::barrier)
#define __syncthreads_or(value) on_host::vote(value)
#define __shfl_xor_sync(mask, value, apart) on_host::shuffle_xor(mask, value, apart)

template <class T>
inline T atomicAdd(T* target, T value) {
  const T before = *target;
  *target += value;
  return before;
}

namespace zs {

template <class Kernel, class... Arguments>
cudaError_t launch(Kernel* kernel, dim3 blocks, unsigned threads, cudaStream_t, const Arguments&... arguments) {
  on_host::State& s = on_host::state();
  if (blocks.x == 0 || blocks.y == 0 || blocks.y > 65535) on_host::fail("a grid has 1 to 2^31 - 1 x 65535 blocks");
  s.blocks = blocks;
  s.body = [&] { kernel(arguments...); };
  for (unsigned y = 0; y < blocks.y; ++y) {
    for (unsigned x = 0; x < blocks.x; ++x) {
      s.block = {x, y, 0};
      on_host::run_block(threads);
    }
  }
  return cudaSuccess;
}

}  // namespace zs
