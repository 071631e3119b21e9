// Passes over lists of arrays, cut into blocks.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <vector>

#include "block.h"
#include "pool.h"

namespace partool {
namespace {

struct Cut {
    int64_t item, first, count;
};

template <class Item>
std::vector<Cut> blocks(const Item* items, int64_t count) {
    std::vector<Cut> cuts;
    for (int64_t i = 0; i < count; ++i)
        for (int64_t first = 0; first < items[i].count; first += PARTOOL_BLOCK)
            cuts.push_back({i, first, std::min<int64_t>(PARTOOL_BLOCK, items[i].count - first)});
    return cuts;
}

// Computes powers by squaring, as pow() differs in the last bit from machine to machine.
double power(double base, int64_t exponent) {
    double result = 1.0;
    for (; exponent > 0; exponent >>= 1, base *= base)
        if (exponent & 1) result *= base;
    return result;
}

Step step_of(const partool_rule& rule) {
    Step s{};
    s.kind = rule.kind;
    s.scale = rule.scale;
    s.beta1 = rule.beta1;
    s.rest1 = 1.0 - rule.beta1;
    s.beta2 = rule.beta2;
    s.rest2 = 1.0 - rule.beta2;
    s.eps = rule.eps;
    s.decay = rule.lr * rule.weight_decay;
    const bool corrects = rule.kind == PARTOOL_ADAMW;
    s.rate = corrects ? rule.lr / (1.0 - power(rule.beta1, rule.step)) : rule.lr;
    s.root_scale = corrects ? 1.0 / std::sqrt(1.0 - power(rule.beta2, rule.step)) : 1.0;
    return s;
}

std::vector<Step> steps_of(const partool_rule* rules, int32_t groups) {
    std::vector<Step> steps;
    for (int32_t i = 0; rules != nullptr && i < groups; ++i) steps.push_back(step_of(rules[i]));
    return steps;
}

// Runs work(cut) for every block; `Work` is a lambda that lives until all work is done.
template <class Work>
void over(void* pool, const std::vector<Cut>& cuts, Work&& work) {
    struct Job {
        const std::vector<Cut>& cuts;
        Work& work;
    } job{cuts, work};
    run(
        static_cast<Pool*>(pool),
        [](void* context, int64_t index) {
            auto& told = *static_cast<Job*>(context);
            told.work(told.cuts[index]);
        },
        &job, static_cast<int64_t>(cuts.size()));
}

template <class Work>
int32_t over_spans(void* pool, const partool_span* spans, int64_t count, Work&& work) {
    try {
        over(pool, blocks(spans, count), [&](const Cut& cut) {
            const partool_span& span = spans[cut.item];
            char* to = static_cast<char*>(span.to) + cut.first * size_of(span.to_type);
            const char* from = static_cast<const char*>(span.from) + cut.first * size_of(span.from_type);
            work(span, cut, to, from);
        });
    } catch (const std::bad_alloc&) {
        return PARTOOL_NO_MEMORY;
    }
    return PARTOOL_OK;
}

}  // namespace
}  // namespace partool

using namespace partool;

extern "C" int32_t partool_update(void* pool, const partool_part* parts, int64_t count, const partool_rule* commit,
                                  const partool_rule* step, int32_t groups, int32_t keep) {
    for (int64_t i = 0; i < count; ++i)
        if (parts[i].group < 0 || parts[i].group >= groups) return PARTOOL_INVALID;
    try {
        const std::vector<Step> commits = steps_of(commit, groups), steps = steps_of(step, groups);
        const Builds& in_use = builds();
        over(pool, blocks(parts, count), [&](const Cut& cut) {
            const partool_part& part = parts[cut.item];
            in_use.update(part, cut.first, cut.count, commit ? &commits[part.group] : nullptr,
                          step ? &steps[part.group] : nullptr, keep != 0);
        });
    } catch (const std::bad_alloc&) {
        return PARTOOL_NO_MEMORY;
    }
    return PARTOOL_OK;
}

