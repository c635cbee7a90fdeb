// What the CUDA library asks of a device, answered by a machine without one.
#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

extern "C" {

cudaError_t cudaSetDevice(int) { return cudaSuccess; }

AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = nullptr;
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_create_device_guard(int32_t, DeviceGuardHandle* guard) {
  *guard = nullptr;
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_delete_device_guard(DeviceGuardHandle) { return AOTI_TORCH_SUCCESS; }

AOTITorchError torch_c10_cuda_check_msg(int32_t, const char*, const char*, uint32_t, bool, char** message) {
  *message = nullptr;
  return AOTI_TORCH_SUCCESS;
}

void torch_c10_cuda_free_error_msg(char*) {}

}  // extern "C"
