// Between this file and target_end.h everything is compiled for ZS_TARGET. Only our own functions may stand there: an
// inline function of the standard library would be compiled for the target too, and the linker could pick that copy for
// the whole program.
#if defined(__clang__)
#define ZS_PRAGMA(text) _Pragma(#text)
#define ZS_PUSH(features) ZS_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#if ZS_TARGET_LEVEL == 512
ZS_PUSH("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-256-bit")
#elif ZS_TARGET_LEVEL == 2
ZS_PUSH("avx2,fma")
#endif
#elif defined(__GNUC__)
#pragma GCC push_options
#if ZS_TARGET_LEVEL == 512
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512")
#elif ZS_TARGET_LEVEL == 2
#pragma GCC target("avx2,fma")
#endif
#endif
