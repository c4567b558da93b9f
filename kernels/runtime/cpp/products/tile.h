// Matrix products by tiles of results that are held in registers.
#pragma once

#include <algorithm>
#include <type_traits>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#include "registers.h"
#include "matrix.h"
#include "rounded.h"
#include "runtime/cpp/numbers.h"
#include "tiles.h"

namespace baton {

// Sizes of a tile: its TILE_ROWS · TILE_VECS accumulators, TILE_VECS vectors of the right side and one broadcast number
// of the left side fit into the 32 (AVX-512, ARM) or 16 vector registers.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int TILE_VECS = 4;
#else
constexpr int TILE_VECS = 2;
#endif
constexpr int TILE_ROWS = 4;

template <int Rows, int Vecs> struct Tile {
    static constexpr int64_t rows = Rows;
    floats sum[Rows][Vecs] = {};

    // sum[r, c] += Σ_k left[r, k] · right[k, c] for k < count, in ascending order of k for every tile size, so that
    // results do not depend on how rows are divided into tiles. Strides are in elements.
    template <class T>
    void add(const float *left, int64_t left_stride, const T *right, int64_t right_stride, int64_t count) {
        for (int64_t k = 0; k < count; ++k) {
            floats row[Vecs];
#pragma GCC unroll 8
            for (int v = 0; v < Vecs; ++v) row[v] = load(right + k * right_stride + v * LANES);
#pragma GCC unroll 8
            for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
                for (int v = 0; v < Vecs; ++v) sum[r][v] += left[r * left_stride + k] * row[v];
        }
    }

#if defined(__AVX512BF16__)
    // The same sums for bfloat16, with two k per instruction. left: [rows, count]; right: [count / 2, columns, 2];
    // count is even.
    void add(const bfloat16 *left, int64_t left_stride, const bfloat16 *right, int64_t right_stride, int64_t count) {
        for (int64_t k = 0; k < count; k += 2, right += right_stride) {
            __m512bh row[Vecs];
#pragma GCC unroll 8
            for (int v = 0; v < Vecs; ++v) row[v] = (__m512bh)_mm512_loadu_si512(right + v * 2 * LANES);
#pragma GCC unroll 8
            for (int r = 0; r < Rows; ++r) {
                int32_t pair;
                std::memcpy(&pair, left + r * left_stride + k, sizeof pair);
                const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 8
                for (int v = 0; v < Vecs; ++v) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], row[v], both);
            }
        }
    }
#endif

    // Call f(sum, row, column) for each vector of accumulators; `column` is the column of the vector's first lane.
    template <class F> void each(F f) {
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < Vecs; ++v) f(sum[r][v], r, v * LANES);
    }
};

// Call f(tile, row, column) for tiles that cover [rows, columns]; columns is a multiple of LANES.
template <class F> void for_tiles(int64_t rows, int64_t columns, F f) {
    const auto across = [&](auto height, int64_t row) {
        int64_t column = 0;
        for (; column + TILE_VECS * LANES <= columns; column += TILE_VECS * LANES)
            f(Tile<decltype(height)::value, TILE_VECS>(), row, column);
        for (; column < columns; column += LANES) f(Tile<decltype(height)::value, 1>(), row, column);
    };
    int64_t row = 0;
    for (; row + TILE_ROWS <= rows; row += TILE_ROWS) across(std::integral_constant<int, TILE_ROWS>(), row);
    if (rows - row == 3) across(std::integral_constant<int, 3>(), row);
    if (rows - row == 2) across(std::integral_constant<int, 2>(), row);
    if (rows - row == 1) across(std::integral_constant<int, 1>(), row);
}

// How many k of the right side are adjacent in memory for each column: 2 for bfloat16, else 1.
template <class L> constexpr int64_t PAIRED = sizeof(float) / sizeof(L);

// The inputs of a product's bfloat16 operands are padded with zeros to a multiple of this number. The left operand's
// memory has room for a multiple of TILE_HEIGHT rows.
#if defined(__AMX_BF16__)
constexpr int64_t WHOLE_INPUTS = TILE_INPUTS;
#else
constexpr int64_t WHOLE_INPUTS = 2;
#endif

