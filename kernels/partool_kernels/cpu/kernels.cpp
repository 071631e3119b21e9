// Work on one block. Compiled once per instruction set (PARTOOL_ISA).
#include "block.h"
#include "formats.h"
#include "onebit.h"
#include "quantised.h"
#include "rules.h"
#include "squares.h"

// Tells the compiler that the arrays do not overlap, which it cannot prove for so many arrays.
#ifdef __clang__
#define ARRAYS_ARE_APART _Pragma("clang loop vectorize(assume_safety)")
#else
#define ARRAYS_ARE_APART _Pragma("GCC ivdep")
#endif
#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)

namespace partool {
namespace {

constexpr int64_t STRETCH = 64, AHEAD = 512, LINE_BYTES = 64;
constexpr int64_t TILE = 512;  // elements; they stay in the L1 cache while types are converted around the step

template <class To, class From>
void convert(typename To::Stored* __restrict to, const typename From::Stored* __restrict from, int64_t count) {
    for (int64_t i = 0; i < count; ++i) to[i] = To::store(From::load(from[i]));
}

// The sum is computed in the wider of the two types; bfloat16 and float16 are summed in float.
template <class To, class From>
void accumulate(typename To::Stored* __restrict to, const typename From::Stored* __restrict from, int64_t count) {
    for (int64_t i = 0; i < count; ++i) to[i] = To::store(To::load(to[i]) + From::load(from[i]));
}

#define PAIR(function, To, From) \
    return function<To, From>(static_cast<To::Stored*>(to), static_cast<const From::Stored*>(from), count)
#define BY_SOURCE(function, To)                             \
    switch (from_type) {                                    \
        case PARTOOL_F32: PAIR(function, To, F32);          \
        case PARTOOL_F64: PAIR(function, To, F64);          \
        case PARTOOL_BF16: PAIR(function, To, BF16);        \
        default: PAIR(function, To, F16);                   \
    }
#define BY_TYPES(function)                                  \
    switch (to_type) {                                      \
        case PARTOOL_F32: BY_SOURCE(function, F32)          \
        case PARTOOL_F64: BY_SOURCE(function, F64)          \
        case PARTOOL_BF16: BY_SOURCE(function, BF16)        \
        default: BY_SOURCE(function, F16)                   \
    }

void convert_any(void* to, int32_t to_type, const void* from, int32_t from_type, int64_t count) { BY_TYPES(convert) }

void accumulate_any(void* to, int32_t to_type, const void* from, int32_t from_type, int64_t count) {
    BY_TYPES(accumulate)
}

void sums(const void* from, int64_t count, int32_t type, double* sum, int32_t* finite) {
    Squares squares;
    squares.add(from, count, type);
    squares.write(from, count, type, sum, finite);
}

// Prefetches memory of the next tiles: divisions and square roots last longer than processors look ahead.
class Ahead {
   public:
    Ahead(const partool_part& part, int64_t first, bool commits, bool steps) {
        add(part.master, part.master_type, first);
        add(part.first, part.first_type, first);
        add(part.second, part.second_type, first);
        if (commits) add(part.commit, part.commit_type, first);
        if (steps) add(part.step, part.step_type, first);
        add(part.weights, part.weights_type, first);
    }
    // Prefetches STRETCH elements of every array, AHEAD elements after element `first` of this tile.
    void fetch(int64_t first) const {
        for (int i = 0; i < count_; ++i)
            for (int64_t at = first * size_[i]; at < (first + STRETCH) * size_[i]; at += LINE_BYTES)
                __builtin_prefetch(data_[i] + at, 1);
    }

   private:
    void add(const void* data, int32_t type, int64_t first) {
        if (data == nullptr) return;
        size_[count_] = size_of(type);
        data_[count_++] = static_cast<const char*>(data) + (first + AHEAD) * size_of(type);
    }

