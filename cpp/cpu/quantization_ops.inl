#include "quantization_ops.h"

#include "parallel.h"

namespace zs {
namespace {

// Sources that the kernel reads or writes, checked against the number of elements.
class Sources {
 public:
  Sources(const Tensors& codes, const Tensors& scales, int64_t numel, int64_t block) {
    STD_TORCH_CHECK(!codes.empty() && codes.size() == scales.size(), "expected as many scales as codes");
    const bool packed = codes[0].scalar_type() == ScalarType::Byte;
    STD_TORCH_CHECK(numel >= 0 && block > 0 && !(packed && block % 2), "expected positive sizes; even ones for int4");
    const int64_t blocks = (numel + block - 1) / block;
    for (size_t i = 0; i < codes.size(); ++i) {
      STD_TORCH_CHECK(codes[i].scalar_type() == (packed ? ScalarType::Byte : ScalarType::Char) && codes[i].is_cpu() &&
                          codes[i].is_contiguous() && codes[i].numel() == (packed ? (numel + 1) / 2 : numel),
                      "expected contiguous codes for ", numel, " elements on the CPU, all int8 or all uint8");
      codes_.push_back(const_cast<void*>(codes[i].const_data_ptr()));
      scales_.push_back(buffer_of(scales[i], blocks));
    }
    work_.codes = codes_.data();
    work_.scales = scales_.data();
    work_.sources = int64_t(codes.size());
    work_.numel = numel;
    work_.block = block;
    work_.packed = packed;
  }

  void run(BlockKernel kernel, const Buffer& values) {
    work_.values = values;
    const int64_t blocks = (work_.numel + work_.block - 1) / work_.block;
    const int64_t grain = std::max<int64_t>(1, kChunk / work_.block);
    torch::stable::parallel_for(0, blocks, grain, [&](int64_t begin, int64_t end) { kernel(work_, begin, end); });
  }

 private:
  std::vector<void*> codes_;
  std::vector<Buffer> scales_;
  Blocks work_;
};

}  // namespace

std::tuple<Tensor, Tensor> quantize_blocks(Tensor input, int64_t bits, int64_t block_size, ScalarType scale_dtype) {
  STD_TORCH_CHECK((bits == 4 || bits == 8) && block_size > 0, "expected 4 or 8 bits and a positive block size");
  const int64_t numel = input.numel(), blocks = (numel + block_size - 1) / block_size;
  const bool packed = bits == 4;
  Tensor codes = torch::stable::new_empty(input, {packed ? (numel + 1) / 2 : numel},
                                          packed ? ScalarType::Byte : ScalarType::Char);
  Tensor scales = torch::stable::new_empty(input, {blocks}, scale_dtype);
  Sources({codes}, {scales}, numel, block_size).run(kernels().quantize, buffer_of(input, numel));
  return {codes, scales};
}

Tensor dequantize_blocks(Tensor codes, Tensor scales, int64_t numel, int64_t block_size, ScalarType dtype) {
  Tensor result = torch::stable::new_empty(codes, {numel}, dtype);
  Sources({codes}, {scales}, numel, block_size).run(kernels().dequantize, buffer_of(result, numel));
  return result;
}

Tensor dequantize_reduce(Tensors codes, Tensors scales, int64_t numel, int64_t block_size) {
  Sources sources(codes, scales, numel, block_size);
  Tensor result = torch::stable::new_empty(codes[0], {numel}, ScalarType::Float);
  sources.run(kernels().dequantize, buffer_of(result, numel));
  return result;
}

}  // namespace zs
