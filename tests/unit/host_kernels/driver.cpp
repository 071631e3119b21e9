// Makes passes of all kinds and types through the C interface and prints one hash per instruction set. Also what the
// thread sanitizer watches: several callers at a time on one pool.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "partool_cpu.h"

namespace {

uint64_t hash = 0;

void add(const void* data, size_t bytes) {
    const auto* at = static_cast<const unsigned char*>(data);
    for (size_t i = 0; i < bytes; ++i) hash = (hash ^ at[i]) * 1099511628211ull;
}

// Numbers from about -1 to 1 by integer arithmetic, exact in every type; some large, some subnormal.
struct Numbers {
    uint64_t state;
    double next() {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        const double value = static_cast<double>(static_cast<int64_t>(state >> 52) - 2048) / 2048.0;
        const uint64_t rare = state >> 20 & 1023;
        return rare == 0 ? value * 16384.0 : rare == 1 ? value / (1 << 14) : value;
    }
};

int64_t bytes_of(int32_t type) { return type == PARTOOL_F64 ? 8 : type == PARTOOL_F32 ? 4 : 2; }

using Bytes = std::vector<char>;

Bytes made(Numbers& numbers, int64_t count, int32_t type, bool positive) {
    std::vector<double> wide(count);
    for (auto& value : wide) {
        value = numbers.next();
        if (positive && value < 0) value = -value;
    }
    Bytes out(count * bytes_of(type) + 1);
    partool_span span{out.data(), wide.data(), nullptr, nullptr, count, type, PARTOOL_F64};
    if (partool_convert(nullptr, &span, 1) != 0) std::abort();
    return out;
}

void once(void* pool, int32_t kind, int32_t real, int32_t moment, int32_t gradient, int32_t weights, int64_t count) {
    Numbers numbers{static_cast<uint64_t>(kind * 1000 + real * 100 + moment * 10 + gradient + count)};
    Bytes master = made(numbers, count, real, false), first = made(numbers, count, moment, kind == PARTOOL_ADAGRAD);
    Bytes second = made(numbers, count, moment, true), g = made(numbers, count, gradient, false);
    Bytes h = made(numbers, count, gradient, false), out(count * bytes_of(weights) + 1);
    const int64_t blocks = (count + PARTOOL_BLOCK - 1) / PARTOOL_BLOCK;
    std::vector<double> squares(blocks);
    std::vector<int32_t> finite(blocks);
    const bool two = kind == PARTOOL_ADAMW;
    const partool_part part{master.data(), first.data(), two ? second.data() : nullptr, g.data(), h.data(), out.data(),
                            squares.data(), finite.data(), count, real, moment, two ? moment : PARTOOL_NONE, gradient,
                            gradient, weights, 0, 0};
    const partool_rule before{1e-2, 0.9, 0.95, 1e-8, 0.1, 0.37, 3, kind, 0}, now{1e-2, 0.9, 0.95, 1e-8, 0.1, 1.0, 4, kind, 0};
    for (int keep = 0; keep < 2; ++keep)
        if (partool_update(pool, &part, 1, &before, &now, 1, keep) != 0) std::abort();
    const partool_span more{master.data(), g.data(), nullptr, nullptr, count, real, gradient};
    if (partool_accumulate(pool, &more, 1) != 0) std::abort();
    for (const Bytes* data : {&master, &first, &second, &out}) add(data->data(), data->size() - 1);
    add(squares.data(), squares.size() * sizeof(double));
    add(finite.data(), finite.size() * sizeof(int32_t));
}

void all(void* pool) {
    for (int32_t kind = PARTOOL_ADAMW; kind <= PARTOOL_SGD; ++kind)
        for (int32_t gradient = PARTOOL_F32; gradient <= PARTOOL_F16; ++gradient) {
            once(pool, kind, PARTOOL_F32, PARTOOL_F32, gradient, PARTOOL_BF16, 1031);
            once(pool, kind, PARTOOL_F32, PARTOOL_BF16, gradient, PARTOOL_F16, 77);
            once(pool, kind, PARTOOL_F64, PARTOOL_F64, gradient, PARTOOL_F64, 520);
        }
    once(pool, PARTOOL_ADAMW, PARTOOL_F32, PARTOOL_F32, PARTOOL_BF16, PARTOOL_BF16, 2 * PARTOOL_BLOCK + 13);
}

void race(int threads) {
    int32_t error = 0;
    void* pool = partool_pool_open(threads, nullptr, 0, &error);
    if (pool == nullptr) std::abort();
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 3; ++caller)
        callers.emplace_back([pool] {
            std::vector<float> x(5 * PARTOOL_BLOCK + 7, 1.0f), y(x.size());
            for (int turn = 0; turn < 20; ++turn) {
                const partool_span span{y.data(), x.data(), nullptr, nullptr, static_cast<int64_t>(x.size()), PARTOOL_F32,
                                        PARTOOL_F32};
                if (partool_accumulate(pool, &span, 1) != 0 || y.back() != static_cast<float>(turn + 1)) std::abort();
            }
        });
    for (auto& caller : callers) caller.join();
    partool_pool_close(pool);
}

}  // namespace

int main(int count, char** arguments) {
    const int threads = count > 1 ? std::atoi(arguments[1]) : 1;
    race(threads);
    std::string names = partool_isas();
    for (size_t at = 0, end; at < names.size(); at = end + 1) {
        end = names.find(',', at) == std::string::npos ? names.size() : names.find(',', at);
        const std::string name = names.substr(at, end - at);
        if (partool_set_isa(name.c_str()) != 0) return 1;
        int32_t error = 0;
        void* pool = partool_pool_open(threads, nullptr, 0, &error);
        hash = 14695981039346656037ull;
        all(pool);
        partool_pool_close(pool);
        std::printf("%s %016llx\n", name.c_str(), static_cast<unsigned long long>(hash));
    }
}
