// Stores that go past the caches, for long streams that are only written: an ordinary store reads its line first.

#if defined(__x86_64__)
#if ZS_TARGET_LEVEL == 512
typedef long long StreamWord __attribute__((vector_size(64)));
#define ZS_GCC_STREAM __builtin_ia32_movntdq512
#elif ZS_TARGET_LEVEL == 2
typedef long long StreamWord __attribute__((vector_size(32)));
#define ZS_GCC_STREAM __builtin_ia32_movntdq256
#else
typedef long long StreamWord __attribute__((vector_size(16)));
#define ZS_GCC_STREAM __builtin_ia32_movntdq
#endif

constexpr size_t kLine = 64;  // bytes; a line is written whole, or by ordinary stores

inline void stream_bytes(const char* from, char* to, size_t bytes) {
  const size_t past = size_t(reinterpret_cast<uintptr_t>(to) % kLine);
  const size_t head = past == 0 ? 0 : kLine - past;
  if (head + kLine > bytes) {
    std::memcpy(to, from, bytes);
    return;
  }
  std::memcpy(to, from, head);
  size_t at = head;
  for (; at + kLine <= bytes; at += kLine) {
    for (size_t word = at; word < at + kLine; word += sizeof(StreamWord)) {
      StreamWord value;
      std::memcpy(&value, from + word, sizeof value);
      StreamWord* place = reinterpret_cast<StreamWord*>(to + word);
#if defined(__clang__)
      __builtin_nontemporal_store(value, place);
#else
      ZS_GCC_STREAM(place, value);
#endif
    }
  }
  std::memcpy(to + at, from + at, bytes - at);
}

#undef ZS_GCC_STREAM

// Before another thread may read what was streamed.
inline void end_of_stream() { __builtin_ia32_sfence(); }
#else
inline void stream_bytes(const char* from, char* to, size_t bytes) { std::memcpy(to, from, bytes); }
inline void end_of_stream() {}
#endif

// An update works on so few elements at once that converting one tile overlaps with loading the next, which was asked for
// some tiles before.
constexpr int64_t kUpdateTile = 64, kAhead = 4 * kUpdateTile;

// As `copy_out`, of at most kUpdateTile elements.
inline void stream_out(const float* tile, const Buffer& copy, int64_t offset, int64_t n) {
  if (copy.type == Type::f32) {
    stream_bytes(reinterpret_cast<const char*>(tile), static_cast<char*>(copy.data) + offset * 4, size_t(n) * 4);
    return;
  }
  alignas(64) uint16_t halves[kUpdateTile];
  if (copy.type == Type::bf16 && n == kUpdateTile) {
    for (int64_t i = 0; i < kUpdateTile; ++i) halves[i] = to_bf16(tile[i]);
  } else {
    narrow(tile, {halves, copy.type}, 0, n);
  }
  stream_bytes(reinterpret_cast<const char*>(halves), static_cast<char*>(copy.data) + offset * 2, size_t(n) * 2);
}
