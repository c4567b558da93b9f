// A gated delta net between its projections, over packed segments, as reference.py defines it.
// The chunked form of Yang, Kautz and Hatamizadeh (2024, arXiv:2412.06464, section 3.3), of which only what a head reads
// and writes is made: with γ the sums of g, (I + A)·U = β·(V − e^γ·K·S) and A[i, j] = β_i·(K·Kᵀ)[i, j]·e^(γ_i − γ_j)
// below the diagonal is solved row by row; then O = e^γ·Q·S + (Q·Kᵀ ⊙ e^(γ_i − γ_j))·U, S ← e^γ_end·S + Kᵀ·e^(γ_end − γ)·U.
// States stay in the cache, transposed to [size, width], while the chunks of a segment pass over them.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "conv1d/packed.h"
#include "runtime/cpp/numbers.h"
#include "runtime/cpp/parallel.h"
#include "runtime/cpp/tile.h"
#include "runtime/cpp/transpose.h"
#include "runtime/cpu_graph/call.h"

namespace {

using namespace baton;

constexpr float LEAST = 1e-6f;  // Beside the sum of squares of a query or key.

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
    const float *taps;  // [kernel, channels]
    const float *conv_bias;  // [channels] or null
    const float *dt_bias, *A;  // [heads]
    const float *norm;  // [width]
    float eps;
};

struct Pools {
    float *conv;  // [slots, kernel - 1, channels]
    int state_type;
    void *state;  // [slots, heads, width, size]
    int64_t conv_stride, state_stride;
};

enum Buffer { STATES, KEYS, KEYS_TURNED, SCORES, GATES, SYSTEM, VALUES, PRODUCTS };

// What a thread computes a chunk of `length` tokens with; `padded` is that as whole vectors.
struct Chunk {
    int64_t length, padded;
    float *keys;  // [2·length, wide]: keys, then queries
    float *turned;  // [size, padded]: the keys
    float *scores;  // [2·length, padded]: both times the keys
    // Of one head, [padded] each: γ, e^γ, e^(γ_end − γ), β.
    float *sums, *carried, *remaining, *beta;
    float *system, *mixed;  // [length, padded]: −A, and what U is multiplied with
    float *values;  // [length, columns]: V, then U
    float *products;  // [2·length, columns]: of keys and queries with the state
};

float squares(const float *x, int64_t count) {
    floats total{};
    for (int64_t i = 0; i < count; i += LANES) total += load(x + i, count - i) * load(x + i, count - i);
    return sum(total);
}

void scale(float *x, int64_t count, float by) {
    for (int64_t i = 0; i < count; i += LANES) put(x + i, load(x + i) * by);
}

