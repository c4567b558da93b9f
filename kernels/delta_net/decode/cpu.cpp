// A gated delta net's decode of a layer: everything between its two projections, with one pass over the states. See
// reference.py. Since o = S'·q = e^g·S·q + fed·(k·q), both products of a state's row are taken of what was read.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "conv1d/update.h"
#include "delta_net/gated/unit.h"
#include "runtime/cpp/numbers.h"
#include "runtime/cpp/parallel.h"
#include "runtime/cpu_graph/call.h"
#include "state_pool/keep.h"

namespace baton {
namespace {

constexpr int64_t GRAIN = 16384;  // Numbers of the states that are worth another thread.
constexpr int64_t AHEAD = 4096;   // Bytes of them that are on their way from memory.

struct Shape {
    int64_t heads, width, key_heads, size, kernel;

    int64_t inner() const { return heads * width; }
    int64_t keys() const { return key_heads * size; }  // Channels of the queries, and of the keys.
    int64_t channels() const { return inner() + 2 * keys(); }
    int64_t sharing() const { return heads / key_heads; }
};

struct Constants {
    const float *taps, *conv_bias, *dt_bias, *A, *norm;
    float eps;
};

// What the heads of a key head share, and what each has of its own.
struct Step {
    const float *q, *k;
    float kq, decay, beta;
    uint32_t place;  // Of the state's first number, by which the chances go.
};

// state [width, size] ← decay·state + beta·(x − decay·state·k)⊗k; x [width] ← state·q. SIZE is `size` where it is
// known, else 0.
template <int SIZE, class S>
void update(S *state, float *x, const Step &step, int64_t width, int64_t any_size) {
    const int64_t size = SIZE ? SIZE : any_size, whole = size / LANES * LANES;
    const float *const q = step.q, *const k = step.k;
    const float decay = step.decay;
    uint32_t place = step.place;
    words lanes;
    for (int lane = 0; lane < LANES; lane++) lanes[lane] = lane;
    for (int64_t p = 0; p < width; p++, state += size, place += static_cast<uint32_t>(size)) {
        floats with_k{}, with_q{};
#pragma GCC unroll 8
        for (int64_t n = 0; n < whole; n += LANES) {
            __builtin_prefetch(state + n + AHEAD / sizeof(S), 0, SECOND_CACHE);
            const floats h = load(state + n);
            with_k += h * load(k + n);
            with_q += h * load(q + n);
        }
        float recalled = sum(with_k), read = sum(with_q);
        for (int64_t n = whole; n < size; n++) {
            recalled += to_float(state[n]) * k[n];
            read += to_float(state[n]) * q[n];
        }
        const float fed = step.beta * (x[p] - decay * recalled);
#pragma GCC unroll 8
        for (int64_t n = 0; n < whole; n += LANES)
            keep(state + n, load(state + n) * decay + load(k + n) * fed, lanes + (place + static_cast<uint32_t>(n)));
        for (int64_t n = whole; n < size; n++)
            keep(state + n, to_float(state[n]) * decay + k[n] * fed, place + static_cast<uint32_t>(n));
        x[p] = decay * read + fed * step.kq;
    }
}

template <class S> void update(const Shape &s, S *state, float *x, const Step &step) {
    if (s.size == 128) return update<128>(state, x, step, s.width, s.size);
    if (s.size == 64) return update<64>(state, x, step, s.width, s.size);
    update<0>(state, x, step, s.width, s.size);
}

// T: of projected and y; S: of the states.
template <class T, class S>
struct Net {
    Shape s;
    Constants c;
    const T *projected;  // A row: z [inner], q and k [key_heads, size], v [inner], b [heads], a [heads].
    int64_t projected_stride;
    float *conv_pool;
    int64_t conv_stride;
    S *state_pool;
    int64_t state_stride;
    const int64_t *slots, *positions;
    T *y;
    int64_t y_stride;

    void convolve(int64_t row, int64_t channel, int64_t count, float *to) const {
        baton::convolve(s.kernel, s.channels(), projected + row * projected_stride + s.inner() + channel,
                        c.taps + channel, c.conv_bias ? c.conv_bias + channel : nullptr,
                        conv_pool + slots[row] * conv_stride + channel, to, count);
    }