// to [rows, columns] ← kept·to + left [rows, count] · right [count, columns].
// kept: a factor for each row; null: `to` is overwritten without being read.
// columns is a multiple of LANES. If `left` is bfloat16, both sides have the layout of Tile::add and are padded to
// WHOLE_INPUTS, and the tile registers are set up with TILE_HEIGHT rows.
template <class T, class L = float>
void multiply(int64_t rows, int64_t columns, int64_t count, Matrix<const L> left, Matrix<const T> right,
              Matrix<const float> kept, Matrix<float> to) {
#if defined(__AMX_BF16__)
    if constexpr (std::is_same_v<L, bfloat16>) return multiply_pairs(rows, columns, count, left, right, kept, to);
#endif
    for_tiles(rows, columns, [&](auto tile, int64_t row, int64_t column) {
        float *const at = to.at + row * to.stride + column;
        if (kept.at)
            tile.each([&](floats &sum, int r, int c) {
                sum = load(at + r * to.stride + c) * kept.at[(row + r) * kept.stride];
            });
        tile.add(left.at + row * left.stride, left.stride, right.at + column * PAIRED<L>, right.stride, count);
        tile.each([&](floats sum, int r, int c) { put(at + r * to.stride + c, sum); });
    });
}

// Products of float32 matrices whose operands stay as they are. Rounded has the same interface, for operands that are
// first converted: make_left(rows, count, ...) and make_right(count, columns, ...) convert a matrix into memory of
// left_size and right_size floats, and return the operand. `left` returns an operand that was made before.
struct Plain {
    static constexpr int BLOCK = TILE_ROWS;
    using Left = Matrix<const float>;
    using Right = Matrix<const float>;

    static int64_t left_size(int64_t, int64_t) { return 0; }
    static int64_t right_size(int64_t, int64_t) { return 0; }
    static Left left(int64_t, Matrix<const float> from, float *) { return from; }
    static Left make_left(int64_t, int64_t, Matrix<const float> from, float *) { return from; }
    static Right make_right(int64_t, int64_t, Matrix<const float> from, float *) { return from; }

    static void multiply(int64_t rows, int64_t columns, int64_t count, Left left, Right right, Matrix<const float> kept,
                         Matrix<float> to) {
        // A right side that is larger than the L1 cache is multiplied in strips.
        const int64_t strip = count * columns > 8192 ? TILE_VECS * LANES : columns;
        for (int64_t column = 0; column < columns; column += strip)
            baton::multiply<float>(rows, std::min(strip, columns - column), count, left,
                                   {right.at + column, right.stride}, kept, {to.at + column, to.stride});
    }

    // These three solve a system block by block. `empty_right` returns a right side without inputs, and put_right adds
    // inputs [begin, end) to it. add_lower adds to rows [begin, end) the product of `left` with the inputs before
    // `begin`, which is a multiple of BLOCK.
    static Right empty_right(int64_t, int64_t, Matrix<const float> from, float *) { return from; }
    static void put_right(int64_t, int64_t, int64_t, Matrix<const float>, Right) {}
    static void add_lower(int64_t begin, int64_t end, int64_t columns, Left left, Right right, Matrix<float> to) {
        const float one = 1;
        multiply(end - begin, columns, begin, {left.at + begin * left.stride, left.stride}, right, {&one, 0},
                 {to.at + begin * to.stride, to.stride});
    }

    // Multiply with a lower triangular matrix: `left` holds zeros after the diagonal. kept is not null.
    static void multiply_lower(int64_t rows, int64_t columns, Left left, Right right, Matrix<const float> kept,
                               Matrix<float> to) {
        for (int64_t row = 0; row < rows; row += TILE_ROWS) {
            const int64_t last = std::min(row + TILE_ROWS, rows);
            multiply(last - row, columns, last, {left.at + row * left.stride, left.stride}, right,
                     {kept.at + row * kept.stride, kept.stride}, {to.at + row * to.stride, to.stride});
        }
    }
};

// How float32 products of a model whose activations have type T are computed: on AMX those of bfloat16 with rounded
// operands, as on a GPU.
#if defined(__AMX_BF16__)
template <class T> using Products = std::conditional_t<std::is_same_v<T, bfloat16>, Rounded, Plain>;
#else
template <class T> using Products = Plain;
#endif

}  // namespace baton
