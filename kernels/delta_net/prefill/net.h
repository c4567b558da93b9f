// The common parts of both delta nets' prefill: shapes, inputs, states, and the loop over packed segments.
#pragma once

#include <algorithm>
#include <cmath>

#include "conv1d/packed.h"
#include "delta_net/rule/unit.h"
#include "runtime/cpp/numbers.h"
#include "runtime/cpp/parallel.h"
#include "runtime/cpp/products/tile.h"
#include "runtime/cpp/transpose.h"

namespace {

using namespace baton;

struct Shape {
    int64_t heads, width, key_heads, size, kernel;

    int64_t inner() const { return heads * width; }
    int64_t keys() const { return key_heads * size; }  // Channels of all queries, and of all keys.
    int64_t channels() const { return inner() + 2 * keys(); }
    int64_t sharing() const { return heads / key_heads; }
    int64_t columns() const { return round_up(width); }  // The width, padded to whole vectors.
    int64_t wide() const { return round_up(size); }  // The size, padded to whole vectors.
};

// A layer's constants, prepared at load, all float32.
struct Constants {
    const float *taps;  // [kernel, channels]
    const float *conv_bias;  // [channels] or null
    const float *dt_bias;  // [heads], or [heads, size] with one decay per channel
    const float *A;  // [heads]
    const float *norm;  // [width]
    float eps;
    float beta_scale;  // the factor of σ(b)
    float lower_bound;  // the lower bound of log decays per channel; 0: unbounded
};

// The pools of convolution inputs and of states. Both strides count elements from slot to slot.
struct Pools {
    float *conv;  // [slots, kernel - 1, channels]
    int state_type;
    void *state;  // [slots, heads, width, size]
    int64_t conv_stride, state_stride;
};

// The rows of a projection, one per token; `stride` counts elements from row to row.
template <class T> struct Rows {
    const T *at;
    int64_t stride;

    const T *row(int64_t index) const { return at + index * stride; }
};

template <class T> struct Inputs {
    Rows<T> channels;  // q and k [key_heads, size], v [heads, width]
    Rows<T> betas;  // [heads]
    Rows<T> forget;  // [heads], or [heads, size] with one decay per channel
    Rows<T> gate;  // [heads, width]
};

// The prefill step of all segments. A derived class Rule computes one chunk of tokens with:
//   prepare(segment, chunk, key_head): returns what all heads of a key head share.
//   advance(segment, chunk, head, prepared, h): writes one head's outputs, and advances its state h [size, columns].
//   gated(z): the activation of the output gate.
// The states of a key head's heads stay in the cache while the chunks of a segment are computed. The states are in
// buffer 0 of the scratch memory, transposed to [size, width], so that all products of a chunk have the head's width as
// their columns.
template <class T, class Rule> class Net {
public:
    Net(const Shape &shape, const Constants &constants, const Plan &plan, const Pools &pools, const Inputs<T> &inputs,
        T *y)
        : shape(shape), constants(constants), plan(plan), pools(pools), inputs(inputs), y(y), longest(plan.longest()),
          convolve{plan,
                   shape.kernel,
                   shape.channels(),
                   constants.taps,
                   constants.conv_bias,
                   inputs.channels.at,
                   inputs.channels.stride,
                   pools.conv,
                   pools.conv_stride} {}

    void run() const {
        // The outer index is the key head, the inner one the segment: long segments are then spread over the threads.
        const int64_t tasks = shape.key_heads * plan.segments;
        parallel_for_with<TileRegisters>(tasks, 1, [&](TileRegisters &registers, int64_t begin, int64_t end) {
            registers.set_height(TILE_HEIGHT);
            for (int64_t i = begin; i < end; ++i) scan(i / plan.segments, i % plan.segments);
        });
        convolve.save();
    }

protected:
    const Shape shape;
    const Constants constants;
    const Plan plan;
    const Pools pools;
    const Inputs<T> inputs;
    T *const y;  // [T, inner]
    const int64_t longest;
    const Convolution<T> convolve;

    // Write a chunk's keys and then its queries to `keys`: [2·length, wide], of unit length, queries scaled by size^-½.
    void keys_and_queries(int64_t segment, int64_t chunk, int64_t key_head, float *keys) const {
        const int64_t length = plan.length(chunk), wide = shape.wide(), channel = key_head * shape.size;
        float *const queries = keys + length * wide;
        convolve(segment, chunk, channel, shape.size, queries);
        convolve(segment, chunk, shape.keys() + channel, shape.size, keys);
        const float of_queries = 1 / std::sqrt(static_cast<float>(shape.size));
        for (int64_t i = 0; i < length; ++i) {
            normalize(keys + i * wide, wide, 1);
            normalize(queries + i * wide, wide, of_queries);
        }
    }

    // Write a chunk's values of one head to `to`: [length, columns].
    void values(int64_t segment, int64_t chunk, int64_t head, float *to) const {
        convolve(segment, chunk, 2 * shape.keys() + head * shape.width, shape.width, to);
    }

    // Write norm·o / rms(o)·gate(z) of one token and head to y. squares: the sum of o².
    void output(int64_t token, int64_t head, const float *o, float squares) const {
        const int64_t first = head * shape.width;
        const T *const z = inputs.gate.row(token) + first;
        T *const to = y + token * shape.inner() + first;
        const float scale = 1 / std::sqrt(squares / static_cast<float>(shape.width) + constants.eps);
        for (int64_t c = 0; c < shape.width; c += LANES) {
            const int64_t count = shape.width - c;
            put(to + c, load(o + c) * scale * load(constants.norm + c, count) * Rule::gated(load(z + c, count)), count);
        }
    }

private:
    const Rule &rule() const { return static_cast<const Rule &>(*this); }

    // Compute all chunks of one segment for the heads of one key head.
    void scan(int64_t key_head, int64_t segment) const {
        const int64_t numbers = shape.size * shape.columns(), first = key_head * shape.sharing();
        float *const states = scratch(0, shape.sharing() * numbers);
        std::fill(states, states + shape.sharing() * numbers, 0.0f);
        const auto each_head = [&](auto f) {
            for (int64_t i = 0; i < shape.sharing(); ++i) f(first + i, states + i * numbers);
        };
        each_head([&](int64_t head, float *h) { restore(plan.slots[segment], head, h); });
        for (int64_t chunk = plan.first[segment]; chunk < plan.first[segment + 1]; ++chunk) {
            const auto prepared = rule().prepare(segment, chunk, key_head);
            each_head([&](int64_t head, float *h) { rule().advance(segment, chunk, head, prepared, h); });
            for (int64_t i = plan.saves[chunk]; i < plan.saves[chunk + 1]; ++i)
                each_head([&](int64_t head, float *h) { save(h, plan.saved[i], head); });
        }
        each_head([&](int64_t head, float *h) { save(h, plan.slots[segment], head); });
    }

    // Call f with a pointer to a head's state [width, size] in the pool's type.
    template <class F> void with_state(int64_t slot, int64_t head, F f) const {
        const int64_t at = slot * pools.state_stride + head * shape.width * shape.size;
        with_type(pools.state_type, [&](auto *type) { f(static_cast<decltype(type)>(pools.state) + at); });
    }

    // Read a head's state from the pool, transposed.
    void restore(int64_t slot, int64_t head, float *h) const {
        with_state(slot, head,
                   [&](auto *state) { transpose(state, shape.size, shape.width, shape.size, h, shape.columns()); });
    }

    // Write a head's state to the pool, transposed back.
    void save(const float *h, int64_t slot, int64_t head) const {
        with_state(slot, head,
                   [&](auto *state) { transpose(h, shape.columns(), shape.size, shape.width, state, shape.size); });
    }
};

}  // namespace
