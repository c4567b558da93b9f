// Parallel loops on the threads of the pool, and scratch memory of each thread.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include "numbers.h"
#include "pool.h"

namespace baton {

constexpr int64_t PARTS = 8;  // Number of parts of a loop per thread, unless the caller passes another.

// Call f(own, begin, end) for parts of [0, n) of at least `grain` each, and return when all are done. `own` is an object
// of the thread, which lives as long as the loop. A thread takes the next part when it has finished one, so a thread that
// the system preempts delays only its own part.
// The result for an index must not depend on the part that it is in, because the parts depend on the number of threads.
// Nor does it depend on the thread: all of them treat denormals as zero, whatever the calling thread does.
// f must not throw.
template <class Own, class F> void parallel_for_with(int64_t n, int64_t grain, F f, int64_t parts_per_thread = PARTS) {
    struct Work {
        F &f;
        int64_t n, parts;
    } work{f, n, std::min({pool.threads() * parts_per_thread, n / std::max<int64_t>(grain, 1), Pool::MOST_PARTS})};
    const auto body = [](void *data, Turn &turn) {
        Work &work = *static_cast<Work *>(data);
        const FlushDenormals flush;
        Own own;
        for (int64_t part; (part = turn.take()) >= 0;)
            work.f(own, work.n * part / work.parts, work.n * (part + 1) / work.parts);
    };
    if (pool.threads() > 1 && work.parts > 1 && pool.run(work.parts, body, &work)) return;
    const FlushDenormals flush;
    Own own;
    if (n > 0) f(own, int64_t(0), n);
}

// The same with f(begin, end).
template <class F> void parallel_for(int64_t n, int64_t grain, F f) {
    struct Nothing {};
    parallel_for_with<Nothing>(n, grain, [&](Nothing &, int64_t begin, int64_t end) { f(begin, end); });
}

template <class F> void parallel_for(int64_t n, F f) { parallel_for(n, 1, f); }

// Memory that each thread keeps between calls, so that calls need not allocate. The struct uses the C library only:
// containers and thread_local objects with destructors would need the C++ runtime, which the library is not linked
// with.
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

// Hidden, so that each library has its own: otherwise GCC makes it unique in the process, and libraries of two revisions
// would share their buffers.
__attribute__((visibility("hidden"))) inline const pthread_key_t scratch_key = [] {
    pthread_key_t key;
    if (pthread_key_create(&key, free_scratch)) std::abort();
    return key;
}();

// Return this thread's buffer with this number, enlarged to at least `count` floats, from the start of a cache line.
// Its contents are those of the last use, or undefined. The pointer is valid until the same buffer is requested with a
// larger count.
inline float *scratch(int buffer, int64_t count) noexcept {
    auto *kept = static_cast<ScratchBuffers *>(pthread_getspecific(scratch_key));
    if (!kept) {
        kept = static_cast<ScratchBuffers *>(std::calloc(1, sizeof(ScratchBuffers)));
        if (!kept || pthread_setspecific(scratch_key, kept)) std::abort();
    }
    if (kept->size[buffer] < count) {
        std::free(kept->data[buffer]);
        kept->data[buffer] = static_cast<float *>(std::aligned_alloc(64, (count * sizeof(float) + 63) / 64 * 64));
        if (!kept->data[buffer]) std::abort();
        kept->size[buffer] = count;
    }
    return kept->data[buffer];
}

}  // namespace baton
