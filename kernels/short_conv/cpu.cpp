// The gated short convolution between the layer's projections, as reference.py defines it.
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "conv1d/packed.h"
#include "drafts/feed.h"
#include "runtime/cpp/numbers.h"
#include "runtime/cpp/parallel.h"
#include "runtime/cpu_graph/call.h"

namespace baton {
namespace {

constexpr int64_t LINE = 16;  // Floats of a cache line.
constexpr int64_t BLOCK = 128;  // Channels that are computed together; a multiple of LANES.
constexpr int64_t GRAIN = 16384;  // Minimum numbers per part of a parallel loop; fewer are not worth waking a thread.
constexpr int64_t AHEAD = 4;  // Blocks of channels between the one that is computed and the one that is prefetched.

// Round to the type T.
template <class T, class V> V rounded(V x) {
    T numbers[sizeof(V) / sizeof(float)];
    put(numbers, x);
    return get<V>(numbers);
}

// The layer of all tokens. T: the type of projected and y.
// Methods compute `count` channels, up to BLOCK, from `channel` on. Rows of inputs are BLOCK floats apart.
template <class T> struct ShortConvolution {
    int64_t kernel, channels;
    const float *taps, *bias;  // [kernel, channels]; [channels] or null
    const T *projected;  // [tokens, 3·channels], rows `stride` elements apart: B, C and x of each token
    int64_t stride;
    float *pool;  // [slots, kernel - 1, channels], slots `pool_stride` elements apart
    int64_t pool_stride;
    T *y;  // [tokens, channels]

    int64_t history() const { return kernel - 1; }
    int64_t blocks() const { return (channels + BLOCK - 1) / BLOCK; }
    int64_t width(int64_t channel) const { return std::min(BLOCK, channels - channel); }
    float *slot(int64_t index) const { return pool + index * pool_stride; }

    // Write the convolution's inputs of a token, B·x, to `to`.
    void multiply(int64_t token, int64_t channel, int64_t count, float *to) const {
        const T *const B = projected + token * stride + channel, *const x = B + 2 * channels;
        over(count, [=](int64_t i, auto v) {
            using V = decltype(v);
            put(to + i, rounded<T>(get<V>(B + i) * get<V>(x + i)));
        });
    }

    // Compute a token's output. rows: its `kernel` inputs, the oldest first.
    void convolve(const float *rows, int64_t token, int64_t channel, int64_t count) const {
        const T *const gate = projected + token * stride + channels + channel;
        T *const to = y + token * channels + channel;
        over(count, [=](int64_t i, auto v) {
            using V = decltype(v);
            V total{};
            for (int64_t k = 0; k < kernel; k++)
                total += get<V>(rows + k * BLOCK + i) * get<V>(taps + k * channels + channel + i);
            if (bias) total += get<V>(bias + channel + i);
            put(to + i, get<V>(gate + i) * total);
        });
    }

    // Copy the last inputs between a slot and rows.
    void load_slot(const float *from, int64_t channel, int64_t count, float *rows) const {
        for (int64_t k = 0; k < history(); k++)
            std::memcpy(rows + k * BLOCK, from + k * channels + channel, count * sizeof(float));
    }
    void store_slot(const float *rows, int64_t channel, int64_t count, float *to) const {
        for (int64_t k = 0; k < history(); k++)
            std::memcpy(to + k * channels + channel, rows + k * BLOCK, count * sizeof(float));
    }
};

// Packed segments.
template <class T> struct Prompts {
    ShortConvolution<T> layer;
    Plan plan;

    // Write the inputs of the tokens [begin, end) of a segment, of which tokens before its first come from its slot.
    void gather(int64_t segment, int64_t begin, int64_t end, int64_t channel, int64_t count, float *rows) const {
        const int64_t first = plan.starts[plan.first[segment]];
        const float *const past = layer.slot(plan.slots[segment]) + channel;
        for (; begin < std::min(first, end); begin++, rows += BLOCK)
            std::memcpy(rows, past + (layer.history() + begin - first) * layer.channels, count * sizeof(float));
        for (; begin < end; begin++, rows += BLOCK) layer.multiply(begin, channel, count, rows);
    }

    void compute(int64_t segment, int64_t chunk, int64_t channel) const {
        const int64_t count = layer.width(channel), history = layer.history();
        const int64_t begin = plan.starts[chunk], end = plan.starts[chunk + 1];
        float *const rows = scratch(0, (history + end - begin) * BLOCK);
        gather(segment, begin - history, end, channel, count, rows);
        for (int64_t token = begin; token < end; token++)
            layer.convolve(rows + (token - begin) * BLOCK, token, channel, count);
    }

    // Write the last inputs before token `end` to a slot. They are gathered first, because a segment that is shorter
    // than the history moves rows within its own slot.
    void save(int64_t segment, int64_t end, int64_t channel, int64_t slot) const {
        const int64_t count = layer.width(channel);
        float *const rows = scratch(0, layer.kernel * BLOCK);
        gather(segment, end - layer.history(), end, channel, count, rows);
        layer.store_slot(rows, channel, count, layer.slot(slot));
    }

    // The ends are saved last, because that overwrites the slots that the convolution and the checkpoints read.
    void run() const {
        const int64_t blocks = layer.blocks(), work = GRAIN / (BLOCK * plan.longest() + 1) + 1;
        parallel_for(plan.segments * blocks, work, [&](int64_t from, int64_t to) {
            for (int64_t i = from; i < to; i++) {
                const int64_t segment = i / blocks, channel = i % blocks * BLOCK, last = plan.first[segment + 1];
                for (int64_t chunk = plan.first[segment]; chunk < last; chunk++) {
                    compute(segment, chunk, channel);
                    for (int64_t s = plan.saves[chunk]; s < plan.saves[chunk + 1]; s++)
                        save(segment, plan.starts[chunk + 1], channel, plan.saved[s]);
                }
                save(segment, plan.starts[last], channel, plan.slots[segment]);
            }
        });
    }
};

// Decoding rows.
template <class T> struct Rows {
    ShortConvolution<T> layer;
    Feed<T> feed;  // A token in a ring: B·x.
    const int64_t *slots;

    void compute(int64_t row, int64_t channel) const {
        const int64_t count = layer.width(channel), tokens = feed.tokens(row), replayed = feed.replayed(row);
        const int64_t first = feed.offset(row) - replayed, stored = feed.stored(row);
        float *const slot = layer.slot(slots[row]);
        float *const rows = scratch(0, (layer.history() + MOST_TOKENS) * BLOCK);
        float *const own = rows + layer.history() * BLOCK;
        layer.load_slot(slot, channel, count, rows);
        for (int64_t t = 0; t < replayed; t++) {
            const T *const kept = feed.kept(row, t) + channel;
            over(count, [=](int64_t i, auto v) { put(own + t * BLOCK + i, get<decltype(v)>(kept + i)); });
        }
        for (int64_t t = replayed; t < tokens; t++) {
            layer.multiply(first + t, channel, count, own + t * BLOCK);
            layer.convolve(rows + t * BLOCK, first + t, channel, count);
        }
        layer.store_slot(rows + stored * BLOCK, channel, count, slot);
        for (int64_t t = stored; t < tokens; t++) {
            T *const kept = feed.kept(row, t - stored) + channel;
            over(count, [=](int64_t i, auto v) { put(kept + i, get<decltype(v)>(own + t * BLOCK + i)); });
        }
    }

    // Prefetch a block of a row's slot. Slots are far apart in memory, so the hardware does not.
    void prefetch(int64_t row, int64_t channel) const {
        const float *const slot = layer.slot(slots[row]) + channel;
        for (int64_t k = 0; k < layer.history(); k++)
            for (int64_t c = 0; c < layer.width(channel); c += LINE)
                __builtin_prefetch(slot + k * layer.channels + c, 1, FIRST_CACHE);
    }

    void run(int64_t rows) const {
        const int64_t blocks = layer.blocks();
        parallel_for(rows * blocks, GRAIN / BLOCK, [&](int64_t from, int64_t to) {
            for (int64_t i = from; i < to; i++) {
                if (const int64_t next = i + AHEAD; next < to) prefetch(next / blocks, next % blocks * BLOCK);
                compute(i / blocks, i % blocks * BLOCK);
            }
        });
    }
};

}  // namespace
}  // namespace baton

