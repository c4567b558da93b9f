// Memory that a thread keeps between calls, so that no call has to ask for it. By the C library alone: containers and
// thread_local objects with destructors would need the C++ runtime.
#pragma once

#include <pthread.h>

#include <cstdint>
#include <cstdlib>

namespace baton {

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

}  // namespace baton
