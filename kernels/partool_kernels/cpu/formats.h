// How element types are read and written: with selects instead of branches, so that loops vectorise without intrinsics.
#pragma once
#include <cstdint>
#include <cstring>

namespace partool {
namespace {  // one copy per instruction set: of shared functions the linker would keep one build's only

inline uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

inline float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

struct F32 {
    using Stored = float;
    static float load(float x) { return x; }
    template <class Real>
    static float store(Real x) { return static_cast<float>(x); }
};

struct F64 {
    using Stored = double;
    static double load(double x) { return x; }
    template <class Real>
    static double store(Real x) { return static_cast<double>(x); }
};

// A double is narrowed by way of a float, as in torch.
struct BF16 {
    using Stored = uint16_t;
    static float load(uint16_t x) { return float_of(static_cast<uint32_t>(x) << 16); }
    template <class Real>
    static uint16_t store(Real x) {
        const uint32_t bits = bits_of(static_cast<float>(x));
        const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // to nearest, ties to even
        const uint32_t nan = (bits >> 16) | 0x40u;  // rounding could turn a NaN into an infinity
        return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
    }
};

struct F16 {
    using Stored = uint16_t;
    // The multiplication by 2^112 rebiases the exponent and is exact, also for subnormals.
    static float load(uint16_t x) {
        const uint32_t magnitude = static_cast<uint32_t>(x & 0x7fffu) << 13;
        const uint32_t finite = bits_of(float_of(magnitude) * float_of(0x77800000u));
        const uint32_t value = (x & 0x7c00u) == 0x7c00u ? magnitude | 0x7f800000u : finite;
        return float_of(value | static_cast<uint32_t>(x & 0x8000u) << 16);
    }
    // Rounds to nearest, ties to even. Subnormal results are rounded by adding 0.5, whose last bit is 2^-24.
    template <class Real>
    static uint16_t store(Real x) {
        const uint32_t bits = bits_of(static_cast<float>(x));
        const uint32_t magnitude = bits & 0x7fffffffu;
        const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
        const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
        const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
        const uint32_t finite = magnitude < (113u << 23) ? subnormal : normal;
        return static_cast<uint16_t>((magnitude >= (143u << 23) ? special : finite) | (bits >> 16 & 0x8000u));
    }
};

}  // namespace
}  // namespace partool
