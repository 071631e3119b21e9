// Interface of each build of the kernels: work on one block, by one thread.
#pragma once
#include "partool_cpu.h"

namespace partool {

// A rule's coefficients, computed once per pass.
struct Step {
    int32_t kind;
    double scale;
    double beta1, rest1, beta2, rest2;  // rest = 1 - beta
    double root_scale;                  // 1 / sqrt(1 - beta2^step)
    double eps;
    double rate;   // factor of the quotient, the sign or the moment
    double decay;  // learning rate times weight decay
};

struct Builds {
    // Processes elements first .. first + count of the part; null steps are skipped. Sums go to the block's entries.
    void (*update)(const partool_part& part, int64_t first, int64_t count, const Step* commit, const Step* step, bool keep);
    void (*sums)(const void* from, int64_t count, int32_t type, double* sum, int32_t* finite);
    void (*convert)(void* to, int32_t to_type, const void* from, int32_t from_type, int64_t count);
    void (*accumulate)(void* to, int32_t to_type, const void* from, int32_t from_type, int64_t count);
    void (*pack)(const void* x, int32_t x_type, void* error, int32_t error_type, int64_t count, int64_t chunk,
                 bool squared, uint8_t* bits, void* scales);
    void (*unpack)(const uint8_t* bits, const void* scales, int32_t scale_type, int64_t senders, int64_t chunks,
                   int64_t chunk, int64_t count, void* out, int32_t out_type);
    void (*dequantise)(const void* codes, int32_t bits, const float* scales, int64_t rows, int64_t columns,
                       int64_t skipped, void* out, int32_t out_type);
};

static inline int64_t size_of(int32_t type) { return type == PARTOOL_F64 ? 8 : type == PARTOOL_F32 ? 4 : 2; }

const Builds& builds();  // the builds in use

}  // namespace partool
