// Delta net layers between their input and output projections, for the tokens of decoding rows, as reference.py defines
// them, with one pass over the states.
// A gated delta net has one decay per head, Kimi Delta Attention one per channel of the keys. With D the diagonal
// matrix of the decays:
//   fed = beta·(v − S·(D·k)), where S·(D·k) is the value that the decayed state has stored for k
//   S' = S·D + fed⊗k
//   o = S'·q = S·(D·q) + fed·(k·q)
// Both products with a state need only S, so each row of S is read from memory once.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "delta_net/rule/decay.h"
#include "delta_net/rule/unit.h"
#include "drafts/convolve.h"
#include "runtime/cpp/numbers.h"
#include "runtime/cpp/parallel.h"
#include "runtime/cpu_graph/call.h"
#include "state_pool/keep.h"

namespace baton {
namespace {

constexpr int64_t GRAIN = 16384;  // Minimum state elements per part of a parallel loop.
constexpr int64_t AHEAD = 4096;  // Prefetch the states this many bytes ahead of the one in use.

struct Shape {
    int64_t heads, width, key_heads, size, kernel;

    int64_t inner() const { return heads * width; }
    int64_t keys() const { return key_heads * size; }  // Channels of all queries, and of all keys.
    int64_t channels() const { return inner() + 2 * keys(); }
    int64_t sharing() const { return heads / key_heads; }
};

struct Constants {
    const float *taps, *conv_bias, *dt_bias, *A, *norm;
    float eps;
    float beta_scale;  // The factor of σ(b).
    float lower_bound;  // The lower bound of log decays per channel; 0: unbounded.
};

// The rows of a projection; `stride` counts elements from row to row.
template <class T> struct Rows {
    const T *at;
    int64_t stride;

    const T *row(int64_t index) const { return at + index * stride; }
};

template <class T> struct Projections {
    Rows<T> inputs;  // q and k [key_heads, size], v [heads, width], beta [heads]
    Rows<T> forget;  // [heads], or [heads, size] with a decay per channel
    Rows<T> gate;  // [heads, width]
};

// One decay per head. S·(D·q) = decay·(S·q), so the products with q and k are multiplied with the decay after the sum.
struct ByHead {
    const float *q, *k;
    float decay = 0.0f;

    static constexpr int64_t BUFFERS = 0;
    static int64_t count(int64_t) { return 1; }  // Decays of a head.

    const float *queries() const { return q; }
    const float *keys() const { return k; }
    float decayed(float total) const { return decay * total; }
    float at(int64_t) const { return decay; }
    float lanes_at(int64_t) const { return decay; }

    template <class T>
    void decay_by(const T *forget, const float *dt_bias, float A, float, float *, int64_t) {
        decay = std::exp(A * softplus(to_float(*forget) + *dt_bias));
    }
    template <class V> static V gate(V z) { return silu(z); }
    static float beta(float b) { return 1.0f / (1.0f + std::exp(-b)); }
};

// One decay per channel: q and k are multiplied with the decays before the sums. `buffer` is [BUFFERS, size].
struct ByChannel {
    const float *q, *k;
    const float *decay = nullptr, *decayed_k = nullptr, *decayed_q = nullptr;

    static constexpr int64_t BUFFERS = 3;
    static int64_t count(int64_t size) { return size; }

    const float *queries() const { return decayed_q; }
    const float *keys() const { return decayed_k; }
    float decayed(float total) const { return total; }
    float at(int64_t n) const { return decay[n]; }
    floats lanes_at(int64_t n) const { return load(decay + n); }

