// One pass over a gradient: its sum of squares and whether it is finite. Compiled once per instruction set (PARTOOL_ISA).
#include <cmath>
#include <cstring>
#include <limits>

#include "partool_cpu.h"

#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)

namespace {

constexpr int64_t LANES = 16;  // one order of summation for every vector width up to 1,024 bits

struct F32 {
    using Stored = float;
    static double load(float x) { return x; }
};

struct F64 {
    using Stored = double;
    static double load(double x) { return x; }
};

struct BF16 {
    using Stored = uint16_t;
    static double load(uint16_t x) {
        const uint32_t bits = static_cast<uint32_t>(x) << 16;
        float value;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    }
};

struct F16 {
    using Stored = uint16_t;
    // IEEE half to float by integer shifts; the multiplication by 2^112 rebiases the exponent and is exact, subnormals included.
    static double load(uint16_t x) {
        const uint32_t magnitude = static_cast<uint32_t>(x & 0x7fffu) << 13;
        const uint32_t scale_bits = 0x77800000u;  // 2^112
        float value, scale;
        std::memcpy(&value, &magnitude, sizeof value);
        std::memcpy(&scale, &scale_bits, sizeof scale);
        const double finite = static_cast<double>(value) * scale;
        return (x & 0x7c00u) == 0x7c00u ? std::numeric_limits<double>::infinity() : finite;
    }
};

template <class Format>
void reduce(const void* data, int64_t count, double* sum, int32_t* finite) {
    const auto* x = static_cast<const typename Format::Stored*>(data);
    double lane[LANES] = {};
    int64_t bad[LANES] = {};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int64_t j = 0; j < LANES; ++j) {
            const double value = Format::load(x[i + j]);
            lane[j] += value * value;
            bad[j] |= !(std::fabs(value) <= std::numeric_limits<double>::max());
        }
    for (; i < count; ++i) {
        const double value = Format::load(x[i]);
        lane[i % LANES] += value * value;
        bad[i % LANES] |= !(std::fabs(value) <= std::numeric_limits<double>::max());
    }
    double total = 0.0;
    int64_t any_bad = 0;
    for (int64_t j = 0; j < LANES; ++j) {
        total += lane[j];
        any_bad |= bad[j];
    }
    *sum = total;
    *finite = any_bad == 0;
}

}  // namespace

extern "C" int PASTE(partool_finite_sum_squares_, PARTOOL_ISA)(const void* data, int64_t count, int32_t dtype, double* sum,
                                                              int32_t* finite) {
    switch (dtype) {
        case PARTOOL_F32: reduce<F32>(data, count, sum, finite); return 0;
        case PARTOOL_F64: reduce<F64>(data, count, sum, finite); return 0;
        case PARTOOL_BF16: reduce<BF16>(data, count, sum, finite); return 0;
        case PARTOOL_F16: reduce<F16>(data, count, sum, finite); return 0;
        default: return -1;
    }
}
