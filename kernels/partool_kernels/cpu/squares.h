// Sum of squares in one order for every vector width up to 1,024 bits.
#pragma once
#include <cmath>
#include <limits>

#include "formats.h"
#include "partool_cpu.h"

namespace partool {
namespace {  // one copy per instruction set

constexpr int64_t LANES = 16;

class Squares {
   public:
    // All calls but the last one take a multiple of LANES elements.
    template <class Format>
    void add(const typename Format::Stored* __restrict x, int64_t count) {
        int64_t i = 0;
        for (; i + LANES <= count; i += LANES)
            for (int64_t j = 0; j < LANES; ++j) {
                const double value = Format::load(x[i + j]);
                lane_[j] += value * value;
                bad_[j] |= !(std::fabs(value) <= std::numeric_limits<double>::max());
            }
        for (; i < count; ++i) {
            const double value = Format::load(x[i]);
            lane_[i % LANES] += value * value;
            bad_[i % LANES] |= !(std::fabs(value) <= std::numeric_limits<double>::max());
        }
    }

    void add(const void* x, int64_t count, int32_t type) {
        switch (type) {
            case PARTOOL_F32: return add<F32>(static_cast<const float*>(x), count);
            case PARTOOL_F64: return add<F64>(static_cast<const double*>(x), count);
            case PARTOOL_BF16: return add<BF16>(static_cast<const uint16_t*>(x), count);
            default: return add<F16>(static_cast<const uint16_t*>(x), count);
        }
    }

    void write(double* sum, int32_t* finite) const {
        double total = 0.0;
        int64_t any_bad = 0;
        for (int64_t j = 0; j < LANES; ++j) {
            total += lane_[j];
            any_bad |= bad_[j];
        }
        *sum = total;
        *finite = any_bad == 0;
    }

   private:
    double lane_[LANES] = {};
    int64_t bad_[LANES] = {};
};

}  // namespace
}  // namespace partool
