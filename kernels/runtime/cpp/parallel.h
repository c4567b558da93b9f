// Loops over the threads of torch's pool, whoever compiles this needs no OpenMP; and what each thread keeps.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>

namespace baton {

constexpr int64_t PARTS = 8;  // For each thread.

struct Pool {
    using Run = void (*)(void (*body)(void *), void *data, unsigned threads, unsigned flags);
    Run run = nullptr;
    int threads = 1;
};
extern Pool pool;

// Calls f(begin, end) for parts of [0, n) of at least `grain` each; all are done when it returns. Each thread takes the
// next part when it has done one, so one that loses its processor for a while holds up its own part and no more.
// What f computes for an index must not depend on the part, for threads and chance decide on them. f must not throw.
template <class F> void parallel_for(int64_t n, int64_t grain, F f) {
    const int64_t parts = std::min<int64_t>(pool.threads * PARTS, n / std::max<int64_t>(grain, 1));
    if (parts <= 1 || pool.threads == 1) {
        if (n > 0) f(int64_t(0), n);
        return;
    }
    struct Work {
        F &f;
        int64_t n, parts;
        std::atomic<int64_t> next;
    } work{f, n, parts, {0}};
    auto body = [](void *data) {
        Work &work = *static_cast<Work *>(data);
        for (int64_t part; (part = work.next.fetch_add(1, std::memory_order_relaxed)) < work.parts;)
            work.f(work.n * part / work.parts, work.n * (part + 1) / work.parts);
    };
    pool.run(body, &work, static_cast<unsigned>(pool.threads), 0);
}

template <class F> void parallel_for(int64_t n, F f) { parallel_for(n, 1, f); }

// Memory that a thread keeps between calls, so that no call has to ask for it. By the C library alone: containers and
// thread_local objects with destructors would need the C++ runtime.
struct ScratchBuffers {
    static constexpr int COUNT = 12;
    float *data[COUNT];
    int64_t size[COUNT];
};

inline void free_scratch(void *kept) noexcept {
    ScratchBuffers *const buffers = static_cast<ScratchBuffers *>(kept);
    for (float *data : buffers->data) std::free(data);
    std::free(buffers);
}

inline const pthread_key_t scratch_key = [] {
    pthread_key_t key;
    if (pthread_key_create(&key, free_scratch)) std::abort();
    return key;
}();

// At least `count` floats, this thread's until it asks for more of the same buffer; in them is what was left there.
inline float *scratch(int buffer, int64_t count) noexcept {
    auto *kept = static_cast<ScratchBuffers *>(pthread_getspecific(scratch_key));
    if (!kept) {
        kept = static_cast<ScratchBuffers *>(std::calloc(1, sizeof(ScratchBuffers)));
        if (!kept || pthread_setspecific(scratch_key, kept)) std::abort();
    }
    if (kept->size[buffer] < count) {
        std::free(kept->data[buffer]);
        kept->data[buffer] = static_cast<float *>(std::malloc(count * sizeof(float)));
        if (!kept->data[buffer]) std::abort();
        kept->size[buffer] = count;
    }
    return kept->data[buffer];
}

} // namespace baton
