// Products of a few rows with a block of outputs: what weights of every layout come down to.
#pragma once

#include <algorithm>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#include "runtime/cpp/numbers.h"
#include "product.h"

namespace baton {
namespace {

constexpr int OUT = BLOCK_OUT;  // Outputs of a block, side by side in memory for each step along the inputs.
constexpr int VECTORS = OUT / LANES;
constexpr int MAX_ROWS = VECTORS <= 2 ? 8 : VECTORS == 4 ? 3 : 1;  // Of a tile: sums and strides stay in registers.
constexpr int64_t LINE = 64;

// Weights on their way from memory while others are computed with: `stride` bytes of them at each step.
struct Prefetch {
    const char *next;
    int64_t stride;
    bool to_first;

    void step() {
        fetch(next);
        if (stride > LINE) fetch(next + LINE);
        next += stride;
    }

    void fetch(const char *line) const {
        if (to_first)
            __builtin_prefetch(line);
        else
            __builtin_prefetch(line, 0, SECOND_CACHE);
    }
};

struct NoPrefetch {
    void step() {}
};

// A step along the inputs: the weights of a block for it, and their products with one row's inputs, added to its sums.
template <class T>
struct Step;

template <>
struct Step<float> {
    static constexpr int INPUTS = 1;
    floats weights[VECTORS];

    explicit Step(const float *packed) {
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) weights[v] = load(packed + v * LANES);
    }

    template <class X>
    void add(floats *sums, const X *x) const {
        const float input = to_float(*x);
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) sums[v] += weights[v] * input;
    }
};

#if defined(__AVX512BF16__)
template <>
struct Step<bfloat16> {
    static constexpr int INPUTS = 2;
    __m512bh weights[VECTORS];

    explicit Step(const bfloat16 *packed) {
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) weights[v] = (__m512bh)_mm512_loadu_si512(packed + v * 2 * LANES);
    }

    void add(floats *sums, const bfloat16 *x) const {
        int32_t pair;
        std::memcpy(&pair, x, sizeof pair);
        const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) sums[v] = _mm512_dpbf16_ps(sums[v], weights[v], both);
    }
};
#else
template <>
struct Step<bfloat16> {
    static constexpr int INPUTS = 2;
    floats first[VECTORS], second[VECTORS];

    explicit Step(const bfloat16 *packed) {
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) {
            words pairs;
            std::memcpy(&pairs, packed + v * 2 * LANES, sizeof pairs);
            first[v] = (floats)(pairs << 16);
            second[v] = (floats)(pairs & 0xffff0000);
        }
    }

    void add(floats *sums, const bfloat16 *x) const {
        const float left = to_float(x[0]), right = to_float(x[1]);
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) {
            sums[v] += first[v] * left;
            sums[v] += second[v] * right;
        }
    }
};
#endif

// The sums [ROWS, OUT] of some rows, in registers, for which all that touches them is inlined; W: the weights' type.
template <class W, int ROWS>
struct RowSums {
    static constexpr int COUNT = ROWS;
    floats held[ROWS][VECTORS] = {};

    // f(sum, row, column) for each of the vectors.
    template <class F>
    __attribute__((always_inline)) void each(F f) {
#pragma GCC unroll 12
        for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++) f(held[row][v], row, v * LANES);
    }

    // Adds x [ROWS, steps] · weights [steps, OUT], a step after the other; prefetch.step() comes before each.
    template <class X, class P = NoPrefetch>
    __attribute__((always_inline)) void add(const X *x, int64_t x_stride, const W *weights, int64_t steps, P prefetch = P()) {
        for (int64_t step = 0; step < steps; step++) {
            prefetch.step();
            const Step<W> now(weights);
#pragma GCC unroll 12
            for (int row = 0; row < ROWS; row++) now.add(held[row], x + row * x_stride);
            weights += OUT * Step<W>::INPUTS;
            x += Step<W>::INPUTS;
        }
    }
};

// y [rows, outputs] = sums [rows, OUT] + bias, of one block of outputs; rows of y are `stride` apart; bias: [outputs] or
// null.
template <class T>
void finish(const float *sums, const T *bias, int64_t rows, int64_t block, int64_t outputs, T *y, int64_t stride) {
    const int64_t first = block * OUT, last = std::min(first + OUT, outputs);
    for (int64_t row = 0; row < rows; row++, sums += OUT, y += stride)
        for (int64_t i = first; i < last; i += LANES) {
            const floats added = bias ? load(bias + i, last - i) : floats{};
            put(y + i, load(sums + i - first) + added, last - i);
        }
}

// Calls f(RowSums<W, rows>()) for LEAST to MAX_ROWS rows.
template <class W, int LEAST = 1, int ROWS = MAX_ROWS, class F>
void with_rows(int64_t rows, F f) {
    if (rows == ROWS) return f(RowSums<W, ROWS>());
    if constexpr (ROWS > LEAST) with_rows<W, LEAST, ROWS - 1>(rows, f);
}

}  // namespace
}  // namespace baton
