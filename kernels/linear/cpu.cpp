// x · weightᵀ over packed weights. Each output is one chain of additions along the inputs, the same for any number of
// rows and threads, so what a row gets depends on nothing else.
#include <algorithm>
#include <type_traits>

#include "../native/numbers.h"
#include "../native/parallel.h"

namespace baton {
namespace {

constexpr int OUT = 32;  // Outputs of a block, side by side in memory for each step along the inputs.
constexpr int VECTORS = OUT / LANES;
constexpr int MAX_ROWS = VECTORS <= 2 ? 12 : VECTORS == 4 ? 3 : 1;  // Of a tile: its sums stay in registers.
constexpr int64_t ROWS_AT_ONCE = 96;  // Rows that a block's sums are held for.
constexpr int64_t DEPTH = 256;  // Steps that several tiles share: their weights stay in the first cache.
constexpr int64_t STEP_BYTES = OUT * 4;
constexpr int64_t LINE = 64;
constexpr int64_t AHEAD = 8192;

// Weights on their way from memory while others are computed with: `stride` bytes of them at each step.
struct Prefetch {
    const char *next;
    int64_t stride;

    void step() {
        __builtin_prefetch(next);
        if (stride > LINE) __builtin_prefetch(next + LINE);
        next += stride;
    }
};

// A step along the inputs: the weights of a block for it, and their products with one row's inputs, added to its sums.
template <class T>
struct Step;

template <>
struct Step<float> {
    static constexpr int INPUTS = 1;
    floats weights[VECTORS];

    explicit Step(const float *packed) {
        for (int v = 0; v < VECTORS; v++) weights[v] = load(packed + v * LANES);
    }

    void add(floats *sums, const float *x) const {
        for (int v = 0; v < VECTORS; v++) sums[v] += weights[v] * *x;
    }
};

#if defined(__AVX512BF16__)
template <>
struct Step<bfloat16> {
    static constexpr int INPUTS = 2;
    __m512bh weights[VECTORS];

    explicit Step(const bfloat16 *packed) {
        for (int v = 0; v < VECTORS; v++) weights[v] = (__m512bh)_mm512_loadu_si512(packed + v * 2 * LANES);
    }

    void add(floats *sums, const bfloat16 *x) const {
        int32_t pair;
        std::memcpy(&pair, x, sizeof pair);
        const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
        for (int v = 0; v < VECTORS; v++) sums[v] = _mm512_dpbf16_ps(sums[v], weights[v], both);
    }
};
#else
template <>
struct Step<bfloat16> {
    static constexpr int INPUTS = 2;
    floats first[VECTORS], second[VECTORS];

    explicit Step(const bfloat16 *packed) {
        for (int v = 0; v < VECTORS; v++) {
            words pairs;
            std::memcpy(&pairs, packed + v * 2 * LANES, sizeof pairs);
            first[v] = (floats)(pairs << 16);
            second[v] = (floats)(pairs & 0xffff0000);
        }
    }

    void add(floats *sums, const bfloat16 *x) const {
        const float left = to_float(x[0]), right = to_float(x[1]);
        for (int v = 0; v < VECTORS; v++) {
            sums[v] += first[v] * left;
            sums[v] += second[v] * right;
        }
    }
};
#endif

// sums [ROWS, OUT] += x [ROWS, steps] · weights [steps, OUT].
template <class T, int ROWS>
void tile(float *sums, const T *x, int64_t x_stride, const T *weights, int64_t steps, Prefetch prefetch) {
    floats held[ROWS][VECTORS];
    for (int row = 0; row < ROWS; row++)
        for (int v = 0; v < VECTORS; v++) held[row][v] = load(sums + row * OUT + v * LANES);
    for (int64_t step = 0; step < steps; step++) {
        prefetch.step();
        const Step<T> now(weights);
#pragma GCC unroll 12
        for (int row = 0; row < ROWS; row++) now.add(held[row], x + row * x_stride);
        weights += OUT * Step<T>::INPUTS;
        x += Step<T>::INPUTS;
    }
    for (int row = 0; row < ROWS; row++)
        for (int v = 0; v < VECTORS; v++) put(sums + row * OUT + v * LANES, held[row][v]);
}

template <class T, int ROWS = MAX_ROWS>
void tile_of(int64_t rows, float *sums, const T *x, int64_t x_stride, const T *weights, int64_t steps, Prefetch next) {
    if (rows == ROWS) return tile<T, ROWS>(sums, x, x_stride, weights, steps, next);
    if constexpr (ROWS > 1) tile_of<T, ROWS - 1>(rows, sums, x, x_stride, weights, steps, next);
}

template <class T>
struct Matrix {
    const T *x, *weights, *bias;  // weights: [blocks, steps, OUT, INPUTS], padded with zeros; bias: [outputs] or null.
    int64_t x_stride, rows, inputs, outputs;