    template <class T>
    void decay_by(const T *forget, const float *dt_bias, float A, float lower_bound, float *buffer, int64_t size) {
        float *const to_k = buffer + size, *const to_q = to_k + size;
        for (int64_t i = 0; i < size; i += LANES) {
            const int64_t count = size - i;
            const floats x = load(forget + i, count) + load(dt_bias + i, count);
            put(buffer + i, exp(log_decays(x, A, lower_bound)), count);
        }
        over(size, [&](int64_t i, auto v) {
            using V = decltype(v);
            put(to_k + i, get<V>(k + i) * get<V>(buffer + i));
            put(to_q + i, get<V>(q + i) * get<V>(buffer + i));
        });
        decay = buffer, decayed_k = to_k, decayed_q = to_q;
    }
    template <class V> static V gate(V z) { return sigmoid(z); }
    static float beta(float b) { return sigmoid(b); }
};

// The inputs of one head for one token. x [width] is replaced by the output.
template <class Decay> struct Token {
    float *x;
    const float *k;
    Decay decay;
    float kq, beta;  // kq: k·q
    uint32_t place;  // The hash of this plus an element's index in the head seeds its stochastic rounding.
};

// Advance one row of a state, at [size] ← at·D + beta·(x − at·D·k)·k, and return at·q.
template <int SIZE, class S, class Decay>
__attribute__((always_inline)) inline float advance(S *at, const Token<Decay> &token, float x, uint32_t place,
                                                    words lanes, int64_t any_size) {
    const int64_t size = SIZE ? SIZE : any_size, whole = size / LANES * LANES;
    const Decay decay = token.decay;  // A copy: the compiler would read it again after each store to the state.
    const float *const k = token.k, *const keys = decay.keys(), *const queries = decay.queries();
    floats with_k{}, with_q{};
#pragma GCC unroll 8
    for (int64_t n = 0; n < whole; n += LANES) {
        __builtin_prefetch(at + n + AHEAD / sizeof(S), 0, SECOND_CACHE);
        const floats h = load(at + n);
        with_k += h * load(keys + n);
        with_q += h * load(queries + n);
    }
    float recalled = sum(with_k), read = sum(with_q);
    for (int64_t n = whole; n < size; n++) {
        recalled += to_float(at[n]) * keys[n];
        read += to_float(at[n]) * queries[n];
    }
    const float fed = token.beta * (x - decay.decayed(recalled));
#pragma GCC unroll 8
    for (int64_t n = 0; n < whole; n += LANES)
        keep(at + n, load(at + n) * decay.lanes_at(n) + load(k + n) * fed, lanes + (place + static_cast<uint32_t>(n)));
    for (int64_t n = whole; n < size; n++)
        keep(at + n, to_float(at[n]) * decay.at(n) + k[n] * fed, place + static_cast<uint32_t>(n));
    return decay.decayed(read) + fed * token.kq;
}

// Advance one head [width, size] by `count` tokens. After `stored` tokens the state stays as it is, and further tokens
// continue on a copy, `draft` [size], row by row. SIZE: `size` if known at compile time, else 0.
template <int SIZE, class S, class Decay>
void update(S *state, S *draft, const Token<Decay> *tokens, int64_t stored, int64_t count, int64_t width,
            int64_t any_size) {
    const int64_t size = SIZE ? SIZE : any_size;
    words lanes;
    for (int lane = 0; lane < LANES; lane++) lanes[lane] = lane;
    const auto one = [=](S *at, const Token<Decay> &token, int64_t p) {
        const uint32_t place = token.place + static_cast<uint32_t>(p * size);
        token.x[p] = advance<SIZE>(at, token, token.x[p], place, lanes, any_size);
    };
    for (int64_t p = 0; p < width; p++, state += size) {
        if (is_first_in_page(state, size * sizeof(S))) __builtin_prefetch(state + AHEAD / sizeof(S));
        for (int64_t t = 0; t < stored; t++) one(state, tokens[t], p);
        if (stored == count) continue;
        std::memcpy(draft, state, size * sizeof(S));
        for (int64_t t = stored; t < count; t++) one(draft, tokens[t], p);
    }
}

template <class S, class Decay>
void update(const Shape &s, S *state, const Token<Decay> *tokens, int64_t stored, int64_t count) {
    S *const draft = reinterpret_cast<S *>(scratch(1, s.size));
    if (s.size == 128) return update<128>(state, draft, tokens, stored, count, s.width, s.size);
    if (s.size == 64) return update<64>(state, draft, tokens, stored, count, s.width, s.size);
    update<0>(state, draft, tokens, stored, count, s.width, s.size);
}

// The decode step of all rows. T is the type of the projections and of y, S is the type of the states.
template <class T, class S, class Decay>
struct Net {
    Shape s;
    Constants c;
    Feed<T> feed;  // A token in a ring: inputs [channels], beta [heads], and forget.
    Projections<T> p;
    float *conv_pool;
    int64_t conv_stride;
    S *state_pool;
    int64_t state_stride;
    const int64_t *slots, *positions;
    T *y;

    int64_t in_ring() const { return s.channels() + s.heads; }  // Columns of a ring before those of `forget`.

    // The index of a row's t-th token in the projections, if it is not replayed.
    int64_t fed(int64_t row, int64_t t) const { return feed.offset(row) + t - feed.replayed(row); }
    const T *inputs_of(int64_t row, int64_t t) const {
        return t < feed.replayed(row) ? feed.kept(row, t) : p.inputs.row(fed(row, t));
    }
    const T *forget_of(int64_t row, int64_t t) const {
        return t < feed.replayed(row) ? feed.kept(row, t) + in_ring() : p.forget.row(fed(row, t));
    }

