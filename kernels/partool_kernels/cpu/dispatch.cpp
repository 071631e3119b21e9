// Selects the widest build that this processor supports. Every build returns the same bits: lanes and summation order
// are fixed in the source, and the compiler may not contract operations into FMA.
#include <atomic>
#include <cstring>
#include <string>

#include "block.h"

#if defined(PARTOOL_SVE2) && defined(__linux__)
#include <sys/auxv.h>
#ifndef HWCAP2_SVE2
#define HWCAP2_SVE2 (1 << 1)
#endif
#endif

namespace partool {

extern const Builds builds_baseline;
#ifdef PARTOOL_X86
extern const Builds builds_avx2;
extern const Builds builds_avx512;
#endif
#ifdef PARTOOL_SVE2
extern const Builds builds_sve2;
#endif

namespace {

struct Named {
    const char* name;
    const Builds* builds;
    bool runs;
};

// Widest first. `baseline` is SSE2 on x86-64 and NEON on aarch64.
const Named* all() {
#ifdef PARTOOL_X86
    __builtin_cpu_init();
#endif
    static const Named list[] = {
#ifdef PARTOOL_X86
        {"avx512", &builds_avx512,
         __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")},
        {"avx2", &builds_avx2, __builtin_cpu_supports("avx2") != 0},
#endif
#if defined(PARTOOL_SVE2) && defined(__linux__)
        {"sve2", &builds_sve2, (getauxval(AT_HWCAP2) & HWCAP2_SVE2) != 0},
#endif
        {"baseline", &builds_baseline, true},
        {nullptr, nullptr, false},
    };
    return list;
}

const Named* find(const char* name) {
    for (const Named* one = all(); one->name; ++one)
        if (one->runs && (name == nullptr || std::strcmp(name, one->name) == 0)) return one;
    return nullptr;
}

std::atomic<const Named*> chosen{nullptr};

const Named* in_use() {
    const Named* one = chosen.load(std::memory_order_acquire);
    if (one == nullptr) {
        one = find(nullptr);
        chosen.store(one, std::memory_order_release);
    }
    return one;
}

}  // namespace

const Builds& builds() { return *in_use()->builds; }

}  // namespace partool

extern "C" int32_t partool_abi_version(void) { return PARTOOL_ABI_VERSION; }

extern "C" const char* partool_isa(void) { return partool::in_use()->name; }

extern "C" const char* partool_isas(void) {
    static const std::string names = [] {
        std::string found;
        for (const partool::Named* one = partool::all(); one->name; ++one)
            if (one->runs) found += (found.empty() ? "" : ",") + std::string(one->name);
        return found;
    }();
    return names.c_str();
}

extern "C" int32_t partool_set_isa(const char* name) {
    const partool::Named* one = partool::find(name);
    if (one == nullptr) return PARTOOL_INVALID;
    partool::chosen.store(one, std::memory_order_release);
    return PARTOOL_OK;
}
