// Kimi Delta Attention between its projections, over packed segments, as reference.py defines it.
// In blocks of 16 tokens: (I + A)·U = β·(V − (P ⊙ K)·S), with P the products of decays since the block's first token and
// A[i, j] = β_i·Σ_d K[i]·K[j]·(the decays of tokens j + 1 to i) below the diagonal. These are products of numbers up to 1,
// so nothing overflows; and at a block's end what is left of K[j] is what U[j] is added to the state by.
// States stay in the cache, transposed to [size, width], while the chunks of a segment pass over them.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "conv1d/packed.h"
#include "delta_net/gated/unit.h"
#include "runtime/cpp/numbers.h"
#include "runtime/cpp/parallel.h"
#include "runtime/cpp/tile.h"
#include "runtime/cpp/transpose.h"
#include "runtime/cpu_graph/call.h"

namespace {

using namespace baton;

constexpr int64_t BLOCK = 16;

struct Shape {
    int64_t heads, width, size, kernel;

    int64_t inner() const { return heads * width; }
    int64_t keys() const { return heads * size; }  // Channels of the queries, and of the keys.
    int64_t channels() const { return inner() + 2 * keys(); }
    int64_t columns() const { return round_up(width); }
    int64_t wide() const { return round_up(size); }
};

// Prepared at load, all float32.
struct Constants {
    const float *taps;  // [kernel, channels]
    const float *dt_bias;  // [heads, size]
    const float *A;  // [heads]
    const float *norm;  // [width]
    float eps;
};

struct Pools {
    float *conv;  // [slots, kernel - 1, channels]
    int state_type;
    void *state;  // [slots, heads, width, size]
    int64_t conv_stride, state_stride;
};

// What is projected of the tokens, `stride` apart.
template <class T> struct Rows {
    const T *at;
    int64_t stride;

    const T *row(int64_t index) const { return at + index * stride; }
};

enum Buffer { STATE, TOKENS, CARRIED, LEFT, TURNED, SCORES, PRODUCTS };

// Some tokens' keys, queries and decays [tokens, wide], and values [tokens, columns]; β [tokens].
struct Tokens {
    float *keys, *queries, *decays, *values, *beta;