    // Convolve `count` channels of each of a row's tokens; the results of token t go to `to` + t·stride.
    void convolve(int64_t row, int64_t channel, int64_t count, float *to, int64_t stride) const {
        const Convolution all{s.kernel, s.channels(), c.taps, c.conv_bias};
        const auto inputs = [=](int64_t t) { return inputs_of(row, t); };
        all.run(feed, row, channel, count, inputs, conv_pool + slots[row] * conv_stride, 2, to, stride);
    }

    // Compute one key head of one row, and all heads that use it.
    void key_head(int64_t row, int64_t key_head) const {
        const int64_t count = feed.tokens(row), buffers = Decay::BUFFERS * s.size;
        float *const q = scratch(0, count * (2 * s.size + s.width + buffers)), *const k = q + count * s.size;
        float *const x = k + count * s.size, *const buffer = x + count * s.width;
        convolve(row, key_head * s.size, s.size, q, s.size);
        convolve(row, s.keys() + key_head * s.size, s.size, k, s.size);
        Token<Decay> tokens[MOST_TOKENS];
        for (int64_t t = 0; t < count; t++) {
            float *const queries = q + t * s.size, *const keys = k + t * s.size;
            normalize(queries, s.size, 1.0f / std::sqrt(static_cast<float>(s.size)));
            normalize(keys, s.size, 1.0f);
            tokens[t] = {x + t * s.width, keys, {queries, keys}, dot(keys, queries, s.size), 0.0f, 0};
        }
        for (int64_t i = 0; i < s.sharing(); i++) head(row, key_head * s.sharing() + i, tokens, x, buffer);
    }

    // Compute one head of one row: update its state and write its part of y.
    // tokens: complete but for what the head does not share with the others of its key head. x, buffer: [tokens, …].
    void head(int64_t row, int64_t head, Token<Decay> *tokens, float *x, float *buffer) const {
        const int64_t first = head * s.width, count = feed.tokens(row), replayed = feed.replayed(row);
        const int64_t decays = Decay::count(s.size);
        convolve(row, 2 * s.keys() + first, s.width, x, s.width);
        for (int64_t t = 0; t < count; t++) {
            tokens[t].decay.decay_by(forget_of(row, t) + head * decays, c.dt_bias + head * decays, c.A[head],
                                     c.lower_bound, buffer + t * Decay::BUFFERS * s.size, s.size);
            tokens[t].beta = c.beta_scale * Decay::beta(to_float(inputs_of(row, t)[s.channels() + head]));
            const uint32_t position = mix(static_cast<uint32_t>(positions[row] + t - replayed));
            tokens[t].place = position + static_cast<uint32_t>(first * s.size);
        }
        update(s, state_pool + slots[row] * state_stride + first * s.size, tokens, feed.stored(row), count);
        for (int64_t t = replayed; t < count; t++) {
            const int64_t token = fed(row, t);
            norm(p.gate.row(token) + first, tokens[t].x, y + token * s.inner() + first);
        }
    }

    // Write norm·x / rms(x)·gate(z) of one head to `to`.
    void norm(const T *z, const float *x, T *to) const {
        const float scale = 1.0f / std::sqrt(dot(x, x, s.width) / static_cast<float>(s.width) + c.eps);
        over(s.width, [&](int64_t i, auto v) {
            using V = decltype(v);
            put(to + i, get<V>(x + i) * scale * get<V>(c.norm + i) * Decay::gate(get<V>(z + i)));
        });
    }

    void run(int64_t rows) const {
        const int64_t numbers = s.sharing() * s.width * s.size;
        parallel_for(rows * s.key_heads, GRAIN / numbers + 1, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; i++) key_head(i / s.key_heads, i % s.key_heads);
        });
        feed.keep(rows, 0, in_ring(), [this](int64_t token) { return p.inputs.row(token); });
        feed.keep(rows, in_ring(), feed.columns - in_ring(), [this](int64_t token) { return p.forget.row(token); });
    }
};

