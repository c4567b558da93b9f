// The Mamba-2 mixer between its input and output projections, for the tokens of decoding rows, as reference.py defines
// it, with one pass over the states.
#include <algorithm>
#include <type_traits>

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
    int64_t heads, width, groups, state, kernel, norm_groups;

    int64_t inner() const { return heads * width; }
    int64_t shared() const { return 2 * groups * state; }  // Channels of B and C.
    int64_t channels() const { return inner() + shared(); }
};

struct Constants {
    const float *taps, *conv_bias, *A, *D, *dt_bias, *norm;
    float dt_low, dt_high, eps;
    bool norm_first;  // The norm comes before the gate; false if norm is null.
};

// The inputs of one head for one token. x [width] is replaced by the output.
struct Token {
    float *x;
    const float *B, *C;
    float decay, dt;
    uint32_t place;  // The hash of this plus an element's index in the head seeds its stochastic rounding.
};

// Advance one row of a state, at [size] ← decay·at + fed·B, and return at·C.
// Even and odd vectors have an accumulator each, so that two chains of additions overlap.
template <int SIZE, class S>
__attribute__((always_inline)) inline float advance(S *at, const Token &token, float fed, uint32_t place, words lanes,
                                                    int64_t any_size) {
    const int64_t size = SIZE ? SIZE : any_size, whole = size / LANES * LANES;
    const float *const B = token.B, *const C = token.C;
    const float decay = token.decay;  // A copy: the compiler would read it again after each store to the state.
    floats even{}, odd{};
#pragma GCC unroll 8
    for (int64_t n = 0; n < whole; n += LANES) {
        __builtin_prefetch(at + n + AHEAD / sizeof(S), 0, SECOND_CACHE);
        const floats h = load(at + n) * decay + load(B + n) * fed;
        keep(at + n, h, lanes + (place + static_cast<uint32_t>(n)));
        (n / LANES % 2 ? odd : even) += h * load(C + n);
    }
    float total = sum(even + odd);
    for (int64_t n = whole; n < size; n++) {
        const float h = to_float(at[n]) * decay + B[n] * fed;
        keep(at + n, h, place + static_cast<uint32_t>(n));
        total += h * C[n];
    }
    return total;
}

// Advance one head by `count` tokens: state [width, size] ← decay·state + dt·x⊗B; x [width] ← state·C + D·x.
// After `stored` tokens the state stays as it is, and further tokens continue on a copy, `draft` [size], row by row.
// SIZE: `size` if known at compile time, else 0.
template <int SIZE, class S>
void update(S *state, S *draft, const Token *tokens, int64_t stored, int64_t count, float D, int64_t width,
            int64_t any_size) {
    const int64_t size = SIZE ? SIZE : any_size;
    words lanes;
    for (int lane = 0; lane < LANES; lane++) lanes[lane] = lane;
    const auto one = [=](S *at, const Token &token, int64_t p) {
        const float x = token.x[p];
        const uint32_t place = token.place + static_cast<uint32_t>(p * size);
        token.x[p] = advance<SIZE>(at, token, token.dt * x, place, lanes, any_size) + D * x;
    };
    for (int64_t p = 0; p < width; p++, state += size) {
        if (is_first_in_page(state, size * sizeof(S))) __builtin_prefetch(state + AHEAD / sizeof(S));
        for (int64_t t = 0; t < stored; t++) one(state, tokens[t], p);
        if (stored == count) continue;
        std::memcpy(draft, state, size * sizeof(S));
        for (int64_t t = stored; t < count; t++) one(draft, tokens[t], p);
    }
}

template <class S>
void update(const Shape &s, S *state, const Token *tokens, int64_t stored, int64_t count, float D) {
    S *const draft = reinterpret_cast<S *>(scratch(0, s.state));
    if (s.state == 128) return update<128>(state, draft, tokens, stored, count, D, s.width, s.state);
    if (s.state == 64) return update<64>(state, draft, tokens, stored, count, D, s.width, s.state);
    update<0>(state, draft, tokens, stored, count, D, s.width, s.state);
}

// y *= silu(z).
template <class T>
void gate(const T *z, float *y, int64_t width) {
    over(width, [=](int64_t i, auto v) { put(y + i, get<decltype(v)>(y + i) * silu(get<decltype(v)>(z + i))); });
}

