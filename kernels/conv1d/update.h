// The depthwise causal convolution of decoding rows with SiLU, as reference.conv1d_update defines it.
#pragma once

#include "runtime/cpp/numbers.h"

namespace baton {

// Compute y = silu(convolution) for `count` channels of one row, and shift the history by one input.
// All pointers are to the first of these channels. taps: [kernel, channels]. bias: [channels] or null.
// history: [kernel - 1, stride], the oldest first.
template <class T>
void convolve(int64_t kernel, int64_t channels, const T *x, const float *taps, const float *bias, float *history,
              int64_t stride, float *y, int64_t count) {
    const int64_t kept = kernel - 1;
    over(count, [&](int64_t i, auto v) {
        using V = decltype(v);
        const V now = get<V>(x + i);
        V total{};
        for (int64_t k = 0; k < kept; k++) {
            float *past = history + k * stride + i;
            total += get<V>(past) * get<V>(taps + k * channels + i);
            if (k > 0) put(past - stride, get<V>(past));
        }
        total += now * get<V>(taps + kept * channels + i);
        if (kept) put(history + (kept - 1) * stride + i, now);
        if (bias) total += get<V>(bias + i);
        put(y + i, silu(total));
    });
}

// Copy the history of `count` channels to [kernel - 1, count].
inline void copy_history(int64_t kernel, int64_t stride, const float *history, float *to, int64_t count) {
    for (int64_t k = 0; k + 1 < kernel; k++) std::memcpy(to + k * count, history + k * stride, count * sizeof(float));
}

}  // namespace baton
