// Takes the place of zero_strategy/cpp/cuda/launch.cuh where the kernels are compiled by a C++ compiler and run on the
// host: blocks one after the other, the threads of a block as coroutines that change places at its barriers. A kernel
// that touched memory that is not its own, or forgot a barrier, may go unnoticed; a wrong number or index does not.
#pragma once

#include <cuda_runtime.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

namespace on_host {

constexpr size_t kStack = 64 << 10;

struct State {
  uint3 thread, block;
  dim3 blocks;
  ucontext_t scheduler;
  std::vector<ucontext_t> threads;
  std::vector<char> ended;
  std::function<void()> body;
  int votes = 0;
};

inline State& state() {
  static State one;
  return one;
}

// A coroutine gives way here until all others have arrived.
inline void barrier() {
  State& s = state();
  swapcontext(&s.threads[s.thread.x], &s.scheduler);
}

inline void run_thread() {
  State& s = state();
  s.body();
  s.ended[s.thread.x] = 1;
}

inline void run_block(unsigned threads) {
  static std::vector<char> stacks;
  State& s = state();
  stacks.resize(std::max(stacks.size(), kStack * threads));
  s.threads.resize(threads);
  s.ended.assign(threads, 0);
  for (unsigned i = 0; i < threads; ++i) {
    getcontext(&s.threads[i]);
    s.threads[i].uc_stack.ss_sp = stacks.data() + kStack * i;
    s.threads[i].uc_stack.ss_size = kStack;
    s.threads[i].uc_link = &s.scheduler;
    makecontext(&s.threads[i], run_thread, 0);
  }
  for (bool more = true; more;) {
    more = false;
    for (unsigned i = 0; i < threads; ++i) {
      if (s.ended[i]) continue;
      s.thread = {i, 0, 0};
      swapcontext(&s.scheduler, &s.threads[i]);
      more |= !s.ended[i];
    }
  }
}

// Two rounds: no thread reads the votes before all have voted, and none votes again before all have read.
inline int vote(int value) {
  State& s = state();
  if (s.thread.x == 0) s.votes = 0;
  barrier();
  s.votes |= value;
  barrier();
  const int all = s.votes;
  barrier();
  return all;
}

}  // namespace on_host

#undef __shared__
#undef __launch_bounds__
#define __shared__ static
#define __launch_bounds__(threads)
#define threadIdx (on_host::state().thread)
#define blockIdx (on_host::state().block)
#define gridDim (on_host::state().blocks)
#define __syncthreads() on_host::barrier()
#define __syncthreads_or(value) on_host::vote(value)

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
