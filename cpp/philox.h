// Philox4x32-10 (Salmon, Moraes, Dror and Shaw 2011): 128 random bits as a function of a counter and a key, the same on
// every device and for every order of evaluation. For the CPU and for CUDA; includes nothing, so that a kernel file can
// include it inside of its own namespace.
//
// Element i of a tensor takes word i % 4 of the block with counter (i / 4, offset), low words first, and key `seed`.

#if defined(__CUDACC__)
#define ZS_EVERYWHERE __host__ __device__
#else
#define ZS_EVERYWHERE
#endif

ZS_EVERYWHERE inline void philox_round(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, uint32_t& k, uint32_t& l) {
  const uint64_t first = uint64_t(0xD2511F53u) * a, second = uint64_t(0xCD9E8D57u) * c;
  a = uint32_t(second >> 32) ^ b ^ k;
  b = uint32_t(second);
  c = uint32_t(first >> 32) ^ d ^ l;
  d = uint32_t(first);
  k += 0x9E3779B9u;
  l += 0xBB67AE85u;
}

// The counter (a, b, c, d) becomes its four random words. Written out ten times: a loop inside of the caller's loop
// would keep that one from being vectorised.
ZS_EVERYWHERE inline void philox(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, uint64_t seed) {
  uint32_t k = uint32_t(seed), l = uint32_t(seed >> 32);
  philox_round(a, b, c, d, k, l);
  philox_round(a, b, c, d, k, l);
  philox_round(a, b, c, d, k, l);
  philox_round(a, b, c, d, k, l);
  philox_round(a, b, c, d, k, l);
  philox_round(a, b, c, d, k, l);
  philox_round(a, b, c, d, k, l);
  philox_round(a, b, c, d, k, l);
  philox_round(a, b, c, d, k, l);
  philox_round(a, b, c, d, k, l);
}

// An element is dropped if its random word is below this.
ZS_EVERYWHERE inline uint32_t drop_threshold(double probability) {
  const double words = probability * 4294967296.0 + 0.5;
  return words >= 4294967295.0 ? 0xffffffffu : uint32_t(words);
}

// What the elements that stay are multiplied by.
ZS_EVERYWHERE inline float keep_scale(double probability) { return probability >= 1 ? 0.0f : float(1 / (1 - probability)); }
