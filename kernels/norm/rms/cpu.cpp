// Residual addition and RMS norm, as kernels/norm/rms/reference.py defines them.
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "runtime/cpp/numbers.h"
#include "runtime/cpp/parallel.h"
#include "runtime/cpu_graph/call.h"

namespace baton {
namespace {

// Number of accumulators of a sum of squares: the same on every target, so that all targets add in the same order.
constexpr int COLUMNS = 16;
// Minimum elements per part of a parallel loop; fewer are not worth waking a thread.
constexpr int64_t GRAIN = 16384;

// Compute to = residual + multiplier·x, and return its sum of squares. x may be null: then `to` is not written.
template <class R, class X>
float add_row(int64_t hidden, const R *residual, const X *x, float multiplier, R *to) {
    const auto square = [=](int64_t i, auto v) {
        using V = decltype(v);
        if (x) put(to + i, get<V>(residual + i) + multiplier * get<V>(x + i));
        const V value = x ? get<V>(to + i) : get<V>(residual + i);
        return value * value;
    };
    floats vectors[COLUMNS / LANES] = {};
    const int64_t whole = hidden / COLUMNS * COLUMNS;
    for (int64_t i = 0; i < whole; i += COLUMNS)
#pragma GCC unroll 4
        for (int v = 0; v < COLUMNS / LANES; ++v) vectors[v] += square(i + v * LANES, floats{});
    float squares[COLUMNS];
    std::memcpy(squares, vectors, sizeof squares);
    for (int64_t i = whole; i < hidden; ++i) squares[i - whole] += square(i, 0.0f);
    for (int step = COLUMNS / 2; step > 0; step /= 2)
        for (int lane = 0; lane < step; ++lane) squares[lane] += squares[lane + step];
    return squares[0];
}

// normed = x·scale·(weight + offset).
template <class R, class W>
void scale_row(int64_t hidden, const R *x, const W *weight, float offset, float scale, W *normed) {
    over(hidden, [=](int64_t i, auto v) {
        put(normed + i, get<decltype(v)>(x + i) * scale * (get<decltype(v)>(weight + i) + offset));
    });
}

}  // namespace
}  // namespace baton

// Compute reference.add_rms_norm. All tensors are contiguous.
// residual, added: [rows, hidden], of residual_type. x: [rows, hidden] of x_type, or null: then added is not written.
// weight: [hidden] and normed: [rows, hidden], of weight_type.
extern "C" void baton_add_rms_norm(int64_t rows, int64_t hidden, const void *residual, int residual_type, const void *x,
                                   int x_type, const void *weight, int weight_type, float eps, float multiplier,
                                   float offset, void *added, void *normed) {
    using namespace baton;
    with_type(residual_type, [&](auto *r) {
        with_type(x_type, [&](auto *given) {
            with_type(weight_type, [&](auto *w) {
                using R = std::remove_pointer_t<decltype(r)>;
                using X = std::remove_pointer_t<decltype(given)>;
                using W = std::remove_pointer_t<decltype(w)>;
                parallel_for(rows, GRAIN / hidden + 1, [=](int64_t begin, int64_t end) {
                    for (int64_t row = begin; row < end; ++row) {
                        const R *from = static_cast<const R *>(residual) + row * hidden;
                        const X *with = x ? static_cast<const X *>(x) + row * hidden : nullptr;
                        R *to = static_cast<R *>(added) + row * hidden;
                        const float squares = add_row(hidden, from, with, multiplier, to);
                        const float scale = 1.0f / std::sqrt(squares / static_cast<float>(hidden) + eps);
                        scale_row(hidden, x ? to : from, static_cast<const W *>(weight), offset, scale,
                                  static_cast<W *>(normed) + row * hidden);
                    }
                });
            });
        });
    });
}

BATON_RECORDABLE(baton_add_rms_norm)
