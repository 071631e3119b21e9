// Picks the widest build that this processor runs. Every build returns the same bits: lanes and order of summation are
// fixed in the source and contraction into FMA is off.
#include "partool_cpu.h"

#define DECLARE(isa) \
    extern "C" int partool_finite_sum_squares_##isa(const void*, int64_t, int32_t, double*, int32_t*);
DECLARE(baseline)
#ifdef PARTOOL_X86
DECLARE(avx2)
DECLARE(avx512)
#endif

extern "C" const char* partool_isa(void) {
#ifdef PARTOOL_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq")) return "avx512";
    if (__builtin_cpu_supports("avx2")) return "avx2";
#endif
    return "baseline";
}

extern "C" int32_t partool_abi_version(void) { return PARTOOL_ABI_VERSION; }

extern "C" int partool_finite_sum_squares(const void* data, int64_t count, int32_t dtype, double* sum, int32_t* finite) {
#ifdef PARTOOL_X86
    static const char isa = partool_isa()[3];  // "avx512" and "avx2" differ in their fourth letter, "baseline" has 'e'
    if (isa == '5') return partool_finite_sum_squares_avx512(data, count, dtype, sum, finite);
    if (isa == '2') return partool_finite_sum_squares_avx2(data, count, dtype, sum, finite);
#endif
    return partool_finite_sum_squares_baseline(data, count, dtype, sum, finite);
}