    const char* data_[6];
    int64_t size_[6];
    int count_ = 0;
};

template <class Real>
struct Arrays {
    const Ahead& ahead;
    Real* p;
    Real* m;
    Real* v;
    const Real* commit;
    const Real* step;
    Real* out;  // the weights after the step; null if they are written to p
    int64_t count;
};

template <class Rule, class Real, bool COMMIT, bool STEP, bool KEEP>
void stretch(const Arrays<Real>& a, const Numbers<Real>& before, const Numbers<Real>& now, int64_t first, int64_t end) {
    Real* p = a.p;
    Real* m = a.m;
    Real* v = a.v;
    const Real* commit = a.commit;
    const Real* step = a.step;
    Real* out = a.out;
    const Numbers<Real> c = before, s = now;
    ARRAYS_ARE_APART
    for (int64_t i = first; i < end; ++i) {
        Real weight = p[i], first = m[i], second = Rule::two ? v[i] : Real(0);
        if (COMMIT) Rule::apply(weight, first, second, commit[i], c);
        if (STEP && KEEP) Rule::apply(weight, first, second, step[i], s);
        if (COMMIT || KEEP) {
            p[i] = weight;
            m[i] = first;
            if (Rule::two) v[i] = second;
        }
        if (STEP && !KEEP) {
            Rule::apply(weight, first, second, step[i], s);
            out[i] = weight;
        }
    }
}

template <class Rule, class Real, bool COMMIT, bool STEP, bool KEEP>
void loop(const Arrays<Real>& a, const Numbers<Real>& before, const Numbers<Real>& now) {
    int64_t first = 0;
    for (; first + STRETCH <= a.count; first += STRETCH) {
        a.ahead.fetch(first);
        stretch<Rule, Real, COMMIT, STEP, KEEP>(a, before, now, first, first + STRETCH);
    }
    if (first < a.count) stretch<Rule, Real, COMMIT, STEP, KEEP>(a, before, now, first, a.count);
}

template <class Rule, class Real>
void apply(const Arrays<Real>& a, const Step* commit, const Step* step, bool keep) {
    const Numbers<Real> c(commit ? *commit : *step), s(step ? *step : *commit);
    if (commit && step && keep) loop<Rule, Real, true, true, true>(a, c, s);
    else if (commit && step) loop<Rule, Real, true, true, false>(a, c, s);
    else if (commit) loop<Rule, Real, true, false, false>(a, c, s);
    else if (keep) loop<Rule, Real, false, true, true>(a, c, s);
    else loop<Rule, Real, false, true, false>(a, c, s);
}

template <class Real>
void apply(const Arrays<Real>& a, const Step* commit, const Step* step, bool keep) {
    switch ((commit ? commit : step)->kind) {
        case PARTOOL_ADAMW: return apply<AdamW>(a, commit, step, keep);
        case PARTOOL_LION: return apply<Lion>(a, commit, step, keep);
        case PARTOOL_ADAGRAD: return apply<Adagrad>(a, commit, step, keep);
        default: return apply<Sgd>(a, commit, step, keep);
    }
}

// An array that is read as Real: in place if it is stored as Real, otherwise through a tile in the L1 cache.
template <class Real>
class Window {
   public:
    Window(void* data, int32_t type, int32_t real) : data_(static_cast<char*>(data)), type_(type), real_(real) {}
    bool narrow() const { return data_ != nullptr && type_ != real_; }
    Real* read(int64_t first, int64_t count) {
        if (data_ == nullptr) return nullptr;
        char* at = data_ + first * size_of(type_);
        if (!narrow()) return reinterpret_cast<Real*>(at);
        convert_any(tile_, real_, at, type_, count);
        return tile_;
    }
    // Rounds to the stored type, so that the next step begins with the values that it would have read from memory.
    void write(int64_t first, int64_t count) {
        if (!narrow()) return;
        char* at = data_ + first * size_of(type_);
        convert_any(at, type_, tile_, real_, count);
        convert_any(tile_, real_, at, type_, count);
    }

   private:
    alignas(64) Real tile_[TILE];
    char* data_;
    int32_t type_, real_;
};

template <class Real>
class Block {
   public:
    Block(const partool_part& part, const Step* commit, const Step* step, bool keep)
        : part_(part), commit_(commit), step_(step), keep_(keep), real_(part.master_type),
          first_(part.first, part.first_type, real_), second_(part.second, part.second_type, real_),
          // Gradients are only read: write() is not called on them.
          commits_(const_cast<void*>(commit ? part.commit : nullptr), part.commit_type, real_),
          steps_(const_cast<void*>(step ? part.step : nullptr), part.step_type, real_),
          apart_(commit && step && (commit->kind != step->kind || first_.narrow() || second_.narrow())) {}

