// Replaces torch's allocator of CPU memory by one that counts the bytes that the registered threads have allocated and
// that nobody has freed yet. Blocks carry a header, so that every block is freed as it was counted.

#include <atomic>
#include <cstdlib>

#include <c10/core/Allocator.h>

namespace {

constexpr size_t kHeader = 64;
std::atomic<long long> held{0};
std::atomic<long long> most{0};
thread_local bool counted = false;

void release(void* data) {
  if (data == nullptr) {
    return;
  }
  auto* const block = static_cast<char*>(data) - kHeader;
  held -= *reinterpret_cast<long long*>(block);
  std::free(block);
}

struct CountingAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (bytes == 0) {
      return {nullptr, nullptr, &release, cpu};
    }
    const size_t rounded = (bytes + kHeader - 1) / kHeader * kHeader;
    auto* const block = static_cast<char*>(std::aligned_alloc(kHeader, rounded + kHeader));
    const long long mine = counted ? static_cast<long long>(bytes) : 0;
    *reinterpret_cast<long long*>(block) = mine;
    const long long now = held += mine;
    for (long long before = most; before < now && !most.compare_exchange_weak(before, now);) {
    }
    return {block + kHeader, block + kHeader, &release, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

CountingAllocator allocator;

} // namespace

extern "C" {

// Install the allocator and count what this thread allocates from now on.
void count_this_thread() {
  c10::SetAllocator(c10::DeviceType::CPU, &allocator, 255);
  counted = true;
}

void restart_peak() {
  most = held.load();
}

long long peak_bytes() {
  return most;
}
}
