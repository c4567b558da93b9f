// The convolution of all tokens of a decoding row, where rows also feed drafts.
#pragma once

#include "conv1d/update.h"
#include "drafts/feed.h"
#include "runtime/cpp/parallel.h"

namespace baton {

// The weights of a convolution. taps: [kernel, channels]; bias: [channels] or null.
struct Convolution {
    int64_t kernel, channels;
    const float *taps, *bias;

    // Convolve `count` channels, from `channel` on, of each of a row's tokens; results of token t go to y + t·stride.
    // inputs_of(t): a token's inputs of all channels. history: the row's, [kernel - 1, channels].
    // buffer: the number of a scratch buffer, for the history of drafts.
    template <class T, class F>
    void run(const Feed<T> &feed, int64_t row, int64_t channel, int64_t count, F inputs_of, float *history, int buffer,
             float *y, int64_t stride) const {
        float *past = history + channel;
        int64_t apart = channels;
        for (int64_t t = 0; t < feed.tokens(row); t++, y += stride) {
            if (t == feed.stored(row)) {
                float *const drafts = scratch(buffer, (kernel - 1) * count);
                copy_history(kernel, apart, past, drafts, count);
                past = drafts, apart = count;
            }
            convolve(kernel, channels, inputs_of(t) + channel, taps + channel, bias ? bias + channel : nullptr, past,
                     apart, y, count);
        }
    }
};

}  // namespace baton