    // A key head of a row, and the heads that use it.
    void key_head(int64_t row, int64_t key_head) const {
        float *const q = scratch(0, 2 * s.size + s.width), *const k = q + s.size, *const x = k + s.size;
        convolve(row, key_head * s.size, s.size, q);
        convolve(row, s.keys() + key_head * s.size, s.size, k);
        normalize(q, s.size, 1.0f / std::sqrt(static_cast<float>(s.size)));
        normalize(k, s.size, 1.0f);
        Step step{q, k, dot(k, q, s.size), 0.0f, 0.0f, 0};
        for (int64_t i = 0; i < s.sharing(); i++) head(row, key_head * s.sharing() + i, x, step);
    }

    void head(int64_t row, int64_t head, float *x, Step &step) const {
        const T *const gates = projected + row * projected_stride + s.inner() + s.channels() + head;
        const int64_t first = head * s.width;
        convolve(row, 2 * s.keys() + first, s.width, x);
        step.beta = 1.0f / (1.0f + std::exp(-to_float(gates[0])));
        step.decay = std::exp(c.A[head] * softplus(to_float(gates[s.heads]) + c.dt_bias[head]));
        step.place = mix(static_cast<uint32_t>(positions[row])) + static_cast<uint32_t>(first * s.size);
        update(s, state_pool + slots[row] * state_stride + first * s.size, x, step);
        norm(projected + row * projected_stride + first, x, y + row * y_stride + first);
    }

    // to = norm·x / rms(x)·silu(z) of a head.
    void norm(const T *z, const float *x, T *to) const {
        const float scale = 1.0f / std::sqrt(dot(x, x, s.width) / static_cast<float>(s.width) + c.eps);
        over(s.width, [&](int64_t i, auto v) {
            using V = decltype(v);
            put(to + i, get<V>(x + i) * scale * get<V>(c.norm + i) * silu(get<V>(z + i)));
        });
    }

    void run(int64_t rows) const {
        const int64_t numbers = s.sharing() * s.width * s.size;
        parallel_for(rows * s.key_heads, GRAIN / numbers + 1, [&](int64_t begin, int64_t end) {
            const FlushDenormals flush;  // Here, for the pool's threads have settings of their own.
            for (int64_t i = begin; i < end; i++) key_head(i / s.key_heads, i % s.key_heads);
        });
    }
};

}  // namespace
}  // namespace baton

// projected: [rows, 2·inner + 2·key_heads·size + 2·heads] and y: [rows, inner], of `type`, rows `stride` apart. taps:
// [kernel, channels]; conv_bias: [channels] or null; dt_bias, A: [heads]; norm: [width]; all float32. conv_pool: float32
// [slots, kernel - 1, channels] and state_pool: of `state_type`, [slots, heads, width, size], slots `stride` apart.
// positions: [rows], of the tokens. key_heads divides heads.
extern "C" void baton_delta_decode(
    int type, const void *projected, int64_t projected_stride, const float *taps, const float *conv_bias,
    const float *dt_bias, const float *A, const float *norm, float eps, float *conv_pool, int64_t conv_stride,
    int state_type, void *state_pool, int64_t state_stride, const int64_t *slots, const int64_t *positions, void *y,
    int64_t y_stride, int64_t rows, int64_t heads, int64_t width, int64_t key_heads, int64_t size, int64_t kernel
) {
    using namespace baton;
    with_type(type, [=](auto *t) {
        with_type(state_type, [=](auto *h) {
            using T = std::remove_pointer_t<decltype(t)>;
            using S = std::remove_pointer_t<decltype(h)>;
            Net<T, S>{{heads, width, key_heads, size, kernel},
                      {taps, conv_bias, dt_bias, A, norm, eps},
                      static_cast<const T *>(projected), projected_stride, conv_pool, conv_stride,
                      static_cast<S *>(state_pool), state_stride, slots, positions, static_cast<T *>(y), y_stride}
                .run(rows);
        });
    });
}

BATON_RECORDABLE(baton_delta_decode)
