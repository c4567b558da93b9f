// The Mamba-2 mixer between its input and output projections, for one token of each row, as reference.py defines it,
// with one pass over the states.
#include <algorithm>
#include <type_traits>

#include "conv1d/update.h"
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

// Advance one head: state [width, size] ← decay·state + dt·x⊗B; x [width] ← state·C + D·x.
// SIZE: `size` if known at compile time, else 0. place: the hash of `place` plus an element's index gives the element's
// random bits for stochastic rounding. Even and odd vectors have an accumulator each, so that two chains of additions
// overlap.
template <int SIZE, class S>
void update(S *state, float *x, const float *B, const float *C, float decay, float dt, float D, uint32_t place,
            int64_t width, int64_t any_size) {
    const int64_t size = SIZE ? SIZE : any_size, whole = size / LANES * LANES;
    words lanes;
    for (int lane = 0; lane < LANES; lane++) lanes[lane] = lane;
    for (int64_t p = 0; p < width; p++, state += size, place += static_cast<uint32_t>(size)) {
        const float fed = dt * x[p];
        floats even{}, odd{};
#pragma GCC unroll 8
        for (int64_t n = 0; n < whole; n += LANES) {
            __builtin_prefetch(state + n + AHEAD / sizeof(S), 0, SECOND_CACHE);
            const floats h = load(state + n) * decay + load(B + n) * fed;
            keep(state + n, h, lanes + (place + static_cast<uint32_t>(n)));
            (n / LANES % 2 ? odd : even) += h * load(C + n);
        }
        float total = sum(even + odd);
        for (int64_t n = whole; n < size; n++) {
            const float h = to_float(state[n]) * decay + B[n] * fed;
            keep(state + n, h, place + static_cast<uint32_t>(n));
            total += h * C[n];
        }
        x[p] = total + D * x[p];
    }
}

template <class S>
void update(const Shape &s, S *state, float *x, const float *B, const float *C, float decay, float dt, float D,
            uint32_t place) {
    if (s.state == 128) return update<128>(state, x, B, C, decay, dt, D, place, s.width, s.state);
    if (s.state == 64) return update<64>(state, x, B, C, decay, dt, D, place, s.width, s.state);
    update<0>(state, x, B, C, decay, dt, D, place, s.width, s.state);
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
    const T *projected;  // A row: z [inner], x [inner], B [groups, state], C [groups, state], dt [heads].
    int64_t projected_stride;
    float *conv_pool;
    int64_t conv_stride;
    S *state_pool;
    int64_t state_stride;
    const int64_t *slots, *positions;
    T *y;
    int64_t y_stride;
    // Intermediate results. shared: B and C, [rows, shared()]. gated: the norm's inputs, [rows, inner]. squares: the
    // sums of squares for the norm, [rows, heads].
    float *const shared, *const gated, *const squares;

    // Convolve a row's B and C, which all heads of a group share.
    void share(int64_t row) const {
        const FlushDenormals flush;
        float *history = conv_pool + slots[row] * conv_stride + s.inner();
        convolve(s.kernel, s.channels(), projected + row * projected_stride + 2 * s.inner(), c.taps + s.inner(),
                 c.conv_bias ? c.conv_bias + s.inner() : nullptr, history, shared + row * s.shared(), s.shared());
    }

    // Convolve x of one head of a row, advance its state, and apply the gate.
    void head(int64_t row, int64_t head) const {
        const T *given = projected + row * projected_stride;
        const int64_t first = head * s.width, group = head / (s.heads / s.groups);
        float *values = gated + row * s.inner() + first;
        convolve(s.kernel, s.channels(), given + s.inner() + first, c.taps + first,
                 c.conv_bias ? c.conv_bias + first : nullptr, conv_pool + slots[row] * conv_stride + first, values,
                 s.width);
        float dt = softplus(to_float(given[s.inner() + s.channels() + head]) + c.dt_bias[head]);
        dt = std::min(std::max(dt, c.dt_low), c.dt_high);
        const float *B = shared + row * s.shared() + group * s.state, *C = B + s.groups * s.state;
        const uint32_t place = mix(static_cast<uint32_t>(positions[row])) + static_cast<uint32_t>(first * s.state);
        update(s, state_pool + slots[row] * state_stride + first * s.state, values, B, C, std::exp(dt * c.A[head]), dt,
               c.D[head], place);
        if (!c.norm_first) gate(given + first, values, s.width);
        squares[row * s.heads + head] = sum_of_squares(values, s.width);
        if (c.norm_first) gate(given + first, values, s.width);
    }

    // Apply the norm. Norm and gate are both multiplications, so their order matters only for the sums of squares,
    // which head() has computed.
    void norm(int64_t row) const {
        const FlushDenormals flush;
        if (!c.norm) return copy(row);
        const int64_t part = s.inner() / s.norm_groups, heads = s.heads / s.norm_groups;
        for (int64_t group = 0; group < s.norm_groups; group++) {
            float total = 0.0f;
            for (int64_t head = 0; head < heads; head++) total += squares[row * s.heads + group * heads + head];
            const float scale = 1.0f / std::sqrt(total / static_cast<float>(part) + c.eps);
            over(part, [&](int64_t i, auto v) {
                using V = decltype(v);
                const int64_t at = group * part + i;
                put(y + row * y_stride + at, get<V>(gated + row * s.inner() + at) * scale * get<V>(c.norm + at));
            });
        }
    }

    void copy(int64_t row) const {
        over(s.inner(),
             [&](int64_t i, auto v) { put(y + row * y_stride + i, get<decltype(v)>(gated + row * s.inner() + i)); });
    }

    // B, C and the norm are small compared to the states, so the calling thread computes them alone.
    void run(int64_t rows) const {
        for (int64_t row = 0; row < rows; row++) share(row);
        parallel_for(rows * s.heads, GRAIN / (s.width * s.state) + 1, [&](int64_t begin, int64_t end) {
            const FlushDenormals flush;  // Denormals are flushed per thread.
            for (int64_t i = begin; i < end; i++) head(i / s.heads, i % s.heads);
        });
        for (int64_t row = 0; row < rows; row++) norm(row);
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
// positions: [rows], the tokens' absolute positions.
// groups and norm_groups divide heads. scratch: float32 [rows, inner + 2·groups·state + heads].
extern "C" void baton_mixer_decode(int type, const void *projected, int64_t projected_stride, const float *taps,
                                   const float *conv_bias, const float *A, const float *D, const float *dt_bias,
                                   const float *norm, float dt_low, float dt_high, float eps, int norm_first,
                                   float *conv_pool, int64_t conv_stride, int state_type, void *state_pool,
                                   int64_t state_stride, const int64_t *slots, const int64_t *positions, void *y,
                                   int64_t y_stride, int64_t rows, int64_t heads, int64_t width, int64_t groups,
                                   int64_t state, int64_t kernel, int64_t norm_groups, float *scratch) {
    using namespace baton;
    with_type(type, [=](auto *t) {
        with_type(state_type, [=](auto *h) {
            using T = std::remove_pointer_t<decltype(t)>;
            using S = std::remove_pointer_t<decltype(h)>;
            const Shape s{heads, width, groups, state, kernel, norm_groups};
            float *gated = scratch + rows * s.shared();
            Mixer<T, S>{s,
                        {taps, conv_bias, A, D, dt_bias, norm, dt_low, dt_high, eps, norm && norm_first},
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
                        gated + rows * s.inner()}
                .run(rows);
        });
    });
}

BATON_RECORDABLE(baton_mixer_decode)
