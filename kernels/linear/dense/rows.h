// Products of a few rows with one block of outputs, in registers. The products of all weight layouts are built from
// this file's functions.
#pragma once

#include <algorithm>
#include <type_traits>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#include "product.h"
#include "runtime/cpp/numbers.h"
#include "runtime/cpp/parallel.h"

namespace baton {
namespace {

constexpr int OUT = BLOCK_OUT;  // Outputs of a block, which are adjacent in memory for each step along the inputs.
constexpr int VECTORS = OUT / LANES;
// Maximum rows of a tile: more accumulators, or addresses of rows, would not fit into registers.
constexpr int MAX_ROWS = VECTORS <= 2 ? 8 : VECTORS == 4 ? 3 : 1;
constexpr int64_t LINE = 64;  // Bytes of a cache line.

// The type that inputs of type T are multiplied in. Converting each input where it is multiplied would take as long as
// the product.
#if defined(__AVX512BF16__)
constexpr bool MULTIPLIES_BFLOAT16 = true;
template <class T>
using Number = T;
#else
constexpr bool MULTIPLIES_BFLOAT16 = false;
template <class T>
using Number = float;
#endif

constexpr int CONVERTED = 3;  // Number of the scratch buffer of `converted`; moe/experts uses 0 and 1.

// Convert rows [begin, end) of a matrix: to, [rows, m.inputs].
template <class M>
void convert(const M &m, int64_t begin, int64_t end, float *to) {
    for (int64_t row = begin; row < end; row++)
        for (int64_t i = 0; i < m.inputs; i += LANES)
            put(to + row * m.inputs + i, load(m.x + row * m.x_stride + i, m.inputs - i), m.inputs - i);
}

// Rows of inputs in the type that they are multiplied in.
template <class T>
struct Rows {
    const Number<T> *first;
    int64_t stride;

    Rows from(int64_t row) const { return {first + row * stride, stride}; }
};

// Return a matrix's rows; converted ones are in this thread's scratch memory.
template <class M, class T = typename M::Input>
Rows<T> converted(const M &m) {
    if constexpr (std::is_same_v<T, Number<T>>) {
        return {m.x, m.x_stride};
    } else {
        float *const rows = scratch(CONVERTED, m.rows * m.inputs);
        convert(m, 0, m.rows, rows);
        return {rows, m.inputs};
    }
}

// Call f(row, count, x) for all rows of a matrix, in parts. x: `count` rows from `row` on, in the type that is
// multiplied.
template <class T, class F>
void with_converted(const PackedMatrix<T> &m, F f) {
    if constexpr (std::is_same_v<T, Number<T>>) return f(0, m.rows, Rows<T>{m.x, m.x_stride});
    constexpr int64_t MOST = 4 * ROWS_AT_ONCE;  // Rows of a part.
    for (int64_t row = 0; row < m.rows; row += MOST) {
        const PackedMatrix<T> part = m.from_row(row, std::min(MOST, m.rows - row));
        float *const x = scratch(CONVERTED, part.rows * m.inputs);
        parallel_for(part.rows, 16384 / m.inputs + 1,
                     [&](int64_t begin, int64_t end) { convert(part, begin, end, x); });
        f(row, part.rows, Rows<T>{reinterpret_cast<const Number<T> *>(x), m.inputs});
    }
}

// A prefetch of later weights while others are multiplied: `stride` bytes for each input, into the L1 cache if to_first,
// else into L2.
struct Prefetch {
    const char *next;
    int64_t stride;
    bool to_first;

    void step(int inputs) {
        fetch(next);
        if (stride * inputs > LINE) fetch(next + LINE);
        next += stride * inputs;
    }

    void fetch(const char *line) const {
        if (to_first)
            __builtin_prefetch(line);
        else
            __builtin_prefetch(line, 0, SECOND_CACHE);
    }
};

struct NoPrefetch {
    void step(int) {}
};

// A step along the inputs: holds a block's weights for INPUTS inputs. add() adds their products with a row's inputs to
// the row's sums.
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

    explicit Step(const words (&pairs)[VECTORS]) {
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) weights[v] = (__m512bh)pairs[v];
    }

    // Write the weights in the type that they are multiplied in.
    void write(bfloat16 *to) const {
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) std::memcpy(to + v * 2 * LANES, weights + v, sizeof weights[v]);
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
            set(v, pairs);
        }
    }

    explicit Step(const words (&pairs)[VECTORS]) {
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) set(v, pairs[v]);
    }

    void set(int vector, words pairs) {
        first[vector] = (floats)(pairs << 16);
        second[vector] = (floats)(pairs & 0xffff0000);
    }

    // Write the weights in the type that they are multiplied in.
    void write(float *to) const {
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) {
            put(to + v * LANES, first[v]);
            put(to + OUT + v * LANES, second[v]);
        }
    }

    template <class X>
    void add(floats *sums, const X *x) const {
        const float left = to_float(x[0]), right = to_float(x[1]);
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) {
            sums[v] += first[v] * left;
            sums[v] += second[v] * right;
        }
    }
};
#endif

// The sums [ROWS, OUT] of a tile of ROWS rows. All functions are inlined so that the sums stay in registers.
template <int ROWS>
struct RowSums {
    static constexpr int COUNT = ROWS;
    floats held[ROWS][VECTORS] = {};