float sum_of_squares(const float *y, int64_t width) {
    floats squares{};
    float rest = 0.0f;
    over(width, [&](int64_t i, auto v) {
        using V = decltype(v);
        if constexpr (sizeof(V) == sizeof(floats))
            squares += get<V>(y + i) * get<V>(y + i);
        else
            rest += get<V>(y + i) * get<V>(y + i);
    });
    return sum(squares) + rest;
}

// The decode step of all rows. T: the type of projected and y; S: the type of the states.
template <class T, class S>
struct Mixer {
    Shape s;
    Constants c;
    Feed<T> feed;  // A token in a ring: x, B, C and dt.
    const T *projected;  // A token: z [inner], x [inner], B [groups, state], C [groups, state], dt [heads].
    int64_t projected_stride;
    float *conv_pool;
    int64_t conv_stride;
    S *state_pool;
    int64_t state_stride;
    const int64_t *slots, *positions;
    T *y;
    int64_t y_stride;
    // Intermediate results of all tokens. shared: B and C, [tokens, shared()]. gated: the norm's inputs, [tokens,
    // inner]. squares: the sums of squares for the norm, [tokens, heads].
    float *const shared, *const gated, *const squares;

    // The gate and the inputs of a row's t-th token. A replayed token needs no gate.
    const T *gate_of(int64_t row, int64_t t) const {
        return projected + (feed.offset(row) + t - feed.replayed(row)) * projected_stride;
    }
    const T *inputs_of(int64_t row, int64_t t) const {
        return t < feed.replayed(row) ? feed.kept(row, t) : gate_of(row, t) + s.inner();
    }

    // Convolve `count` channels of each of a row's tokens; the results of token t go to `to` + t·stride.
    void convolve(int64_t row, int64_t channel, int64_t count, float *to, int64_t stride) const {
        const Convolution all{s.kernel, s.channels(), c.taps, c.conv_bias};
        const auto inputs = [=](int64_t t) { return inputs_of(row, t); };
        all.run(feed, row, channel, count, inputs, conv_pool + slots[row] * conv_stride, 1, to, stride);
    }

    // Convolve the B and C of a row's tokens, which all heads of a group share.
    void share(int64_t row) const {
        const FlushDenormals flush;
        convolve(row, s.inner(), s.shared(), shared + feed.begin(row) * s.shared(), s.shared());
    }

    // Convolve x of one head of a row, advance its state, and apply the gate.
    void head(int64_t row, int64_t head) const {
        const int64_t first = head * s.width, group = head / (s.heads / s.groups), count = feed.tokens(row);
        const int64_t begin = feed.begin(row), replayed = feed.replayed(row);
        float *const values = gated + begin * s.inner() + first;
        convolve(row, first, s.width, values, s.inner());
        Token tokens[MOST_TOKENS];
        for (int64_t t = 0; t < count; t++) {
            float dt = softplus(to_float(inputs_of(row, t)[s.channels() + head]) + c.dt_bias[head]);
            dt = std::min(std::max(dt, c.dt_low), c.dt_high);
            const float *B = shared + (begin + t) * s.shared() + group * s.state;
            const uint32_t position = mix(static_cast<uint32_t>(positions[row] + t - replayed));
            tokens[t] = {values + t * s.inner(),      B,  B + s.groups * s.state,
                         std::exp(dt * c.A[head]), dt, position + static_cast<uint32_t>(first * s.state)};
        }
        update(s, state_pool + slots[row] * state_stride + first * s.state, tokens, feed.stored(row), count, c.D[head]);
        for (int64_t t = replayed; t < count; t++) {
            const T *const z = gate_of(row, t) + first;
            if (!c.norm_first) gate(z, tokens[t].x, s.width);
            squares[(begin + t) * s.heads + head] = sum_of_squares(tokens[t].x, s.width);
            if (c.norm_first) gate(z, tokens[t].x, s.width);
        }
    }

