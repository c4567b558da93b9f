// Kimi Delta Attention's decode of a layer: everything between its projections, with one pass over the states. See
// reference.py. With D the diagonal of decays, o = S'·q = S·(D·q) + fed·(k·q) and what S·D recalls by k is S·(D·k), so
// both products of a state's row are taken of what was read.
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
    int64_t heads, width, size, kernel;

    int64_t inner() const { return heads * width; }
    int64_t keys() const { return heads * size; }  // Channels of the queries, and of the keys.
    int64_t channels() const { return inner() + 2 * keys(); }
};

struct Constants {
    const float *taps, *dt_bias, *A, *norm;
    float eps;
};

// Of a head: k and the decays, and with these both k and q.
struct Step {
    const float *k, *decay, *decayed_k, *decayed_q;
    float kq, beta;
    uint32_t place;  // Of the state's first number, by which the chances go.
};

// state [width, size] ← state·D + beta·(x − state·D·k)⊗k; x [width] ← state·q. SIZE is `size` where it is known, else 0.
template <int SIZE, class S>
void update(S *state, float *x, const Step &step, int64_t width, int64_t any_size) {
    const int64_t size = SIZE ? SIZE : any_size, whole = size / LANES * LANES;
    const float *const k = step.k, *const decay = step.decay;
    uint32_t place = step.place;
    words lanes;
    for (int lane = 0; lane < LANES; lane++) lanes[lane] = lane;
    for (int64_t p = 0; p < width; p++, state += size, place += static_cast<uint32_t>(size)) {
        floats with_k{}, with_q{};
#pragma GCC unroll 8
        for (int64_t n = 0; n < whole; n += LANES) {
            __builtin_prefetch(state + n + AHEAD / sizeof(S), 0, SECOND_CACHE);
            const floats h = load(state + n);
            with_k += h * load(step.decayed_k + n);
            with_q += h * load(step.decayed_q + n);
        }
        float recalled = sum(with_k), read = sum(with_q);
        for (int64_t n = whole; n < size; n++) {
            recalled += to_float(state[n]) * step.decayed_k[n];
            read += to_float(state[n]) * step.decayed_q[n];
        }
        const float fed = step.beta * (x[p] - recalled);
#pragma GCC unroll 8
        for (int64_t n = 0; n < whole; n += LANES)
            keep(state + n, load(state + n) * load(decay + n) + load(k + n) * fed,
                 lanes + (place + static_cast<uint32_t>(n)));
        for (int64_t n = whole; n < size; n++)
            keep(state + n, to_float(state[n]) * decay[n] + k[n] * fed, place + static_cast<uint32_t>(n));
        x[p] = read + fed * step.kq;
    }
}

template <class S> void update(const Shape &s, S *state, float *x, const Step &step) {
    if (s.size == 128) return update<128>(state, x, step, s.width, s.size);
    if (s.size == 64) return update<64>(state, x, step, s.width, s.size);
    update<0>(state, x, step, s.width, s.size);
}

// The rows of a projection, `stride` apart.
template <class T> struct Rows {
    const T *at;
    int64_t stride;

    const T *row(int64_t index) const { return at + index * stride; }
};

// T: of what is projected and y; S: of the states.
template <class T, class S>
struct Net {
    Shape s;
    Constants c;
    Rows<T> projected, forget, gate;  // q and k [heads, size], v [inner], b [heads]; [heads, size]; [inner].
    float *conv_pool;
    int64_t conv_stride;
    S *state_pool;
    int64_t state_stride;
    const int64_t *slots, *positions;
    T *y;

    void convolve(int64_t row, int64_t channel, int64_t count, float *to) const {
        baton::convolve(s.kernel, s.channels(), projected.row(row) + channel, c.taps + channel, nullptr,
                        conv_pool + slots[row] * conv_stride + channel, to, count);
    }