// Compute reference.short_conv_prefill. Strides are between rows or slots, in elements.
// projected: [tokens, 3·channels] and y: [tokens, channels], of dtype `type`. taps: float32 [kernel, channels]; bias:
// float32 [channels] or null. pool: float32 [slots, kernel - 1, channels]. slots, first, starts, saves, saved: see Plan.
extern "C" void baton_short_conv_prefill(int type, const void *projected, int64_t stride, const float *taps,
                                         const float *bias, float *pool, int64_t pool_stride, int64_t segments,
                                         int64_t chunks, const int64_t *slots, const int64_t *first,
                                         const int64_t *starts, const int64_t *saves, const int64_t *saved, void *y,
                                         int64_t channels, int64_t kernel) {
    using namespace baton;
    with_type(type, [=](auto *t) {
        using T = std::remove_pointer_t<decltype(t)>;
        const T *const from = static_cast<const T *>(projected);
        T *const to = static_cast<T *>(y);
        const ShortConvolution<T> layer{kernel, channels, taps, bias, from, stride, pool, pool_stride, to};
        Prompts<T>{layer, {segments, chunks, slots, first, starts, saves, saved}}.run();
    });
}

// Compute reference.short_conv_decode for the rows' slots. projected: [fed tokens, 3·channels]; y: [fed tokens,
// channels]. begins, offsets, rings, ring: see Feed. For the others see baton_short_conv_prefill.
extern "C" void baton_short_conv_decode(int type, const void *projected, int64_t stride, const float *taps,
                                        const float *bias, float *pool, int64_t pool_stride, const int64_t *slots,
                                        void *y, const int64_t *begins, const int64_t *offsets, const int64_t *rings,
                                        void *ring, int64_t ring_stride, int64_t rows, int64_t channels,
                                        int64_t kernel) {
    using namespace baton;
    with_type(type, [=](auto *t) {
        using T = std::remove_pointer_t<decltype(t)>;
        const T *const from = static_cast<const T *>(projected);
        T *const to = static_cast<T *>(y);
        const ShortConvolution<T> layer{kernel, channels, taps, bias, from, stride, pool, pool_stride, to};
        Rows<T>{layer, {begins, offsets, rings, static_cast<T *>(ring), ring_stride, channels}, slots}.run(rows);
    });
}

BATON_RECORDABLE(baton_short_conv_prefill)
BATON_RECORDABLE(baton_short_conv_decode)
