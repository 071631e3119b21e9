#include "pool.h"

#include <cerrno>
#include <cfenv>
#include <system_error>

#ifdef __linux__
#include <pthread.h>
#include <sched.h>
#endif
#include <signal.h>
#include <unistd.h>

#include "partool_cpu.h"

namespace partool {
namespace {

// Torch sets flush-to-zero thread by thread, which would make results depend on the thread.
class DefaultModes {
   public:
    DefaultModes() {
        std::fegetenv(&saved_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~DefaultModes() { std::fesetenv(&saved_); }

   private:
    std::fenv_t saved_;
};

// Only Python's threads handle signals: threads that are started while this object lives block them.
class NoSignals {
   public:
    NoSignals() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &saved_);
    }
    ~NoSignals() { pthread_sigmask(SIG_SETMASK, &saved_, nullptr); }

   private:
    sigset_t saved_;
};

void pin(std::thread& thread, int core) {
#ifdef __linux__
    const int size = core / 1024 * 1024 + 1024;
    cpu_set_t* set = CPU_ALLOC(size);
    if (set == nullptr) throw std::system_error(ENOMEM, std::generic_category());
    const size_t bytes = CPU_ALLOC_SIZE(size);
    CPU_ZERO_S(bytes, set);
    CPU_SET_S(core, bytes, set);
    const int error = pthread_setaffinity_np(thread.native_handle(), bytes, set);
    CPU_FREE(set);
    if (error != 0) throw std::system_error(error, std::generic_category());
    pthread_setname_np(thread.native_handle(), "partool-host");
#else
    (void)thread, (void)core;
    throw std::system_error(ENOTSUP, std::generic_category());
#endif
}

}  // namespace

Pool::Pool(int threads, const std::vector<int>& cores) : owner_(getpid()), ranges_(new Range[threads]) {
    const NoSignals quiet;
    try {
        threads_.reserve(threads);
        for (int i = 0; i < threads; ++i) threads_.emplace_back(&Pool::loop, this, i);  // each waits for the first pass
        for (int i = 0; i < threads && !cores.empty(); ++i) pin(threads_[i], cores[i % cores.size()]);
    } catch (...) {
        end();
        throw;
    }
}

Pool::~Pool() { end(); }

bool Pool::is_here() const { return getpid() == owner_; }

void Pool::end() {
    const std::lock_guard<std::mutex> last(calls_);  // wait for a pass that another thread may be running
    {
        const std::lock_guard<std::mutex> hold(lock_);
        ending_ = true;
    }
    begun_.notify_all();
    for (auto& thread : threads_) thread.join();
}

void Pool::run(Work work, void* context, int64_t count) {
    const std::lock_guard<std::mutex> one(calls_);
    std::unique_lock<std::mutex> hold(lock_);
    const int64_t threads = static_cast<int64_t>(threads_.size());
    // A thread gets the same share of the same arrays in every pass, so that this memory is on its NUMA node.
    for (int64_t i = 0; i < threads; ++i) {
        ranges_[i].next.store(count * i / threads, std::memory_order_relaxed);
        ranges_[i].end = count * (i + 1) / threads;
    }
    work_ = work;
    context_ = context;
    busy_ = static_cast<int>(threads);
    ++turn_;
    begun_.notify_all();
    done_.wait(hold, [this] { return busy_ == 0; });
}

void Pool::loop(int self) {
    const DefaultModes modes;
    uint64_t seen = 0;
    for (;;) {
        int threads;
        {
            std::unique_lock<std::mutex> hold(lock_);
            begun_.wait(hold, [&] { return ending_ || turn_ != seen; });
            if (turn_ == seen) return;  // a pass in progress is finished first: its caller waits for all threads
            seen = turn_;
            threads = static_cast<int>(threads_.size());
        }
        for (int k = 0; k < threads; ++k) {
            Range& range = ranges_[(self + k) % threads];  // first its range, then the rest of other threads' ranges
            for (int64_t i; (i = range.next.fetch_add(1, std::memory_order_relaxed)) < range.end;) work_(context_, i);
        }
        const std::lock_guard<std::mutex> hold(lock_);
        if (--busy_ == 0) done_.notify_all();
    }
}

void run(Pool* pool, Pool::Work work, void* context, int64_t count) {
    if (pool != nullptr && pool->is_here()) return pool->run(work, context, count);
    const DefaultModes modes;
    for (int64_t i = 0; i < count; ++i) work(context, i);
}

}  // namespace partool

extern "C" void* partool_pool_open(int32_t threads, const int32_t* cores, int32_t core_count, int32_t* error) {
    try {
        return new partool::Pool(threads, std::vector<int>(cores, cores + core_count));
    } catch (const std::system_error& failed) {
        *error = failed.code().value();
    } catch (...) {
        *error = ENOMEM;
    }
    return nullptr;
}

extern "C" void partool_pool_close(void* pool) {
    auto* one = static_cast<partool::Pool*>(pool);
    if (one != nullptr && one->is_here()) delete one;  // a fork has no threads to wait for
}