    void head(int64_t row, int64_t head) const {
        const int64_t key = head * s.size, first = head * s.width;
        float *const q = scratch(0, 4 * s.size + s.width), *const k = q + s.size, *const decay = k + s.size;
        float *const decayed_k = decay + s.size, *const x = decayed_k + s.size;
        convolve(row, key, s.size, q);
        convolve(row, s.keys() + key, s.size, k);
        convolve(row, 2 * s.keys() + first, s.width, x);
        normalize(q, s.size, 1.0f / std::sqrt(static_cast<float>(s.size)));
        normalize(k, s.size, 1.0f);
        const float kq = dot(k, q, s.size), beta = sigmoid(to_float(projected.row(row)[s.channels() + head]));
        decays(forget.row(row) + key, c.dt_bias + key, c.A[head], decay);
        over(s.size, [&](int64_t i, auto v) {
            using V = decltype(v);
            put(decayed_k + i, get<V>(k + i) * get<V>(decay + i));
            put(q + i, get<V>(q + i) * get<V>(decay + i));
        });
        const uint32_t place = mix(static_cast<uint32_t>(positions[row])) + static_cast<uint32_t>(first * s.size);
        update(s, state_pool + slots[row] * state_stride + first * s.size, x, {k, decay, decayed_k, q, kq, beta, place});
        norm(gate.row(row) + first, x, y + row * s.inner() + first);
    }

    void decays(const T *f, const float *dt_bias, float A, float *to) const {
        for (int64_t i = 0; i < s.size; i += LANES) {
            const int64_t count = s.size - i;
            put(to + i, exp(A * softplus(load(f + i, count) + load(dt_bias + i, count))), count);
        }
    }

    // to = norm·x / rms(x)·σ(z) of a head.
    void norm(const T *z, const float *x, T *to) const {
        const float scale = 1.0f / std::sqrt(dot(x, x, s.width) / static_cast<float>(s.width) + c.eps);
        over(s.width, [&](int64_t i, auto v) {
            using V = decltype(v);
            put(to + i, get<V>(x + i) * scale * get<V>(c.norm + i) * sigmoid(get<V>(z + i)));
        });
    }

    void run(int64_t rows) const {
        parallel_for(rows * s.heads, GRAIN / (s.width * s.size) + 1, [&](int64_t begin, int64_t end) {
            const FlushDenormals flush;  // Here, for the pool's threads have settings of their own.
            for (int64_t i = begin; i < end; i++) head(i / s.heads, i % s.heads);
        });
    }
};

}  // namespace
}  // namespace baton

// projected: [rows, heads·(2·size + width) + heads], forget: [rows, heads·size], gate and y: [rows, heads·width], of
// `type`, rows of the first three `stride` apart. taps: [kernel, channels]; dt_bias: [heads·size]; A: [heads]; norm:
// [width]; all float32. conv_pool: float32 [slots, kernel - 1, channels] and state_pool: of `state_type`, [slots, heads,
// width, size], slots `stride` apart. positions: [rows], of the tokens.
extern "C" void baton_kda_decode(
    int type, const void *projected, int64_t projected_stride, const void *forget, int64_t forget_stride,
    const void *gate, int64_t gate_stride, const float *taps, const float *dt_bias, const float *A, const float *norm,
    float eps, float *conv_pool, int64_t conv_stride, int state_type, void *state_pool, int64_t state_stride,
    const int64_t *slots, const int64_t *positions, void *y, int64_t rows, int64_t heads, int64_t width, int64_t size,
    int64_t kernel
) {
    using namespace baton;
    with_type(type, [=](auto *t) {
        with_type(state_type, [=](auto *h) {
            using T = std::remove_pointer_t<decltype(t)>;
            using S = std::remove_pointer_t<decltype(h)>;
            Net<T, S>{{heads, width, size, kernel},
                      {taps, dt_bias, A, norm, eps},
                      {static_cast<const T *>(projected), projected_stride},
                      {static_cast<const T *>(forget), forget_stride},
                      {static_cast<const T *>(gate), gate_stride},
                      conv_pool, conv_stride, static_cast<S *>(state_pool), state_stride, slots, positions,
                      static_cast<T *>(y)}
                .run(rows);
        });
    });
}

BATON_RECORDABLE(baton_kda_decode)
