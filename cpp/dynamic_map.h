// The maps of 8-bit codes (see zero_strategy/ops/dynamic_codes.py): constants in float64 by the same operations as there,
// rounded to float32 once. The same code for the CPU and for CUDA.
#pragma once

#include <cstdint>

namespace zs {

constexpr int64_t kCodeBlock = 256;  // elements that share a scale
constexpr int kDecades = 9;          // that of zero, seven of 2^F parts each, that of one

// By decade. A number is in the decade that is the count of the bounds below it.
struct DynamicMap {
  float slope[kDecades] = {}, start[kDecades] = {};  // value = number x slope + start
  float factor[kDecades] = {};                       // number = part x factor + width x 8/9, within [width, 2 width - 1]
  float width[kDecades] = {};                        // of a decade twice that of the one before
  float bound[kDecades - 1] = {};
  float value[256] = {};  // by code
};

constexpr float kShift = float(8.0 / 9.0);

constexpr DynamicMap dynamic_map(bool is_signed) {
  const double down[7] = {1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0};
  const double up[7] = {1e6, 1e5, 1e4, 1e3, 1e2, 1e1, 1.0};
  DynamicMap map;
  double width = is_signed ? 0.5 : 1.0;
  for (int decade = 0; decade < kDecades; ++decade, width *= 2) {
    map.width[decade] = float(width);
    if (decade == 0 || decade == kDecades - 1) continue;
    map.slope[decade] = float(down[decade - 1] * (0.9 / width));
    map.start[decade] = float(down[decade - 1] * (0.45 / width - 0.8));
    map.factor[decade] = float(width * up[decade - 1] / 0.9);
    if (decade < kDecades - 2) map.bound[decade] = float(down[decade - 1] * (1 + 0.9 / width));
  }
  map.start[kDecades - 1] = 1;
  // Nothing is below the first bound of the unsigned map: what is not zero is not rounded to it.
  map.bound[0] = is_signed ? float(down[0] * (0.1 + 0.45) / 2) : -1.0f;
  map.bound[kDecades - 2] = float(1 - 0.225 / (is_signed ? 64 : 128));
  for (int decade = 1; decade < kDecades; ++decade) {
    const int first = int(map.width[decade]), last = decade == kDecades - 1 ? first : 2 * first - 1;
    for (int number = first; number <= last; ++number) {
      const float value = float(double(number) * double(map.slope[decade]) + double(map.start[decade]));  // once rounded
      map.value[is_signed ? 256 - number : number - 1] = value;
      if (is_signed && number < 128) map.value[number] = -value;
    }
  }
  return map;
}

}  // namespace zs