    void tile(int64_t first, int64_t count) {
        Real* master = static_cast<Real*>(part_.master) + first;
        const Ahead ahead(part_, first, commit_ != nullptr, step_ != nullptr);
        Arrays<Real> a{ahead, master, first_.read(first, count), second_.read(first, count), commits_.read(first, count),
                       steps_.read(first, count), out_, count};
        const Real* result = step_ && !keep_ ? out_ : master;
        if (apart_) {
            apply(a, commit_, nullptr, false);
            write_moments(first, count);
            apply(a, nullptr, step_, keep_);
        } else if (commit_ || step_) {
            apply(a, commit_, step_, keep_);
        }
        // Moments are written back after a commit (if not written above) and after a kept step; other steps leave them.
        if (apart_ ? keep_ : commit_ || (step_ && keep_)) write_moments(first, count);
        if (part_.weights)
            convert_any(static_cast<char*>(part_.weights) + first * size_of(part_.weights_type), part_.weights_type,
                        result, real_, count);
    }

   private:
    void write_moments(int64_t first, int64_t count) {
        first_.write(first, count);
        second_.write(first, count);
    }

    alignas(64) Real out_[TILE];
    const partool_part& part_;
    const Step* commit_;
    const Step* step_;
    bool keep_;
    int32_t real_;
    Window<Real> first_, second_, commits_, steps_;
    bool apart_;
};

template <class Real>
void update_as(const partool_part& part, int64_t first, int64_t count, const Step* commit, const Step* step, bool keep) {
    Block<Real> block(part, commit, step, keep);
    Squares squares;
    const char* gradients = static_cast<const char*>(part.step);
    const bool wants_sums = step && part.squares;
    for (int64_t at = first; at < first + count; at += TILE) {
        const int64_t left = first + count - at, here = left < TILE ? left : TILE;
        if (wants_sums) squares.add(gradients + at * size_of(part.step_type), here, part.step_type);
        block.tile(at, here);
    }
    const int64_t block_index = first / PARTOOL_BLOCK;
    if (wants_sums)
        squares.write(gradients + first * size_of(part.step_type), count, part.step_type, part.squares + block_index,
                      part.finite + block_index);
}

void update(const partool_part& part, int64_t first, int64_t count, const Step* commit, const Step* step, bool keep) {
    if (part.master_type == PARTOOL_F64) return update_as<double>(part, first, count, commit, step, keep);
    update_as<float>(part, first, count, commit, step, keep);
}

void pack(const void* x, int32_t x_type, void* error, int32_t error_type, int64_t count, int64_t chunk, bool squared,
          uint8_t* bits, void* scales) {
    if (error_type == PARTOOL_F64)
        return pack_real(x, x_type, static_cast<double*>(error), count, chunk, squared, bits,
                         static_cast<double*>(scales));
    pack_real(x, x_type, static_cast<float*>(error), count, chunk, squared, bits, static_cast<float*>(scales));
}

void unpack(const uint8_t* bits, const void* scales, int32_t scale_type, int64_t senders, int64_t chunks, int64_t chunk,
            int64_t count, void* out, int32_t out_type) {
    if (scale_type == PARTOOL_F64)
        return unpack_real(bits, static_cast<const double*>(scales), senders, chunks, chunk, count, out, out_type);
    unpack_real(bits, static_cast<const float*>(scales), senders, chunks, chunk, count, out, out_type);
}

void dequantise(const void* codes, int32_t bits, const float* scales, int64_t rows, int64_t columns,
                int64_t skipped, void* out, int32_t out_type) {
    switch (out_type) {
        case PARTOOL_F32: return dequantise_as<F32>(codes, bits, scales, rows, columns, skipped, out);
        case PARTOOL_F64: return dequantise_as<F64>(codes, bits, scales, rows, columns, skipped, out);
        case PARTOOL_BF16: return dequantise_as<BF16>(codes, bits, scales, rows, columns, skipped, out);
        default: return dequantise_as<F16>(codes, bits, scales, rows, columns, skipped, out);
    }
}

}  // namespace

extern const Builds PASTE(builds_, PARTOOL_ISA);
const Builds PASTE(builds_, PARTOOL_ISA) = {update, sums, convert_any, accumulate_any, pack, unpack, dequantise};

}  // namespace partool
