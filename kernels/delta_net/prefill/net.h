// What the two rules of a delta net's prefill share: shapes, inputs, states, and the loop over packed segments.
#pragma once

#include <algorithm>
#include <cmath>

#include "conv1d/packed.h"
#include "delta_net/rule/unit.h"
#include "runtime/cpp/numbers.h"
#include "runtime/cpp/parallel.h"
#include "runtime/cpp/tile.h"
#include "runtime/cpp/transpose.h"

namespace {

using namespace baton;

struct Shape {
    int64_t heads, width, key_heads, size, kernel;

    int64_t inner() const { return heads * width; }
    int64_t keys() const { return key_heads * size; }  // Channels of the queries, and of the keys.
    int64_t channels() const { return inner() + 2 * keys(); }
    int64_t sharing() const { return heads / key_heads; }
    int64_t columns() const { return round_up(width); }
    int64_t wide() const { return round_up(size); }
};

// Prepared at load, all float32.
struct Constants {
    const float *taps;       // [kernel, channels]
    const float *conv_bias;  // [channels] or null
    const float *dt_bias;    // [heads] or, by channel, [heads, size]
    const float *A;          // [heads]
    const float *norm;       // [width]
    float eps;
};

struct Pools {
    float *conv;  // [slots, kernel - 1, channels]
    int state_type;
    void *state;  // [slots, heads, width, size]
    int64_t conv_stride, state_stride;
};

// The rows of a projection, one a token, `stride` apart.
template <class T> struct Rows {
    const T *at;
    int64_t stride;

    const T *row(int64_t index) const { return at + index * stride; }
};

template <class T> struct Inputs {
    Rows<T> channels;  // q and k [key_heads, size], v [heads, width]
    Rows<T> betas;     // [heads]
    Rows<T> forget;    // [heads] or, by channel, [heads, size]
    Rows<T> gate;      // [heads, width]
};

// Rule has, for the heads of a key head and a chunk of tokens:
//   prepare(segment, chunk, key_head): what these heads share.
//   advance(segment, chunk, head, prepared, h): outputs of one head; its state h [size, columns] after the chunk.
// Buffer 0 of the scratch memory holds the states, which stay in the cache while a segment's chunks pass over them.
template <class T, class Rule> class Net {
public:
    Net(const Shape &shape, const Constants &constants, const Plan &plan, const Pools &pools, const Inputs<T> &inputs, T *y)
        : shape(shape), constants(constants), plan(plan), pools(pools), inputs(inputs), y(y), longest(plan.longest()),
          convolve{plan,       shape.kernel,      shape.channels(), constants.taps, constants.conv_bias, inputs.channels.at,
                   inputs.channels.stride, pools.conv, pools.conv_stride} {}

    void run() const {
        // A key head's segments are adjacent, so that one long segment among short ones leaves no thread without work.
        parallel_for(shape.key_heads * plan.segments, [&](int64_t begin, int64_t end) {
            const FlushDenormals flush;
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

    // Keys, and then queries scaled by size^-½, of unit length: [2·length, wide].
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

    void values(int64_t segment, int64_t chunk, int64_t head, float *to) const {
        convolve(segment, chunk, 2 * shape.keys() + head * shape.width, shape.width, to);
    }

    // y = norm·o / rms(o)·gate(z) of a token; squares: the sum of o².
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

    // All chunks of a segment for the heads of a key head.
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

    // f(state [width, size]), in the pool's type.
    template <class F> void with_state(int64_t slot, int64_t head, F f) const {
        const int64_t at = slot * pools.state_stride + head * shape.width * shape.size;
        with_type(pools.state_type, [&](auto *type) { f(static_cast<decltype(type)>(pools.state) + at); });
    }

    void restore(int64_t slot, int64_t head, float *h) const {
        with_state(slot, head,
                   [&](auto *state) { transpose(state, shape.size, shape.width, shape.size, h, shape.columns()); });
    }

    void save(const float *h, int64_t slot, int64_t head) const {
        with_state(slot, head,
                   [&](auto *state) { transpose(h, shape.columns(), shape.size, shape.width, state, shape.size); });
    }
};

}  // namespace
