#include "pool.h"

#include <signal.h>
#include <time.h>

#include <initializer_list>
#include <new>

namespace baton {

Pool pool;

namespace {

constexpr int64_t WORKER_SPINS_NS = 50'000;  // Longer than the time between two loops of a step.
constexpr int64_t CALLER_SPINS_NS = 30'000;  // Longer than the last part takes, unless its worker was preempted.

// Spin until is_over() or the time has passed. Return whether it is over.
template <class F> bool spin(int64_t nanoseconds, F is_over) {
    const auto now = [] {
        timespec at;
        clock_gettime(CLOCK_MONOTONIC, &at);
        return at.tv_sec * int64_t(1'000'000'000) + at.tv_nsec;
    };
    for (const int64_t end = now() + nanoseconds; now() < end;)
        for (int turn = 0; turn < 32; turn++) {
            if (is_over()) return true;
#if defined(__x86_64__)
            __builtin_ia32_pause();
#elif defined(__aarch64__)
            asm volatile("yield");
#endif
        }
    return false;
}

bool has_parts(uint64_t left) { return (left >> 16 & 0xffff) != (left & 0xffff); }

}  // namespace

void Pool::use(int threads) {
    pthread_mutex_lock(&lock);
    count = threads;
    pthread_cond_broadcast(&new_loop);  // Wake surplus workers, so that they end.
    pthread_mutex_unlock(&lock);
}

void Pool::forget_workers() {
    const int threads = count;
    new (this) Pool;  // With a new lock: a thread of the parent may have held the old one at the fork.
    count = threads;
}

bool Pool::run(int64_t parts, void (*body)(void *, Turn &), void *data) {
    if (is_taken.exchange(true, std::memory_order_acquire)) return false;
    if (started < count - 1) start_workers();
    const uint32_t loop = loops() + 1;
    this->body = body, this->data = data, this->parts = parts;
    done.store(0, std::memory_order_relaxed);
    left.store(uint64_t(loop) << 32 | uint64_t(parts));
    if (sleeping.load()) {
        pthread_mutex_lock(&lock);
        pthread_cond_broadcast(&new_loop);
        pthread_mutex_unlock(&lock);
    }
    Turn own(false);
    own.loop = loop;
    body(data, own);
    done.fetch_add(own.taken, std::memory_order_acq_rel);
    wait_for(parts);
    is_taken.store(false, std::memory_order_release);
    return true;
}

// Wait until all parts are done. Spin first, and then sleep, because a preempted worker may need this processor.
void Pool::wait_for(uint32_t parts) {
    const auto is_over = [&] { return done.load(std::memory_order_acquire) == parts; };
    if (is_over() || spin(CALLER_SPINS_NS, is_over)) return;
    pthread_mutex_lock(&lock);
    caller_sleeps.store(true);
    while (done.load() != parts) pthread_cond_wait(&all_done, &lock);
    caller_sleeps.store(false);
    pthread_mutex_unlock(&lock);
}

// Start the workers that are missing. They block signals, which Python handles in its own threads, but not those of
// their own faults: if these were blocked, the system would end the process before faulthandler could report them.
void Pool::start_workers() {
    sigset_t blocked, before;
    sigfillset(&blocked);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigdelset(&blocked, fault);
    pthread_sigmask(SIG_SETMASK, &blocked, &before);
    pthread_mutex_lock(&lock);
    for (; started < count - 1; started++) {
        pthread_t thread;
        if (pthread_create(&thread, nullptr, worker, reinterpret_cast<void *>(int64_t(started)))) break;
        pthread_detach(thread);
    }
    pthread_mutex_unlock(&lock);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void *Pool::worker(void *index) {
    pool.work(static_cast<int>(reinterpret_cast<int64_t>(index)));
    return nullptr;
}

void Pool::work(int index) {
    do {
        while (spin(WORKER_SPINS_NS, [&] { return has_parts(left.load(std::memory_order_acquire)); })) {
            if (!may_work(index)) break;  // A surplus worker ends in sleep().
            Turn turn(true);
            if (!turn.join()) continue;
            // While this thread holds a part, the loop is not over, and its fields do not change.
            const uint32_t all = parts;
            body(data, turn);
            if (done.fetch_add(turn.taken) + turn.taken != all || !caller_sleeps.load()) continue;
            pthread_mutex_lock(&lock);
            pthread_cond_signal(&all_done);
            pthread_mutex_unlock(&lock);
        }
    } while (sleep(index));
}

// Sleep until a loop has parts. Return false if the worker must end, because there are too many. Surplus workers end in
// descending order of their indices, so that the remaining ones are always [0, started).
bool Pool::sleep(int index) {
    pthread_mutex_lock(&lock);
    sleeping.fetch_add(1);
    while (may_work(index) ? !has_parts(left.load()) : index != started - 1) pthread_cond_wait(&new_loop, &lock);
    sleeping.fetch_sub(1);
    const bool goes_on = may_work(index);
    if (!goes_on) {
        started--;
        pthread_cond_broadcast(&new_loop);  // Wake the worker with the index below, which may be surplus too.
    }
    pthread_mutex_unlock(&lock);
    return goes_on;
}

}  // namespace baton

// Set how many threads compute, the calling thread among them.
extern "C" void baton_use_threads(int threads) { baton::pool.use(threads); }

// Let a process that was forked compute, with workers of its own. No other thread may run.
extern "C" void baton_forget_workers() { baton::pool.forget_workers(); }

// Return how many loops the threads have shared so far.
extern "C" int64_t baton_shared_loops() { return baton::pool.loops(); }
