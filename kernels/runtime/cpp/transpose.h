// Transposition of matrices in registers, with conversion between types.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "numbers.h"

namespace baton {

// to[j, i] = from[i, j] for i < rows and j < columns, in blocks of 4 × 4. Strides are between rows, in elements.
template <class From, class To>
void transpose(const From *from, int64_t from_stride, int64_t rows, int64_t columns, To *to, int64_t to_stride) {
    const auto turn = [&](int64_t i, int64_t j, auto side) {
        constexpr int SIDE = decltype(side)::value;
        float block[SIDE][SIDE];
#pragma GCC unroll 4
        for (int r = 0; r < SIDE; r++)
#pragma GCC unroll 4
            for (int c = 0; c < SIDE; c++) block[r][c] = to_float(from[(i + r) * from_stride + j + c]);
#pragma GCC unroll 4
        for (int c = 0; c < SIDE; c++)
#pragma GCC unroll 4
            for (int r = 0; r < SIDE; r++) put(&to[(j + c) * to_stride + i + r], block[r][c]);
    };
    for (int64_t i = 0; i < rows; i += 4)
        for (int64_t j = 0; j < columns; j += 4)
            if (i + 4 <= rows && j + 4 <= columns)
                turn(i, j, std::integral_constant<int, 4>());
            else
                for (int64_t r = i; r < std::min(i + 4, rows); r++)
                    for (int64_t c = j; c < std::min(j + 4, columns); c++) turn(r, c, std::integral_constant<int, 1>());
}

// Return the lanes of a and b alternately: of their lower halves if FIRST is 0, of their upper halves if FIRST is LANES
// / 2.
template <int FIRST, int... I> words interleave(words a, words b, std::integer_sequence<int, I...>) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, (FIRST + I / 2 + I % 2 * LANES)...);
#else
    return __builtin_shuffle(a, b, words{(FIRST + I / 2 + I % 2 * LANES)...});
#endif
}

// Transpose a square of LANES vectors in place: rows[i][j] ↔ rows[j][i]. It takes log2(LANES) rounds, each of which
// interleaves row i with row i + LANES / 2.
inline void turn(words (&rows)[LANES]) {
    constexpr std::make_integer_sequence<int, LANES> places{};
#pragma GCC unroll 8
    for (int round = 1; round < LANES; round *= 2) {
        words next[LANES];
#pragma GCC unroll 8
        for (int i = 0; i < LANES / 2; i++) {
            next[2 * i] = interleave<0>(rows[i], rows[i + LANES / 2], places);
            next[2 * i + 1] = interleave<LANES / 2>(rows[i], rows[i + LANES / 2], places);
        }
        std::copy(next, next + LANES, rows);
    }
}

}  // namespace baton
