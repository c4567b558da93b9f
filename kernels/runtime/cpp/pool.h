// The threads that share loops.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>

namespace baton {

class Turn;

// A caller's thread and `threads - 1` workers take the parts of a loop, one at a time, until none is left. The loop is
// over when all parts are done. The caller does not wait for a worker that has no processor and so takes no part.
class Pool {
  public:
    static constexpr int64_t MOST_PARTS = 0xffff;  // Maximum parts of a loop: they are counted in 16 bits.

    // Set how many threads compute, the caller's among them. No loop may run.
    void use(int threads);

    int threads() const { return count; }

    // Forget the parent's workers and its loop after a fork: only the calling thread exists in this process.
    void forget_workers();

    // Return how many loops the threads have shared.
    uint32_t loops() const { return left.load(std::memory_order_relaxed) >> 32; }

    // Call body(data, turn) in the calling thread, and in each worker that comes in time. Return when all parts are
    // done. body takes parts with turn.take() until none is left; a worker's turn has at least one.
    // parts: at most MOST_PARTS.
    // Return false, without a call, if another thread's loop runs.
    bool run(int64_t parts, void (*body)(void *data, Turn &turn), void *data);

  private:
    friend class Turn;

    static void *worker(void *index);
    void work(int index);
    bool may_work(int index) const { return index < count - 1; }
    bool sleep(int index);
    void start_workers();
    void wait_for(uint32_t parts);

    std::atomic<int> count{1};    // number of threads that compute
    std::atomic<int> started{0};  // number of workers that exist; changed under the lock
    std::atomic<bool> is_taken{false};  // whether a loop runs

    // The parts of the loop that are left: the loop's number in 32 bits, the first part in 16, the end in 16. All are
    // in one word, so that a thread that is late cannot take a part of another loop. It is written after the other
    // three.
    alignas(64) std::atomic<uint64_t> left{0};
    void (*body)(void *, Turn &) = nullptr;
    void *data = nullptr;
    uint32_t parts = 0;

    alignas(64) std::atomic<uint32_t> done{0};  // number of parts that are done
    std::atomic<bool> caller_sleeps{false};
    alignas(64) std::atomic<int> sleeping{0};  // number of workers that sleep

    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t new_loop = PTHREAD_COND_INITIALIZER, all_done = PTHREAD_COND_INITIALIZER;
};
extern Pool pool;

// A thread's participation in one loop. The caller takes parts from the beginning and workers from the end, so that
// with two threads each reads memory in one direction.
class Turn {
  public:
    // Return the next part, in [0, parts); -1 if none is left.
    int64_t take() {
        if (held >= 0) {
            const int64_t part = held;
            held = -1;
            return part;
        }
        return take_of(pool.left.load(std::memory_order_acquire));
    }

  private:
    friend class Pool;

    Turn(bool is_worker) : is_worker(is_worker) {}

    // Join the loop that runs now, and take a part of it. Return false if none is left.
    bool join() {
        const uint64_t now = pool.left.load(std::memory_order_acquire);
        loop = now >> 32;
        return (held = take_of(now)) >= 0;
    }

    int64_t take_of(uint64_t now) {
        for (;;) {
            const auto first = static_cast<uint32_t>(now >> 16 & 0xffff), end = static_cast<uint32_t>(now & 0xffff);
            if (first == end || now >> 32 != loop) return -1;
            const uint64_t then = is_worker ? now - 1 : now + (1 << 16);
            if (pool.left.compare_exchange_weak(now, then, std::memory_order_acq_rel, std::memory_order_acquire)) {
                taken++;
                return is_worker ? end - 1 : first;
            }
        }
    }

    const bool is_worker;
    uint32_t loop = 0, taken = 0;
    int64_t held = -1;  // the part that join() took and take() has not returned yet; -1: none
};

}  // namespace baton
