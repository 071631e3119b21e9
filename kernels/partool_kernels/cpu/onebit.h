// Compression to signs and a scale per chunk, and back; see partool_kernels/onebit/op.py.
#pragma once
#include <cmath>

#include "formats.h"
#include "partool_cpu.h"

namespace partool {
namespace {  // one copy per instruction set

constexpr int64_t SIGN_LANES = 16;

// The magnitude that `count` values share: their mean magnitude or their root mean square. One order for every width.
template <class Real>
Real scale_of(const Real* values, int64_t count, bool squared) {
    double lane[SIGN_LANES] = {};
    int64_t i = 0;
    for (; i + SIGN_LANES <= count; i += SIGN_LANES)
        for (int64_t j = 0; j < SIGN_LANES; ++j) {
            const double value = values[i + j];
            lane[j] += squared ? value * value : std::fabs(value);
        }
    for (; i < count; ++i) {
        const double value = values[i];
        lane[i % SIGN_LANES] += squared ? value * value : std::fabs(value);
    }
    double total = 0.0;
    for (int64_t j = 0; j < SIGN_LANES; ++j) total += lane[j];
    total /= static_cast<double>(count);
    return static_cast<Real>(squared ? std::sqrt(total) : total);
}

template <class Format, class Real>
void pack_chunk(const typename Format::Stored* __restrict x, Real* __restrict error, int64_t count, bool squared,
                uint8_t* __restrict bits, Real* __restrict scale) {
    for (int64_t i = 0; i < count; ++i) error[i] += static_cast<Real>(Format::load(x[i]));
    const Real size = scale_of(error, count, squared);
    *scale = size;
    for (int64_t first = 0; first < count; first += 8) {
        const int64_t here = count - first < 8 ? count - first : 8;
        uint32_t byte = 0;
        for (int64_t j = 0; j < here; ++j) {
            const bool above = error[first + j] >= Real(0);
            byte |= static_cast<uint32_t>(above) << j;
            error[first + j] -= above ? size : -size;
        }
        bits[first / 8] = static_cast<uint8_t>(byte);
    }
}

template <class Format, class Real>
void pack_as(const void* x, Real* error, int64_t count, int64_t chunk, bool squared, uint8_t* bits, Real* scales) {
    const auto* values = static_cast<const typename Format::Stored*>(x);
    for (int64_t first = 0, number = 0; first < count; first += chunk, ++number) {
        const int64_t here = count - first < chunk ? count - first : chunk;
        for (int64_t byte = (here + 7) / 8; byte < chunk / 8; ++byte) bits[number * (chunk / 8) + byte] = 0;
        pack_chunk<Format>(values + first, error + first, here, squared, bits + number * (chunk / 8), scales + number);
    }
}

template <class Real>
void pack_real(const void* x, int32_t type, Real* error, int64_t count, int64_t chunk, bool squared, uint8_t* bits,
               Real* scales) {
    switch (type) {
        case PARTOOL_F32: return pack_as<F32>(x, error, count, chunk, squared, bits, scales);
        case PARTOOL_F64: return pack_as<F64>(x, error, count, chunk, squared, bits, scales);
        case PARTOOL_BF16: return pack_as<BF16>(x, error, count, chunk, squared, bits, scales);
        default: return pack_as<F16>(x, error, count, chunk, squared, bits, scales);
    }
}

// The mean over the senders, added in their order.
template <class Format, class Real>
void unpack_as(const uint8_t* bits, const Real* scales, int64_t senders, int64_t chunks, int64_t chunk, int64_t count,
               void* out) {
    auto* means = static_cast<typename Format::Stored*>(out);
    const Real share = static_cast<Real>(senders);
    for (int64_t number = 0; number < chunks; ++number) {
        const int64_t first = number * chunk, here = count - first < chunk ? count - first : chunk;
        for (int64_t at = 0; at < here; at += 8) {
            Real total[8] = {};
            for (int64_t sender = 0; sender < senders; ++sender) {
                const int64_t row = sender * chunks + number;
                const uint32_t byte = bits[row * (chunk / 8) + at / 8];
                const Real scale = scales[row];
                for (int64_t j = 0; j < 8; ++j) total[j] += (byte >> j & 1u) ? scale : -scale;
            }
            const int64_t some = here - at < 8 ? here - at : 8;
            for (int64_t j = 0; j < some; ++j) means[first + at + j] = Format::store(total[j] / share);
        }
    }
}

template <class Real>
void unpack_real(const uint8_t* bits, const Real* scales, int64_t senders, int64_t chunks, int64_t chunk, int64_t count,
                 void* out, int32_t type) {
    switch (type) {
        case PARTOOL_F32: return unpack_as<F32>(bits, scales, senders, chunks, chunk, count, out);
        case PARTOOL_F64: return unpack_as<F64>(bits, scales, senders, chunks, chunk, count, out);
        case PARTOOL_BF16: return unpack_as<BF16>(bits, scales, senders, chunks, chunk, count, out);
        default: return unpack_as<F16>(bits, scales, senders, chunks, chunk, count, out);
    }
}

}  // namespace
}  // namespace partool
