// Plain C interface of the CPU kernels, reached from Python through ctypes.
#pragma once
#include <cstdint>

#define PARTOOL_ABI_VERSION 4
#define PARTOOL_BLOCK 65536  // elements whose squares are summed together, and the unit of work of a thread

enum partool_dtype : int32_t { PARTOOL_NONE = -1, PARTOOL_F32 = 0, PARTOOL_F64 = 1, PARTOOL_BF16 = 2, PARTOOL_F16 = 3 };
enum partool_kind : int32_t { PARTOOL_ADAMW = 0, PARTOOL_LION = 1, PARTOOL_ADAGRAD = 2, PARTOOL_SGD = 3 };
// Return values of functions: success, an invalid argument, out of memory.
enum partool_status : int32_t { PARTOOL_OK = 0, PARTOOL_INVALID = -1, PARTOOL_NO_MEMORY = -2 };

// One step's rule for a group of parameters.
struct partool_rule {
    double lr, beta1, beta2, eps, weight_decay, scale;
    int64_t step;  // counted from 1
    int32_t kind;
    int32_t unused;
};

// Contiguous arrays of `count` elements. A missing array is null and has the type PARTOOL_NONE.
struct partool_part {
    void* master;  // F32 or F64
    void* first;   // moments: of the master's type, or BF16
    void* second;
    const void* commit;  // gradients
    const void* step;
    void* weights;
    double* squares;  // one number per block, of the step's gradients; null if not wanted
    int32_t* finite;  // one per block
    int64_t count;
    int32_t master_type, first_type, second_type, commit_type, step_type, weights_type;
    int32_t group;
    int32_t unused;
};

// An array to be summed (`from`), or an array and its destination (`to`).
struct partool_span {
    void* to;
    const void* from;
    double* squares;
    int32_t* finite;
    int64_t count;
    int32_t to_type, from_type;
};

extern "C" {
int32_t partool_abi_version(void);
// The instruction set in use; all instruction sets that this machine supports, widest first, separated by commas.
const char* partool_isa(void);
const char* partool_isas(void);
// Select an instruction set; not while a pass runs. Returns PARTOOL_INVALID for a name that is not supported.
int32_t partool_set_isa(const char* name);

// Sum of squares of `count` contiguous elements, accumulated in double, and whether all of them are finite.
int32_t partool_finite_sum_squares(const void* data, int64_t count, int32_t dtype, double* sum, int32_t* finite);

// x + error, in chunks of `chunk` elements (a multiple of 8), becomes a sign bit per element and a scale per chunk: the
// root mean square if `squared`, else the mean magnitude. `error`, F32 or F64 like the scales, becomes what they lack.
int32_t partool_onebit_pack(const void* x, int32_t x_type, void* error, int32_t error_type, int64_t count, int64_t chunk,
                            int32_t squared, uint8_t* bits, void* scales);
// The mean of the senders' compressed arrays of `count` elements; each sender has `chunks` chunks.
int32_t partool_onebit_unpack(const uint8_t* bits, const void* scales, int32_t scale_type, int64_t senders,
                              int64_t chunks, int64_t chunk, int64_t count, void* out, int32_t out_type);

// `rows` rows of `columns` elements in 4 or 8 bits, as numbers. The float32 scales are one per 64 elements of a row,
// where the first lack `skipped` and the last may be fewer, or with 8 bits one per row. A row of 4-bit codes begins with
// a byte of its own.
int32_t partool_dequantise(const void* codes, int32_t bits, const float* scales, int64_t rows, int64_t columns,
                           int64_t skipped, void* out, int32_t out_type);

// Start threads, each pinned to one of `cores` unless `core_count` is 0. Returns null, errno in `error`, on failure.
void* partool_pool_open(int32_t threads, const int32_t* cores, int32_t core_count, int32_t* error);
void partool_pool_close(void* pool);

// Passes over all parts, in the calling thread if the pool is null. Each pass returns when all work is done.
// update: first commit, then step; a null rule is skipped. The step changes masters and moments only with `keep`;
// weights, where a part has them, receive the last result.
int32_t partool_update(void* pool, const partool_part* parts, int64_t count, const partool_rule* commit,
                       const partool_rule* step, int32_t groups, int32_t keep);
int32_t partool_sums(void* pool, const partool_span* spans, int64_t count);
// to = from, or to += from.
int32_t partool_convert(void* pool, const partool_span* spans, int64_t count);
int32_t partool_accumulate(void* pool, const partool_span* spans, int64_t count);
// Write zeros: the first touch of memory decides on which NUMA node it is placed.
int32_t partool_zero(void* pool, const partool_span* spans, int64_t count);
}
