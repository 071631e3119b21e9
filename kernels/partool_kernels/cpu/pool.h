// Threads that share blocks. Results do not depend on which thread takes a block.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace partool {

class Pool {
   public:
    using Work = void (*)(void* context, int64_t index);

    // Raises std::system_error where threads cannot be started or kept on their cores.
    Pool(int threads, const std::vector<int>& cores);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    // Call work for 0 .. count - 1 and return when all is done. Any thread may call; calls run one after the other.
    void run(Work work, void* context, int64_t count);

    // False in a fork of the process, where the threads do not exist.
    bool is_here() const;

   private:
    struct alignas(64) Range {
        std::atomic<int64_t> next{0};
        int64_t end = 0;
    };

    void loop(int self);
    void end();

    const int64_t owner_;  // the process that made the pool
    std::unique_ptr<Range[]> ranges_;
    std::vector<std::thread> threads_;
    std::mutex calls_;
    std::mutex lock_;
    std::condition_variable begun_, done_;
    uint64_t turn_ = 0;
    int busy_ = 0;
    bool ending_ = false;
    Work work_ = nullptr;
    void* context_ = nullptr;
};

// Runs the work on the pool, or in this thread if there is no pool, with the default floating-point modes.
void run(Pool* pool, Pool::Work work, void* context, int64_t count);

}  // namespace partool