template <class Activation> class Prefill {
public:
    Prefill(const Shape &shape, const Constants &constants, const Plan &plan, const Pools &pools,
            const Activation *projected, int64_t stride, Activation *y)
        : shape(shape), constants(constants), plan(plan), pools(pools), projected(projected), stride(stride), y(y),
          longest(plan.longest()),
          convolve{plan, shape.kernel, shape.channels(), constants.taps, constants.conv_bias,
                   projected + shape.inner(), stride, pools.conv, pools.conv_stride} {}

    void run() {
        // A key head's segments lie together: then a long one beside short ones does not leave a thread without work.
        parallel_for(shape.key_heads * plan.segments, [&](int64_t begin, int64_t end) {
            const FlushDenormals flush;
            for (int64_t i = begin; i < end; ++i) scan(i / plan.segments, i % plan.segments);
        });
        convolve.save();
    }

private:
    const Shape shape;
    const Constants constants;
    const Plan plan;
    const Pools pools;
    const Activation *const projected;  // [T, inner (z) + channels + heads (b) + heads (a)]
    const int64_t stride;
    Activation *const y;  // [T, inner]
    const int64_t longest;
    const Convolution<Activation> convolve;

    // All chunks of a segment for the heads of a key head.
    void scan(int64_t key_head, int64_t segment) const {
        const int64_t numbers = shape.size * shape.columns(), first = key_head * shape.sharing();
        float *const states = scratch(STATES, shape.sharing() * numbers);
        std::fill(states, states + shape.sharing() * numbers, 0.0f);
        const auto each_head = [&](auto f) {
            for (int64_t i = 0; i < shape.sharing(); ++i) f(first + i, states + i * numbers);
        };
        each_head([&](int64_t head, float *h) { restore(plan.slots[segment], head, h); });
        for (int64_t chunk = plan.first[segment]; chunk < plan.first[segment + 1]; ++chunk) {
            const Chunk c = prepare(segment, chunk, key_head);
            each_head([&](int64_t head, float *h) { advance(segment, chunk, head, c, h); });
            for (int64_t i = plan.saves[chunk]; i < plan.saves[chunk + 1]; ++i)
                each_head([&](int64_t head, float *h) { save(h, plan.saved[i], head); });
        }
        each_head([&](int64_t head, float *h) { save(h, plan.slots[segment], head); });
    }

    Chunk buffers(int64_t length) const {
        const int64_t padded = round_up(length);
        Chunk c{};
        c.length = length, c.padded = padded;
        c.keys = scratch(KEYS, 2 * longest * shape.wide());
        c.turned = scratch(KEYS_TURNED, longest * shape.size);
        c.scores = scratch(SCORES, 2 * longest * longest);
        c.sums = scratch(GATES, 4 * longest);
        c.carried = c.sums + padded, c.remaining = c.carried + padded, c.beta = c.remaining + padded;
        c.system = scratch(SYSTEM, 2 * longest * longest);
        c.mixed = c.system + length * padded;
        c.values = scratch(VALUES, longest * shape.columns());
        c.products = scratch(PRODUCTS, 2 * longest * shape.columns());
        return c;
    }

    // Keys, queries and their scores, which the heads share.
    Chunk prepare(int64_t segment, int64_t chunk, int64_t key_head) const {
        const Chunk c = buffers(plan.length(chunk));
        const int64_t length = c.length, wide = shape.wide(), channel = key_head * shape.size;
        float *const queries = c.keys + length * wide;
        convolve(segment, chunk, channel, shape.size, queries);
        convolve(segment, chunk, shape.keys() + channel, shape.size, c.keys);
        const float of_queries = 1 / std::sqrt(static_cast<float>(shape.size));
        for (int64_t i = 0; i < length; ++i) {
            normalize(c.keys + i * wide, 1);
            normalize(queries + i * wide, of_queries);
        }
        std::fill(c.turned, c.turned + shape.size * c.padded, 0.0f);
        transpose(c.keys, wide, length, shape.size, c.turned, c.padded);
        multiply<float>(2 * length, c.padded, shape.size, {c.keys, wide}, {c.turned, c.padded}, {},
                        {c.scores, c.padded});
        return c;
    }

    void normalize(float *x, float by) const {
        scale(x, shape.wide(), by / std::sqrt(squares(x, shape.wide()) + LEAST));
    }

    // One head's outputs of a chunk, and its state h [size, columns] behind it.
    void advance(int64_t segment, int64_t chunk, int64_t head, const Chunk &c, float *h) const {
        const int64_t length = c.length, padded = c.padded, columns = shape.columns();
        float *const U = c.values, *const recalled = c.products, *const outputs = recalled + length * columns;
        gates(chunk, head, c);
        decays(c);
        convolve(segment, chunk, 2 * shape.keys() + head * shape.width, shape.width, U);
        // By columns that fit into the first cache with what they are multiplied with.
        for (int64_t column = 0; column < columns; column += TILE_VECS * LANES)
            multiply<float>(2 * length, std::min<int64_t>(TILE_VECS * LANES, columns - column), shape.size,
                            {c.keys, shape.wide()}, {h + column, columns}, {}, {recalled + column, columns});
        for (int64_t i = 0; i < length; ++i)
            for (int64_t at = i * columns; at < (i + 1) * columns; at += LANES)
                put(U + at, c.beta[i] * (load(U + at) - c.carried[i] * load(recalled + at)));
        solve(c, columns);
        for (int64_t row = 0; row < length; row += TILE_ROWS)
            multiply<float>(std::min<int64_t>(TILE_ROWS, length - row), columns, std::min(row + TILE_ROWS, length),
                            {c.mixed + row * padded, padded}, {U, columns}, {c.carried + row, 1},
                            {outputs + row * columns, columns});
        for (int64_t i = 0; i < length; ++i) output(plan.starts[chunk] + i, head, outputs + i * columns);
        for (int64_t i = 0; i < length; ++i) scale(U + i * columns, columns, c.remaining[i]);
        multiply<float>(shape.size, columns, length, {c.turned, padded}, {U, columns}, {c.carried + length - 1, 0},
                        {h, columns});
    }

    // γ, e^γ, e^(γ_end − γ) and β.
    void gates(int64_t chunk, int64_t head, const Chunk &c) const {
        const Activation *from = projected + plan.starts[chunk] * stride + shape.inner() + shape.channels() + head;
        for (int64_t i = 0; i < c.length; ++i, from += stride) {
            c.beta[i] = to_float(from[0]);
            c.sums[i] = to_float(from[shape.heads]) + constants.dt_bias[head];
        }
        std::fill(c.beta + c.length, c.beta + c.padded, 0.0f);
        std::fill(c.sums + c.length, c.sums + c.padded, 0.0f);
        for (int64_t i = 0; i < c.padded; i += LANES) {
            put(c.beta + i, 1.0f / (1.0f + exp(-load(c.beta + i))));
            put(c.sums + i, softplus(load(c.sums + i)) * constants.A[head]);
        }
        for (int64_t i = 1; i < c.length; ++i) c.sums[i] += c.sums[i - 1];
        for (int64_t i = 0; i < c.padded; i += LANES) {
            put(c.carried + i, exp(load(c.sums + i)));
            put(c.remaining + i, exp(c.sums[c.length - 1] - load(c.sums + i)));
        }
    }

    // −A, up to the diagonal, and the queries' scores with their decays, zero from the diagonal on to the end of a
    // tile's rows.
    void decays(const Chunk &c) const {
        const int64_t padded = c.padded;
        for (int64_t l = 0; l < c.length; ++l) {
            const float *const of_keys = c.scores + l * padded, *const of_queries = of_keys + c.length * padded;
            float *const row = c.mixed + l * padded;
            for (int64_t s = 0; s <= l; s += LANES) {
                const floats decay = exp(c.sums[l] - load(c.sums + s));
                put(c.system + l * padded + s, load(of_keys + s) * decay * -c.beta[l]);
                put(row + s, load(of_queries + s) * decay);
            }
            std::fill(row + l + 1, row + std::min(padded, l + TILE_ROWS), 0.0f);
        }
    }

    // U ← (I + A)⁻¹·U, a tile's rows at a time.
    void solve(const Chunk &c, int64_t columns) const {
        const float one = 1.0f;
        for (int64_t row = 0; row < c.length; row += TILE_ROWS) {
            const int64_t end = std::min(row + TILE_ROWS, c.length);
            multiply<float>(end - row, columns, row, {c.system + row * c.padded, c.padded}, {c.values, columns},
                            {&one, 0}, {c.values + row * columns, columns});
            for (int64_t i = row + 1; i < end; ++i)
                for (int64_t j = row; j < i; ++j) {
                    const float by = c.system[i * c.padded + j];
                    for (int64_t at = 0; at < columns; at += LANES) {
                        float *const to = c.values + i * columns + at;
                        put(to, load(to) + by * load(c.values + j * columns + at));
                    }
                }
        }
    }

    // y = norm·o / rms(o)·silu(z) of a token.
    void output(int64_t token, int64_t head, const float *o) const {
        const Activation *const z = projected + token * stride + head * shape.width;
        Activation *const to = y + token * shape.inner() + head * shape.width;
        const float by = 1 / std::sqrt(squares(o, shape.width) / static_cast<float>(shape.width) + constants.eps);
        for (int64_t c = 0; c < shape.width; c += LANES) {
            const int64_t count = shape.width - c;
            put(to + c, load(o + c) * by * load(constants.norm + c, count) * silu(load(z + c, count)), count);
        }
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

// Types are those of numbers.h: `type` of y [T, inner] and of projected [T, 2·inner + 2·key_heads·size + 2·heads], whose
// rows are `stride` apart; `state_type` of the states. Strides of the pools count elements from slot to slot.
extern "C" void baton_delta_prefill(int type, const void *projected, int64_t stride, const float *taps,
                                    const float *conv_bias, const float *dt_bias, const float *A, const float *norm,
                                    float eps, float *conv_pool, int64_t conv_stride, int state_type, void *state_pool,
                                    int64_t state_stride, int64_t segments, int64_t chunks, const int64_t *slots,
                                    const int64_t *first, const int64_t *starts, const int64_t *saves,
                                    const int64_t *saved, void *y, int64_t heads, int64_t width, int64_t key_heads,
                                    int64_t size, int64_t kernel) {
    with_type(type, [&](auto *activation) {
        using Activation = std::remove_pointer_t<decltype(activation)>;
        Prefill<Activation>({heads, width, key_heads, size, kernel}, {taps, conv_bias, dt_bias, A, norm, eps},
                            {segments, chunks, slots, first, starts, saves, saved},
                            {conv_pool, state_type, state_pool, conv_stride, state_stride},
                            static_cast<const Activation *>(projected), stride, static_cast<Activation *>(y))
            .run();
    });
}

BATON_RECORDABLE(baton_delta_prefill)
