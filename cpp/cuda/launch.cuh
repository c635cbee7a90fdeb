// The one place where kernels are launched.
#pragma once

#include <cuda_runtime.h>

#include <utility>

namespace zs {

template <class Kernel, class... Arguments>
cudaError_t launch(Kernel* kernel, dim3 blocks, unsigned threads, cudaStream_t stream, const Arguments&... arguments) {
  kernel<<<blocks, threads, 0, stream>>>(arguments...);
  return cudaGetLastError();
}

}  // namespace zs
