#if defined(__clang__)
#if ZS_TARGET_LEVEL != 0
#pragma clang attribute pop
#endif
#elif defined(__GNUC__)
#pragma GCC pop_options
#endif