    Tokens from(int64_t token, int64_t wide, int64_t columns) const {
        const int64_t at = token * wide;
        return {keys + at, queries + at, decays + at, values + token * columns, beta + token};
    }
};

template <class T> class Prefill {
public:
    Prefill(const Shape &shape, const Constants &constants, const Plan &plan, const Pools &pools,
            const Rows<T> &projected, const Rows<T> &forget, const Rows<T> &gate, T *y)
        : shape(shape), constants(constants), plan(plan), pools(pools), projected(projected), forget(forget), gate(gate),
          y(y), convolve{plan, shape.kernel, shape.channels(), constants.taps, nullptr, projected.at, projected.stride,
                         pools.conv, pools.conv_stride} {}

    void run() const {
        // A head's segments lie together: then a long one beside short ones does not leave a thread without work.
        parallel_for(shape.heads * plan.segments, [&](int64_t begin, int64_t end) {
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
    const Rows<T> projected;  // [T, channels + heads (b)]
    const Rows<T> forget, gate;  // [T, heads, size] and [T, heads, width]
    T *const y;  // [T, inner]
    const Convolution<T> convolve;

    // All chunks of a segment for a head.
    void scan(int64_t head, int64_t segment) const {
        float *const h = scratch(STATE, shape.size * shape.columns());
        std::fill(h, h + shape.size * shape.columns(), 0.0f);
        restore(plan.slots[segment], head, h);
        for (int64_t chunk = plan.first[segment]; chunk < plan.first[segment + 1]; ++chunk) {
            const Tokens tokens = prepare(segment, chunk, head);
            const int64_t length = plan.length(chunk);
            for (int64_t at = 0; at < length; at += BLOCK)
                advance(plan.starts[chunk] + at, std::min(BLOCK, length - at), head,
                        tokens.from(at, shape.wide(), shape.columns()), h);
            for (int64_t i = plan.saves[chunk]; i < plan.saves[chunk + 1]; ++i) save(h, plan.saved[i], head);
        }
        save(h, plan.slots[segment], head);
    }

    Tokens prepare(int64_t segment, int64_t chunk, int64_t head) const {
        const int64_t length = plan.length(chunk), wide = shape.wide(), columns = shape.columns(), key = head * shape.size;
        float *const keys = scratch(TOKENS, length * (3 * wide + columns + 1)), *const queries = keys + length * wide;
        float *const decays = queries + length * wide, *const values = decays + length * wide;
        const Tokens t{keys, queries, decays, values, values + length * columns};
        convolve(segment, chunk, key, shape.size, queries);
        convolve(segment, chunk, shape.keys() + key, shape.size, keys);
        convolve(segment, chunk, 2 * shape.keys() + head * shape.width, shape.width, values);
        const float of_queries = 1 / std::sqrt(static_cast<float>(shape.size));
        for (int64_t i = 0; i < length; ++i) {
            const int64_t token = plan.starts[chunk] + i;
            normalize(keys + i * wide, wide, 1);
            normalize(queries + i * wide, wide, of_queries);
            decay(forget.row(token) + key, constants.dt_bias + key, constants.A[head], decays + i * wide);
            t.beta[i] = sigmoid(to_float(projected.row(token)[shape.channels() + head]));
        }
        return t;
    }

    void decay(const T *f, const float *dt_bias, float A, float *to) const {
        for (int64_t i = 0; i < shape.size; i += LANES) {
            const int64_t count = shape.size - i;
            put(to + i, exp(A * softplus(load(f + i, count) + load(dt_bias + i, count))));
        }
    }

    // Outputs of `length` tokens from `token` on, at most a block, and the head's state h [size, columns] behind them.
    void advance(int64_t token, int64_t length, int64_t head, const Tokens &t, float *h) const {
        const int64_t wide = shape.wide(), columns = shape.columns();
        float *const carried = scratch(CARRIED, (2 * BLOCK + 1) * wide), *const all = carried + 2 * BLOCK * wide;
        float *const left = scratch(LEFT, BLOCK * wide), *const turned = scratch(TURNED, shape.size * BLOCK);
        float *const A = scratch(SCORES, 2 * BLOCK * BLOCK), *const mixed = A + BLOCK * BLOCK;
        float *const recalled = scratch(PRODUCTS, 2 * BLOCK * columns), *const outputs = recalled + length * columns;
        const float one = 1;
        carry(t, length, carried, all);
        relate(t, length, left, A, mixed);
        multiply<float>(2 * length, columns, shape.size, {carried, wide}, {h, columns}, {}, {recalled, columns});
        solve(t, length, A, recalled);
        multiply<float>(length, columns, length, {mixed, BLOCK}, {t.values, columns}, {&one, 0}, {outputs, columns});
        for (int64_t i = 0; i < length; ++i) output(token + i, head, outputs + i * columns);
        transpose(left, wide, length, shape.size, turned, BLOCK);
        multiply<float>(shape.size, columns, length, {turned, BLOCK}, {t.values, columns}, {all, 1}, {h, columns});
    }

    // Keys and then queries with the decays since the block's first token [2·length, wide]; `all` of these decays.
    void carry(const Tokens &t, int64_t length, float *to, float *all) const {
        const int64_t wide = shape.wide();
        for (int64_t c = 0; c < wide; c += LANES) {
            floats decay = splat(1);
            for (int64_t i = 0, at = c; i < length; ++i, at += wide) {
                decay *= load(t.decays + at);
                put(to + at, load(t.keys + at) * decay);
                put(to + length * wide + at, load(t.queries + at) * decay);
            }
            put(all + c, decay);
        }
    }

    // left [length, wide]: each key with the decays behind it. A and mixed [length, BLOCK]: its products with later keys
    // and with its own and later queries, by the decays between; where there are none, mixed is 0.
    void relate(const Tokens &t, int64_t length, float *left, float *A, float *mixed) const {
        const int64_t wide = shape.wide();
        std::fill(mixed, mixed + BLOCK * BLOCK, 0.0f);
        std::copy(t.keys, t.keys + length * wide, left);
        for (int64_t j = 0; j < length; ++j) {
            float *const key = left + j * wide;
            mixed[j * BLOCK + j] = dot(t.queries + j * wide, key, wide);
            for (int64_t i = j + 1; i < length; ++i) {
                floats with_key{}, with_query{};
                for (int64_t c = 0, at = i * wide; c < wide; c += LANES, at += LANES) {
                    const floats decayed = load(key + c) * load(t.decays + at);
                    put(key + c, decayed);
                    with_key += decayed * load(t.keys + at);
                    with_query += decayed * load(t.queries + at);
                }
                A[i * BLOCK + j] = sum(with_key);
                mixed[i * BLOCK + j] = sum(with_query);
            }
        }
    }

    // values ← U: what each wants less what is there, and less what those before it add.
    void solve(const Tokens &t, int64_t length, const float *A, const float *recalled) const {
        const int64_t columns = shape.columns();
        for (int64_t c = 0; c < columns; c += LANES)
            for (int64_t i = 0; i < length; ++i) {
                floats wanted = load(t.values + i * columns + c) - load(recalled + i * columns + c);
                for (int64_t j = 0; j < i; ++j) wanted -= A[i * BLOCK + j] * load(t.values + j * columns + c);
                put(t.values + i * columns + c, t.beta[i] * wanted);
            }
    }

    // y = norm·o / rms(o)·σ(gate) of a token.
    void output(int64_t token, int64_t head, const float *o) const {
        const int64_t first = head * shape.width;
        const T *const z = gate.row(token) + first;
        T *const to = y + token * shape.inner() + first;
        const float scale = 1 / std::sqrt(dot(o, o, shape.width) / static_cast<float>(shape.width) + constants.eps);
        for (int64_t c = 0; c < shape.width; c += LANES) {
            const int64_t count = shape.width - c;
            put(to + c, load(o + c) * scale * load(constants.norm + c, count) * sigmoid(load(z + c, count)), count);
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

// Types are those of numbers.h: `type` of y [T, inner] and of projected [T, channels + heads], forget [T, heads·size] and
// gate [T, inner], each with rows `stride` apart; `state_type` of the states. Strides of the pools count elements from
// slot to slot.
extern "C" void baton_kda_prefill(int type, const void *projected, int64_t stride, const void *forget,
                                  int64_t forget_stride, const void *gate, int64_t gate_stride, const float *taps,
                                  const float *dt_bias, const float *A, const float *norm, float eps, float *conv_pool,
                                  int64_t conv_stride, int state_type, void *state_pool, int64_t state_stride,
                                  int64_t segments, int64_t chunks, const int64_t *slots, const int64_t *first,
                                  const int64_t *starts, const int64_t *saves, const int64_t *saved, void *y,
                                  int64_t heads, int64_t width, int64_t size, int64_t kernel) {
    with_type(type, [&](auto *activation) {
        using T = std::remove_pointer_t<decltype(activation)>;
        Prefill<T>({heads, width, size, kernel}, {taps, dt_bias, A, norm, eps},
                   {segments, chunks, slots, first, starts, saves, saved},
                   {conv_pool, state_type, state_pool, conv_stride, state_stride},
                   {static_cast<const T *>(projected), stride}, {static_cast<const T *>(forget), forget_stride},
                   {static_cast<const T *>(gate), gate_stride}, static_cast<T *>(y))
            .run();
    });
}

BATON_RECORDABLE(baton_kda_prefill)