extern "C" int32_t partool_sums(void* pool, const partool_span* spans, int64_t count) {
    const Builds& in_use = builds();
    return over_spans(pool, spans, count, [&](const partool_span& span, const Cut& cut, char*, const char* from) {
        const int64_t block = cut.first / PARTOOL_BLOCK;
        in_use.sums(from, cut.count, span.from_type, span.squares + block, span.finite + block);
    });
}

extern "C" int32_t partool_convert(void* pool, const partool_span* spans, int64_t count) {
    const Builds& in_use = builds();
    return over_spans(pool, spans, count, [&](const partool_span& span, const Cut& cut, char* to, const char* from) {
        in_use.convert(to, span.to_type, from, span.from_type, cut.count);
    });
}

extern "C" int32_t partool_accumulate(void* pool, const partool_span* spans, int64_t count) {
    const Builds& in_use = builds();
    return over_spans(pool, spans, count, [&](const partool_span& span, const Cut& cut, char* to, const char* from) {
        in_use.accumulate(to, span.to_type, from, span.from_type, cut.count);
    });
}

extern "C" int32_t partool_zero(void* pool, const partool_span* spans, int64_t count) {
    return over_spans(pool, spans, count, [&](const partool_span& span, const Cut& cut, char* to, const char*) {
        std::memset(to, 0, static_cast<size_t>(cut.count * size_of(span.to_type)));
    });
}

extern "C" int32_t partool_finite_sum_squares(const void* data, int64_t count, int32_t dtype, double* sum,
                                              int32_t* finite) {
    if (dtype < PARTOOL_F32 || dtype > PARTOOL_F16) return PARTOOL_INVALID;
    struct Told {
        const void* data;
        int64_t count;
        int32_t dtype;
        double* sum;
        int32_t* finite;
    } told{data, count, dtype, sum, finite};
    run(
        nullptr,
        [](void* context, int64_t) {
            const auto& t = *static_cast<Told*>(context);
            builds().sums(t.data, t.count, t.dtype, t.sum, t.finite);
        },
        &told, 1);
    return PARTOOL_OK;
}

namespace {

// Runs `work` in the calling thread, in the floating-point environment of all passes.
template <class Work>
void run_here(Work& work) {
    run(nullptr, [](void* context, int64_t) { (*static_cast<Work*>(context))(); }, &work, 1);
}

bool is_wide(int32_t type) { return type == PARTOOL_F32 || type == PARTOOL_F64; }
bool is_known(int32_t type) { return type >= PARTOOL_F32 && type <= PARTOOL_F16; }

}  // namespace

extern "C" int32_t partool_onebit_pack(const void* x, int32_t x_type, void* error, int32_t error_type, int64_t count,
                                       int64_t chunk, int32_t squared, uint8_t* bits, void* scales) {
    if (!is_known(x_type) || !is_wide(error_type) || count < 0 || chunk <= 0 || chunk % 8) return PARTOOL_INVALID;
    auto work = [&] { builds().pack(x, x_type, error, error_type, count, chunk, squared != 0, bits, scales); };
    run_here(work);
    return PARTOOL_OK;
}

extern "C" int32_t partool_onebit_unpack(const uint8_t* bits, const void* scales, int32_t scale_type, int64_t senders,
                                         int64_t chunks, int64_t chunk, int64_t count, void* out, int32_t out_type) {
    if (!is_wide(scale_type) || !is_known(out_type) || senders <= 0 || chunk <= 0 || chunk % 8) return PARTOOL_INVALID;
    if (count < 0 || count > chunks * chunk) return PARTOOL_INVALID;
    auto work = [&] { builds().unpack(bits, scales, scale_type, senders, chunks, chunk, count, out, out_type); };
    run_here(work);
    return PARTOOL_OK;
}

extern "C" int32_t partool_dequantise(const void* codes, int32_t bits, const float* scales, int64_t rows,
                                      int64_t columns, int64_t skipped, void* out, int32_t out_type) {
    if (!is_known(out_type) || (bits != 4 && bits != 8)) return PARTOOL_INVALID;
    if (skipped < 0 || skipped >= 64 || rows < 0 || columns < 0) return PARTOOL_INVALID;
    auto work = [&] { builds().dequantise(codes, bits, scales, rows, columns, skipped, out, out_type); };
    run_here(work);
    return PARTOOL_OK;
}
