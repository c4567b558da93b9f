// Packed segments, and their depthwise causal convolution with SiLU, as reference.conv1d_prefill defines it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "runtime/cpp/numbers.h"
#include "runtime/cpp/parallel.h"

namespace baton {

// The chunks of packed segments; see ChunkLists in kernels/prefill/chunk_table.py.
// Segment s is chunks [first[s], first[s + 1]), and its state is in slots[s]. Chunk c is tokens [starts[c], starts[c +
// 1]). The state at its end is written to the slots saved[saves[c]] to saved[saves[c + 1] - 1].
struct Plan {
    int64_t segments, chunks;
    const int64_t *slots, *first, *starts, *saves, *saved;

    int64_t tokens() const { return starts[chunks]; }
    int64_t length(int64_t chunk) const { return starts[chunk + 1] - starts[chunk]; }
    // Return the tokens of the longest chunk, rounded up to whole vectors.
    int64_t longest() const {
        int64_t most = 0;
        for (int64_t chunk = 0; chunk < chunks; ++chunk) most = std::max(most, round_up(length(chunk)));
        return most;
    }
};

// The convolution of packed segments whose inputs have type T, float or bfloat16.
template <class T> struct Convolution {
    static constexpr int BUFFER = ScratchBuffers::COUNT - 1;

    Plan plan;
    int64_t kernel, channels;
    const float *taps, *bias;  // [kernel, channels]; [channels] or null
    const T *inputs;  // [tokens, channels], rows `stride` elements apart
    int64_t stride;
    float *pool;  // [slots, kernel - 1, channels], slots `pool_stride` elements apart
    int64_t pool_stride;

    // Write SiLU of the convolution of a chunk's tokens, for `count` channels from `channel` on, to `to`: [tokens,
    // round_up(count)]. LANES channels are computed at a time; their inputs are first gathered as consecutive vectors.
    void operator()(int64_t segment, int64_t chunk, int64_t channel, int64_t count, float *to) const {
        const int64_t history = kernel - 1, begin = plan.starts[chunk], end = plan.starts[chunk + 1];
        float *const rows = scratch(BUFFER, (history + end - begin + kernel) * LANES);
        float *const vectors = rows + (history + end - begin) * LANES;
        for (int64_t c = 0; c < count; c += LANES) {
            const int64_t at = channel + c, lanes = count - c;
            gather(segment, begin - history, end, at, lanes, rows);
            for (int64_t k = 0; k < kernel; ++k) put(vectors + k * LANES, load(taps + k * channels + at, lanes));
            const floats added = bias ? load(bias + at, lanes) : floats{};
            if (kernel == 4)
                slide<4>(rows, vectors, added, end - begin, to + c, round_up(count));
            else
                slide<0>(rows, vectors, added, end - begin, to + c, round_up(count));
        }
    }

    // Write the last inputs of checkpoints and ends to their slots. To be called after all outputs are computed,
    // because ends overwrite the segments' slots, which the convolution reads.
    void save() const {
        for (int64_t segment = 0; segment < plan.segments; ++segment) {
            const int64_t last = plan.first[segment + 1];
            for (int64_t chunk = plan.first[segment]; chunk < last; ++chunk)
                for (int64_t i = plan.saves[chunk]; i < plan.saves[chunk + 1]; ++i)
                    save(segment, plan.starts[chunk + 1], plan.saved[i]);
            save(segment, plan.starts[last], plan.slots[segment]);
        }
    }

private:
    // Gather the inputs of tokens [begin, end) for the LANES channels from `channel` on, of which `count` exist, as
    // [tokens, LANES]. Tokens before the segment's first come from its slot.
    void gather(int64_t segment, int64_t begin, int64_t end, int64_t channel, int64_t count, float *to) const {
        const int64_t first = plan.starts[plan.first[segment]], history = kernel - 1;
        const float *const slot = pool + plan.slots[segment] * pool_stride;
        for (; begin < std::min(first, end); ++begin, to += LANES)
            put(to, load(slot + (history + begin - first) * channels + channel, count));
        const T *from = inputs + begin * stride + channel;
        for (; begin < end; ++begin, to += LANES, from += stride) put(to, load(from, count));
    }

    // Convolve one vector of channels. Width: the kernel's width if known at compile time, else 0.
    template <int Width>
    void slide(const float *rows, const float *vectors, floats added, int64_t length, float *to, int64_t wide) const {
        const int64_t width = Width ? Width : kernel;
        for (int64_t i = 0; i < length; ++i) {
            floats x = added;
            for (int64_t k = 0; k < width; ++k) x += load(rows + (i + k) * LANES) * load(vectors + k * LANES);
            put(to + i * wide, silu(x));
        }
    }

    // Write the last inputs before token `end` to a slot, the oldest first. In this order a segment that is shorter
    // than the history can move rows within its own slot.
    void save(int64_t segment, int64_t end, int64_t slot) const {
        float *const to = pool + slot * pool_stride;
        float row[LANES];
        for (int64_t k = 0; k < kernel - 1; ++k)
            for (int64_t c = 0; c < channels; c += LANES) {
                const int64_t token = end - (kernel - 1) + k, count = channels - c;
                gather(segment, token, token + 1, c, count, row);
                put(to + k * channels + c, load(row), count);
            }
    }
};

}  // namespace baton
