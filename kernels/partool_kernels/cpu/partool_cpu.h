// Plain C interface of the CPU kernels, reached from Python through ctypes.
#pragma once
#include <cstdint>

#define PARTOOL_ABI_VERSION 1

enum partool_dtype : int32_t { PARTOOL_F32 = 0, PARTOOL_F64 = 1, PARTOOL_BF16 = 2, PARTOOL_F16 = 3 };

extern "C" {
const char* partool_isa(void);
int32_t partool_abi_version(void);
// Sum of squares of `count` contiguous elements, accumulated in double, and whether all of them are finite.
// Returns 0, or -1 for an unknown dtype.
int partool_finite_sum_squares(const void* data, int64_t count, int32_t dtype, double* sum, int32_t* finite);
}