    int64_t blocks() const { return (outputs + OUT - 1) / OUT; }
    int64_t steps() const { return (inputs + Step<T>::INPUTS - 1) / Step<T>::INPUTS; }
    int64_t whole_steps() const { return inputs / Step<T>::INPUTS; }
    Matrix from_row(int64_t row, int64_t count) const {
        return {x + row * x_stride, weights, bias, x_stride, count, inputs, outputs};
    }
    const T *block(int64_t index) const { return weights + index * steps() * OUT * Step<T>::INPUTS; }
};

// sums [rows, OUT] of one block.
template <class T>
void multiply(const Matrix<T> &m, int64_t block, float *sums) {
    std::fill(sums, sums + m.rows * OUT, 0.0f);
    const int64_t tiles = (m.rows + MAX_ROWS - 1) / MAX_ROWS;
    const int64_t parts = (m.whole_steps() + DEPTH - 1) / DEPTH;
    for (int64_t part = 0; part < parts; part++) {
        const int64_t from = m.whole_steps() * part / parts, steps = m.whole_steps() * (part + 1) / parts - from;
        const T *weights = m.block(block) + from * OUT * Step<T>::INPUTS;
        const char *next = reinterpret_cast<const char *>(weights) + (tiles > 1 ? steps * STEP_BYTES : AHEAD);
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t row = m.rows * t / tiles, rows = m.rows * (t + 1) / tiles - row;
            const T *x = m.x + row * m.x_stride + from * Step<T>::INPUTS;
            const Prefetch prefetch{next + steps * STEP_BYTES * t / tiles, STEP_BYTES / tiles};
            tile_of<T>(rows, sums + row * OUT, x, m.x_stride, weights, steps, prefetch);
        }
    }
    if (m.whole_steps() == m.steps()) return;
    const Step<T> last(m.block(block) + m.whole_steps() * OUT * Step<T>::INPUTS);
    for (int64_t row = 0; row < m.rows; row++) {
        const T x[2] = {m.x[row * m.x_stride + m.inputs - 1], T{}};
        floats held[VECTORS];
        for (int v = 0; v < VECTORS; v++) held[v] = load(sums + row * OUT + v * LANES);
        last.add(held, x);
        for (int v = 0; v < VECTORS; v++) put(sums + row * OUT + v * LANES, held[v]);
    }
}

template <class T>
void finish(const Matrix<T> &m, int64_t block, const float *sums, T *y, int64_t y_stride) {
    const int64_t first = block * OUT, count = std::min<int64_t>(OUT, m.outputs - first);
    for (int64_t row = 0; row < m.rows; row++)
        for (int64_t i = 0; i < count; i++) {
            const float bias = m.bias ? to_float(m.bias[first + i]) : 0.0f;
            put(y + row * y_stride + first + i, sums[row * OUT + i] + bias);
        }
}

// Blocks that are worth another thread: a second one costs as much as some 64K weights, times few rows, from the cache.
template <class T>
int64_t grain(const Matrix<T> &m) {
    return 65536 / (OUT * m.inputs * (1 + m.rows / 16)) + 1;
}

template <class T>
void linear(const Matrix<T> &m, T *y, int64_t y_stride) {
    parallel_for(m.blocks(), grain(m), [&](int64_t begin, int64_t end) {
        const FlushDenormals flush;
        float sums[ROWS_AT_ONCE * OUT];
        for (int64_t block = begin; block < end; block++)
            for (int64_t row = 0; row < m.rows; row += ROWS_AT_ONCE) {
                const Matrix<T> part = m.from_row(row, std::min(ROWS_AT_ONCE, m.rows - row));
                multiply(part, block, sums);
                finish(part, block, sums, y + row * y_stride, y_stride);
            }
    });
}

// table: [outputs, inputs] as packed for `linear`.
template <class T>
void look_up(const Matrix<T> &m, const int64_t *tokens, T *y) {
    parallel_for(m.rows, 16, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) {
            constexpr int64_t side = Step<T>::INPUTS;
            const T *from = m.block(tokens[row] / OUT) + tokens[row] % OUT * side;
            T *to = y + row * m.inputs;
            for (int64_t step = 0; step < m.whole_steps(); step++)
                std::memcpy(to + step * side, from + step * OUT * side, side * sizeof(T));
            if (m.whole_steps() < m.steps()) to[m.inputs - 1] = from[m.whole_steps() * OUT * side];
        }
    });
}

}  // namespace
}  // namespace baton

// All of one type; weights: [ceil(outputs/32), ceil(inputs/k), 32, k], padded with zeros, k = 1 in float32 and 2 in
// bfloat16. x: [rows, inputs] and y: [rows, outputs], rows `stride` apart; bias: [outputs] or null.
extern "C" void baton_linear(
    int type, const void *x, int64_t x_stride, const void *weights, const void *bias, void *y, int64_t y_stride,
    int64_t rows, int64_t inputs, int64_t outputs
) {
    baton::with_type(type, [=](auto *t) {
        using T = std::remove_pointer_t<decltype(t)>;
        const baton::Matrix<T> m{static_cast<const T *>(x), static_cast<const T *>(weights),
                                 static_cast<const T *>(bias), x_stride, rows, inputs, outputs};
        baton::linear(m, static_cast<T *>(y), y_stride);
    });
}

// y [rows, inputs]: the rows `tokens` of a matrix [.., inputs] packed as above.
extern "C" void baton_look_up(int type, const void *weights, const int64_t *tokens, void *y, int64_t rows,
                              int64_t inputs) {
    baton::with_type(type, [=](auto *t) {
        using T = std::remove_pointer_t<decltype(t)>;
        const baton::Matrix<T> m{nullptr, static_cast<const T *>(weights), nullptr, 0, rows, inputs, 0};
        baton::look_up(m, tokens, static_cast<T *>(y));
    });
}
