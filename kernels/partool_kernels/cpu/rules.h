// The arithmetic of one element. Every operation is rounded once and the order is fixed: all builds give the same bits.
#pragma once
#include <cmath>

#include "block.h"

namespace partool {
namespace {  // one copy per instruction set

template <class Real>
struct Numbers {
    explicit Numbers(const Step& s)
        : scale(static_cast<Real>(s.scale)), beta1(static_cast<Real>(s.beta1)), rest1(static_cast<Real>(s.rest1)),
          beta2(static_cast<Real>(s.beta2)), rest2(static_cast<Real>(s.rest2)),
          root_scale(static_cast<Real>(s.root_scale)), eps(static_cast<Real>(s.eps)),
          rate(static_cast<Real>(s.rate)), decay(static_cast<Real>(s.decay)) {}
    Real scale, beta1, rest1, beta2, rest2, root_scale, eps, rate, decay;
};

// Decay and step are added before they are subtracted from the weight, so that it is rounded once and not twice.
struct AdamW {
    static constexpr bool two = true;
    template <class Real>
    static void apply(Real& p, Real& m, Real& v, Real gradient, const Numbers<Real>& n) {
        const Real g = gradient * n.scale;
        m = m * n.beta1 + g * n.rest1;
        v = v * n.beta2 + (g * g) * n.rest2;
        p -= p * n.decay + (m / (std::sqrt(v) * n.root_scale + n.eps)) * n.rate;
    }
};

struct Lion {
    static constexpr bool two = false;
    template <class Real>
    static void apply(Real& p, Real& m, Real&, Real gradient, const Numbers<Real>& n) {
        const Real g = gradient * n.scale;
        const Real u = m * n.beta1 + g * n.rest1;
        const Real sign = u > 0 ? Real(1) : u < 0 ? Real(-1) : u;  // a NaN stays a NaN
        m = m * n.beta2 + g * n.rest2;
        p -= p * n.decay + sign * n.rate;
    }
};

struct Adagrad {
    static constexpr bool two = false;
    template <class Real>
    static void apply(Real& p, Real& sum, Real&, Real gradient, const Numbers<Real>& n) {
        const Real g = gradient * n.scale;
        sum += g * g;
        p -= p * n.decay + (g / (std::sqrt(sum) + n.eps)) * n.rate;
    }
};

struct Sgd {
    static constexpr bool two = false;
    template <class Real>
    static void apply(Real& p, Real& m, Real&, Real gradient, const Numbers<Real>& n) {
        m = m * n.beta1 + gradient * n.scale;
        p -= p * n.decay + m * n.rate;
    }
};

}  // namespace
}  // namespace partool