// Run Net with the types that `type` and `state_type` name. given(T *) returns the Projections<T>.
template <class Decay, class Given>
void decode(const Shape &shape, const Constants &constants, int type, Given given, float *conv_pool,
            int64_t conv_stride, int state_type, void *state_pool, int64_t state_stride, const int64_t *slots,
            const int64_t *positions, void *y, const int64_t *begins, const int64_t *offsets, const int64_t *rings,
            void *ring, int64_t ring_stride, int64_t rows) {
    with_type(type, [=](auto *t) {
        with_type(state_type, [=](auto *h) {
            using T = std::remove_pointer_t<decltype(t)>;
            using S = std::remove_pointer_t<decltype(h)>;
            const int64_t columns = shape.channels() + shape.heads * (1 + Decay::count(shape.size));
            Net<T, S, Decay>{shape,
                             constants,
                             {begins, offsets, rings, static_cast<T *>(ring), ring_stride, columns},
                             given(t),
                             conv_pool,
                             conv_stride,
                             static_cast<S *>(state_pool),
                             state_stride,
                             slots,
                             positions,
                             static_cast<T *>(y)}
                .run(rows);
        });
    });
}

}  // namespace
}  // namespace baton

// Parameters of both functions:
// type, state_type: values of the enum Type in numbers.h; `type` is the type of the projections and of y.
// taps: [kernel, channels]. A: [heads]. norm: [width]. All constants are float32.
// conv_pool: float32 [slots, kernel - 1, channels]. state_pool: [slots, heads, width, size].
// slots, positions: [rows], the positions of the first token that each row feeds. y: [fed tokens, heads·width].
// begins, offsets, rings, ring: see Feed.
// Each stride counts elements from token to token of a projection, or from slot to slot of a pool.

// Compute reference.delta_decode: one decay per head, and SiLU of the gate.
// projected: [rows, inner + channels + 2·heads], with the columns gate [inner], inputs [channels], betas [heads] and
// forget [heads]. conv_bias: [channels] or null. dt_bias: [heads]. key_heads divides heads.
extern "C" void baton_delta_decode(int type, const void *projected, int64_t stride, const float *taps,
                                   const float *conv_bias, const float *dt_bias, const float *A, const float *norm,
                                   float eps, float beta_scale, float *conv_pool, int64_t conv_stride, int state_type,
                                   void *state_pool, int64_t state_stride, const int64_t *slots, const int64_t *positions, void *y,
                                   const int64_t *begins, const int64_t *offsets, const int64_t *rings, void *ring,
                                   int64_t ring_stride, int64_t rows, int64_t heads, int64_t width, int64_t key_heads,
                                   int64_t size, int64_t kernel) {
    using namespace baton;
    const Shape shape{heads, width, key_heads, size, kernel};
    const auto given = [=](auto *t) {
        using T = std::remove_pointer_t<decltype(t)>;
        const T *const at = static_cast<const T *>(projected), *const inputs = at + shape.inner();
        return Projections<T>{{inputs, stride}, {inputs + shape.channels() + heads, stride}, {at, stride}};
    };
    decode<ByHead>(shape, {taps, conv_bias, dt_bias, A, norm, eps, beta_scale, 0}, type, given, conv_pool, conv_stride, state_type,
                   state_pool, state_stride, slots, positions, y, begins, offsets, rings, ring, ring_stride, rows);
}

// Compute reference.kda_decode: one decay per channel of the keys, and a sigmoid of the gate.
// projected: [rows, channels + heads], with the columns inputs [channels] and betas [heads].
// forget: [rows, heads·size]. gate: [rows, heads·width]. dt_bias: [heads·size].
extern "C" void baton_kda_decode(int type, const void *projected, int64_t stride, const void *forget,
                                 int64_t forget_stride, const void *gate, int64_t gate_stride, const float *taps,
                                 const float *dt_bias, const float *A, const float *norm, float eps, float lower_bound,
                                 float *conv_pool, int64_t conv_stride, int state_type, void *state_pool, int64_t state_stride,
                                 const int64_t *slots, const int64_t *positions, void *y, const int64_t *begins,
                                 const int64_t *offsets, const int64_t *rings, void *ring, int64_t ring_stride,
                                 int64_t rows, int64_t heads, int64_t width, int64_t size, int64_t kernel) {
    using namespace baton;
    const Shape shape{heads, width, heads, size, kernel};
    const auto given = [=](auto *t) {
        using T = std::remove_pointer_t<decltype(t)>;
        return Projections<T>{{static_cast<const T *>(projected), stride},
                              {static_cast<const T *>(forget), forget_stride},
                              {static_cast<const T *>(gate), gate_stride}};
    };
    decode<ByChannel>(shape, {taps, nullptr, dt_bias, A, norm, eps, 1, lower_bound}, type, given, conv_pool, conv_stride, state_type,
                      state_pool, state_stride, slots, positions, y, begins, offsets, rings, ring, ring_stride, rows);
}

BATON_RECORDABLE(baton_delta_decode)
BATON_RECORDABLE(baton_kda_decode)