    // Apply the norm to one token's results, and write them to y. Norm and gate are both multiplications, so their order
    // matters only for the sums of squares, which head() has computed.
    void norm(const float *results, const float *squares_of, T *to) const {
        if (!c.norm) return over(s.inner(), [&](int64_t i, auto v) { put(to + i, get<decltype(v)>(results + i)); });
        const int64_t part = s.inner() / s.norm_groups, heads = s.heads / s.norm_groups;
        for (int64_t group = 0; group < s.norm_groups; group++) {
            float total = 0.0f;
            for (int64_t head = 0; head < heads; head++) total += squares_of[group * heads + head];
            const float scale = 1.0f / std::sqrt(total / static_cast<float>(part) + c.eps);
            over(part, [&](int64_t i, auto v) {
                using V = decltype(v);
                const int64_t at = group * part + i;
                put(to + at, get<V>(results + at) * scale * get<V>(c.norm + at));
            });
        }
    }

    void norm(int64_t row) const {
        const FlushDenormals flush;
        const int64_t first = feed.begin(row) + feed.replayed(row);
        for (int64_t i = 0; i < feed.fed(row); i++)
            norm(gated + (first + i) * s.inner(), squares + (first + i) * s.heads, y + (feed.offset(row) + i) * y_stride);
    }

    // B, C and the norm are small compared to the states, so the calling thread computes them alone.
    void run(int64_t rows) const {
        for (int64_t row = 0; row < rows; row++) share(row);
        parallel_for(rows * s.heads, GRAIN / (s.width * s.state) + 1, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; i++) head(i / s.heads, i % s.heads);
        });
        for (int64_t row = 0; row < rows; row++) norm(row);
        const auto inputs = [this](int64_t token) { return projected + token * projected_stride + s.inner(); };
        feed.keep(rows, 0, feed.columns, inputs);
    }
};

}  // namespace
}  // namespace baton

// Compute reference.mixer_decode. Strides are between rows or slots, in elements.
// projected: [rows, inner + channels + heads] and y: [rows, inner], of dtype `type`.
// taps: [kernel, channels]; conv_bias: [channels] or null; A, D, dt_bias: [heads]; norm: [inner] or null; all float32.
// norm_first: the norm comes before the gate.
// conv_pool: float32 [slots, kernel - 1, channels].
// state_pool: [slots, heads, width, state], of dtype state_type.
// positions: [rows], the absolute position of the first token that each row feeds.
// begins, offsets, rings, ring: see Feed; `tokens` is the number of all tokens, replayed ones included.
// groups and norm_groups divide heads. scratch: float32 [tokens, inner + 2·groups·state + heads].
extern "C" void baton_mixer_decode(int type, const void *projected, int64_t projected_stride, const float *taps,
                                   const float *conv_bias, const float *A, const float *D, const float *dt_bias,
                                   const float *norm, float dt_low, float dt_high, float eps, int norm_first,
                                   float *conv_pool, int64_t conv_stride, int state_type, void *state_pool,
                                   int64_t state_stride, const int64_t *slots, const int64_t *positions, void *y,
                                   int64_t y_stride, const int64_t *begins, const int64_t *offsets,
                                   const int64_t *rings, void *ring, int64_t ring_stride, int64_t rows, int64_t tokens,
                                   int64_t heads, int64_t width, int64_t groups, int64_t state, int64_t kernel,
                                   int64_t norm_groups, float *scratch) {
    using namespace baton;
    with_type(type, [=](auto *t) {
        with_type(state_type, [=](auto *h) {
            using T = std::remove_pointer_t<decltype(t)>;
            using S = std::remove_pointer_t<decltype(h)>;
            const Shape s{heads, width, groups, state, kernel, norm_groups};
            float *gated = scratch + tokens * s.shared();
            Mixer<T, S>{s,
                        {taps, conv_bias, A, D, dt_bias, norm, dt_low, dt_high, eps, norm && norm_first},
                        {begins, offsets, rings, static_cast<T *>(ring), ring_stride, s.channels() + s.heads},
                        static_cast<const T *>(projected),
                        projected_stride,
                        conv_pool,
                        conv_stride,
                        static_cast<S *>(state_pool),
                        state_stride,
                        slots,
                        positions,
                        static_cast<T *>(y),
                        y_stride,
                        scratch,
                        gated,
                        gated + tokens * s.inner()}
                .run(rows);
        });
    });
}

BATON_RECORDABLE(baton_mixer_decode)