    // Call f(sum, row, column) for each vector of sums; `column` is the column of the vector's first lane.
    template <class F>
    __attribute__((always_inline)) void each(F f) {
#pragma GCC unroll 12
        for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++) f(held[row][v], row, v * LANES);
    }

    // Read the sums from `kept` [ROWS, OUT], call f, and store them there again.
    template <class F>
    __attribute__((always_inline)) void update(float *kept, F f) {
        each([=](floats &sum, int row, int column) { sum = load(kept + row * OUT + column); });
        f();
        each([=](floats sum, int row, int column) { put(kept + row * OUT + column, sum); });
    }

    // Add x [ROWS, steps] · weights [steps, OUT], step by step; prefetch.step() is called before each one.
    template <class X, class W, class P = NoPrefetch>
    __attribute__((always_inline)) void add(const X *x, int64_t x_stride, const W *weights, int64_t steps,
                                            P prefetch = P()) {
        for (int64_t step = 0; step < steps; step++) {
            prefetch.step(Step<W>::INPUTS);
            add(x, x_stride, Step<W>(weights));
            weights += OUT * Step<W>::INPUTS;
            x += Step<W>::INPUTS;
        }
    }

    // Add x [ROWS, one step] · the weights of that step.
    template <class X, class W>
    __attribute__((always_inline)) void add(const X *x, int64_t x_stride, const Step<W> &step) {
#pragma GCC unroll 12
        for (int row = 0; row < ROWS; row++) step.add(held[row], x + row * x_stride);
    }

    // Add x [ROWS, inputs] · weights [steps, OUT], where the inputs may end within the last step.
    template <class X, class W, class P = NoPrefetch>
    __attribute__((always_inline)) void add_inputs(const X *x, int64_t x_stride, const W *weights, int64_t inputs,
                                                   P prefetch = P()) {
        constexpr int64_t INPUTS = Step<W>::INPUTS;
        const int64_t steps = inputs / INPUTS;
        add(x, x_stride, weights, steps, prefetch);
        if (inputs == steps * INPUTS) return;
        X last[INPUTS * ROWS] = {};
        for (int row = 0; row < ROWS; row++) last[INPUTS * row] = x[row * x_stride + inputs - 1];
        add(last, INPUTS, Step<W>(weights + steps * OUT * INPUTS));
    }
};

// Write one block of y [rows, outputs] = sums [rows, OUT] + bias. Rows of y are `stride` elements apart. bias:
// [outputs] or null.
template <class T>
void finish(const float *sums, const T *bias, int64_t rows, int64_t block, int64_t outputs, T *y, int64_t stride) {
    const int64_t first = block * OUT, last = std::min(first + OUT, outputs);
    for (int64_t row = 0; row < rows; row++, sums += OUT, y += stride)
        for (int64_t i = first; i < last; i += LANES) {
            const floats added = bias ? load(bias + i, last - i) : floats{};
            put(y + i, load(sums + i - first) + added, last - i);
        }
}

// Prefetch the lines that `finish` will write: stores to a long result would wait for memory.
template <class T>
__attribute__((always_inline)) inline void prefetch_results(int64_t rows, int64_t block, const T *y, int64_t stride) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < OUT; i += LINE / static_cast<int64_t>(sizeof(T)))
            __builtin_prefetch(y + row * stride + block * OUT + i, 1, SECOND_CACHE);
}

// Call f(RowSums<rows>()), where rows is between LEAST and ROWS.
template <int LEAST = 1, int ROWS = MAX_ROWS, class F>
void with_rows(int64_t rows, F f) {
    if (rows == ROWS) return f(RowSums<ROWS>());
    if constexpr (ROWS > LEAST) with_rows<LEAST, ROWS - 1>(rows, f);
}

constexpr int64_t STRETCH = 128;  // Inputs of a stretch: its weights stay in the first cache until all tiles used them.

// Divide the rows into tiles, and call first(tile, row, prefetch) for the first tile and others(tile, row, prefetch)
// for each other one. A tile's sums are read from `sums` [rows, OUT] before the call and stored after it.
// next: the next stretch's weights in memory, which have `bytes` an input. Each tile prefetches a part of them into the
// first cache, because all prefetches at once would wait for each other.
template <class F, class G>
__attribute__((always_inline)) inline void for_row_tiles(int64_t rows, float *sums, const void *next, int64_t bytes,
                                                         F first, G others) {
    const int64_t tiles = (rows + MAX_ROWS - 1) / MAX_ROWS;
    const auto call = [=](int64_t t, auto f) __attribute__((always_inline)) {
        const int64_t row = rows * t / tiles, end = rows * (t + 1) / tiles;
        const char *const part = static_cast<const char *>(next) + STRETCH * bytes * t / tiles;
        const Prefetch prefetch{part, bytes / tiles, true};
        with_rows<(MAX_ROWS + 1) / 2>(end - row, [=](auto tile) {
            tile.update(sums + row * OUT, [&]() __attribute__((always_inline)) { f(tile, row, prefetch); });
        });
    };
    call(0, first);
    for (int64_t t = 1; t < tiles; t++) call(t, others);
}

}  // namespace
}  // namespace baton
