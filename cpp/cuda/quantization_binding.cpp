// The CUDA kernels of block quantisation, as binding.cpp for the others.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "layers.h"
#include "tensors.cuh"

namespace zs {
namespace {

using torch::headeronly::ScalarType;

int64_t blocks_of(int64_t numel, int64_t block) { return (numel + block - 1) / block; }

// Sources that the kernel reads or writes, checked against the number of elements.
class Sources {
 public:
  Sources(const OnDevice& device, const Tensors& codes, const Tensors& scales, int64_t numel, int64_t block) {
    STD_TORCH_CHECK(!codes.empty() && codes.size() == scales.size(), "expected as many scales as codes");
    const bool packed = codes[0].scalar_type() == ScalarType::Byte;
    STD_TORCH_CHECK(numel >= 0 && block > 0 && !(packed && block % 2), "expected positive sizes; even ones for int4");
    for (size_t i = 0; i < codes.size(); ++i) {
      STD_TORCH_CHECK(codes[i].scalar_type() == (packed ? ScalarType::Byte : ScalarType::Char) &&
                          device.holds(codes[i]) && codes[i].numel() == (packed ? (numel + 1) / 2 : numel),
                      "expected contiguous codes for ", numel, " elements on the device, all int8 or all uint8");
      const Buffer kept = device.buffer_of(scales[i], blocks_of(numel, block));
      items.push_back({const_cast<void*>(codes[i].const_data_ptr()), kept});
    }
    blocks.numel = numel;
    blocks.block = block;
    blocks.packed = packed;
  }

  std::vector<Quantized> items;
  Blocks blocks;
};

std::tuple<Tensor, Tensor> quantize_blocks(Tensor input, int64_t bits, int64_t block_size, ScalarType scale_dtype) {
  STD_TORCH_CHECK((bits == 4 || bits == 8) && block_size > 0, "expected 4 or 8 bits and a positive block size");
  const OnDevice device(input);
  const int64_t numel = input.numel();
  const bool packed = bits == 4;
  Tensor codes = torch::stable::new_empty(input, {packed ? (numel + 1) / 2 : numel},
                                          packed ? ScalarType::Byte : ScalarType::Char);
  Tensor scales = torch::stable::new_empty(input, {blocks_of(numel, block_size)}, scale_dtype);
  Sources target(device, {codes}, {scales}, numel, block_size);
  target.blocks.values = device.buffer_of(input, numel);
  STD_CUDA_CHECK(quantize(target.blocks, target.items[0], device.stream));
  return {codes, scales};
}

Tensor dequantize_all(const Tensors& codes, const Tensors& scales, int64_t numel, int64_t block_size,
                      ScalarType dtype) {
  STD_TORCH_CHECK(!codes.empty(), "expected at least one tensor");
  const OnDevice device(codes[0]);
  Sources sources(device, codes, scales, numel, block_size);
  Tensor result = torch::stable::new_empty(codes[0], {numel}, dtype);
  sources.blocks.values = device.buffer_of(result, numel);
  STD_CUDA_CHECK(dequantize(sources.blocks, sources.items.data(), int64_t(sources.items.size()), device.stream));
  return result;
}

Tensor dequantize_blocks(Tensor codes, Tensor scales, int64_t numel, int64_t block_size, ScalarType dtype) {
  return dequantize_all({codes}, {scales}, numel, block_size, dtype);
}

Tensor dequantize_reduce(Tensors codes, Tensors scales, int64_t numel, int64_t block_size) {
  return dequantize_all(codes, scales, numel, block_size, ScalarType::Float);
}

}  // namespace
}  // namespace zs

STABLE_TORCH_LIBRARY_IMPL(zero_strategy, CUDA, library) {
  library.impl("quantize_blocks", TORCH_BOX(&zs::quantize_blocks));
  library.impl("dequantize_blocks", TORCH_BOX(&zs::dequantize_blocks));
  library.impl("dequantize_reduce", TORCH_BOX(&zs::dequantize_reduce));
}
