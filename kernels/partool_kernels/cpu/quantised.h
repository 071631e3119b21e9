// Matrices in 4 or 8 bits, as numbers again; see partool_kernels/quantised/codes.py.
#pragma once
#include "formats.h"
#include "partool_cpu.h"

namespace partool {
namespace {  // one copy per instruction set

constexpr int64_t NF4_BLOCK = 64;  // elements of a row that share a scale
constexpr float INT8_STEP = 7.874015718698502e-3f;  // 1 / 127
// The numbers of the 16 codes (Dettmers et al., arXiv 2305.14314, appendix E).
constexpr float NF4[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
    -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
    0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};

// The elements of a row from `first` to `stop`, which share a scale; the first of two is in a byte's higher bits.
template <class Format>
void nf4_block(const uint8_t* __restrict codes, float scale, int64_t first, int64_t stop,
               typename Format::Stored* __restrict out) {
    typename Format::Stored numbers[16];
    for (int64_t i = 0; i < 16; ++i) numbers[i] = Format::store(NF4[i] * scale);
    if (first % 2 && first < stop) out[first] = numbers[codes[first / 2] & 15], ++first;
    const int64_t pairs = (stop - first) / 2;
    const uint8_t* __restrict pair = codes + first / 2;
    for (int64_t i = 0; i < pairs; ++i) {
        out[first + 2 * i] = numbers[pair[i] >> 4];
        out[first + 2 * i + 1] = numbers[pair[i] & 15];
    }
    if (first + 2 * pairs < stop) out[stop - 1] = numbers[pair[pairs] >> 4];
}

template <class Format>
void nf4_rows(const uint8_t* codes, const float* scales, int64_t rows, int64_t columns, int64_t skipped, void* out) {
    auto* numbers = static_cast<typename Format::Stored*>(out);
    const int64_t row_bytes = (columns + 1) / 2, blocks = (skipped + columns + NF4_BLOCK - 1) / NF4_BLOCK;
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t block = 0; block < blocks; ++block) {
            const int64_t begin = block * NF4_BLOCK - skipped, end = begin + NF4_BLOCK;
            nf4_block<Format>(codes + row * row_bytes, scales[row * blocks + block], begin < 0 ? 0 : begin,
                              end < columns ? end : columns, numbers + row * columns);
        }
}

template <class Format>
void int8_rows(const int8_t* __restrict codes, const float* __restrict scales, int64_t rows, int64_t columns, void* out) {
    auto* __restrict numbers = static_cast<typename Format::Stored*>(out);
    for (int64_t row = 0; row < rows; ++row) {
        const float scale = scales[row];
        for (int64_t i = row * columns; i < (row + 1) * columns; ++i)
            numbers[i] = Format::store(static_cast<float>(codes[i]) * scale * INT8_STEP);
    }
}

template <class Format>
void dequantise_as(const void* codes, int32_t bits, const float* scales, int64_t rows, int64_t columns,
                   int64_t skipped, void* out) {
    if (bits == 4) return nf4_rows<Format>(static_cast<const uint8_t*>(codes), scales, rows, columns, skipped, out);
    int8_rows<Format>(static_cast<const int8_t*>(codes), scales, rows, columns, out);
}

}  // namespace
}  // namespace partool
