// Sum of squares in one order for every vector width up to 1,024 bits.
#pragma once
#include <cmath>
#include <limits>

#include "formats.h"
#include "partool_cpu.h"

namespace partool {
namespace {  // one copy per instruction set

constexpr int64_t LANES = 16;

template <class Format>
void add_squares(double* __restrict lanes, const typename Format::Stored* __restrict x, int64_t count) {
    double lane[LANES];
    for (int64_t j = 0; j < LANES; ++j) lane[j] = lanes[j];
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int64_t j = 0; j < LANES; ++j) {
            const double value = Format::load(x[i + j]);
            lane[j] += value * value;
        }
    for (; i < count; ++i) {
        const double value = Format::load(x[i]);
        lane[i % LANES] += value * value;
    }
    for (int64_t j = 0; j < LANES; ++j) lanes[j] = lane[j];
}

class Squares {
   public:
    // All calls except the last take a multiple of LANES elements.
    void add(const void* x, int64_t count, int32_t type) {
        switch (type) {
            case PARTOOL_F32: return add_squares<F32>(lanes_, static_cast<const float*>(x), count);
            case PARTOOL_F64: return add_squares<F64>(lanes_, static_cast<const double*>(x), count);
            case PARTOOL_BF16: return add_squares<BF16>(lanes_, static_cast<const uint16_t*>(x), count);
            default: return add_squares<F16>(lanes_, static_cast<const uint16_t*>(x), count);
        }
    }

    // `count` elements at `x` were added; they are checked one by one only if squares of doubles may have overflowed.
    void write(const void* x, int64_t count, int32_t type, double* sum, int32_t* finite) const {
        double total = 0.0;
        for (int64_t j = 0; j < LANES; ++j) total += lanes_[j];
        *sum = total;
        *finite = is_finite(total);
        if (*finite || type != PARTOOL_F64) return;
        const auto* wide = static_cast<const double*>(x);
        int64_t bad = 0;
        for (int64_t i = 0; i < count; ++i) bad += !is_finite(wide[i]);
        *finite = bad == 0;
    }

   private:
    static bool is_finite(double x) { return std::fabs(x) <= std::numeric_limits<double>::max(); }

    double lanes_[LANES] = {};
};

}  // namespace
}  // namespace partool
