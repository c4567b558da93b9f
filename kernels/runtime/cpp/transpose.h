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

// Return the lanes I of a and b, where those of b are numbered after those of a.
template <class V, int... I> [[gnu::always_inline]] inline V shuffled(V a, V b, std::integer_sequence<int, I...>) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, I...);
#else
    return __builtin_shuffle(a, b, V{I...});
#endif
}

// Return lanes of a and b alternately, from FIRST on, in each part of SIDE lanes.
template <int FIRST, int SIDE, class V, int... I>
[[gnu::always_inline]] inline V interleave(V a, V b, std::integer_sequence<int, I...>) {
    constexpr int COUNT = sizeof...(I);
    return shuffled(a, b,
                    std::integer_sequence<int, (I / SIDE * SIDE + FIRST + I % SIDE / 2 + I % 2 * COUNT)...>{});
}

// Load four numbers each from at(0), at(4), ...: a quad of every fourth row. Inserts from memory need no shuffle.
template <class F> [[gnu::always_inline]] inline words load_quads(F at) {
    typedef uint32_t quad __attribute__((vector_size(16), aligned(1), may_alias));
    const auto from = [&](int row) -> const quad & { return *reinterpret_cast<const quad *>(at(row)); };
    words all;
#if defined(__AVX2__)
    asm("vmovups %1, %x0" : "=v"(all) : "m"(from(0)));
#if defined(__AVX512F__)
    asm("vinserti32x4 $1, %1, %0, %0" : "+v"(all) : "m"(from(4)));
    asm("vinserti32x4 $2, %1, %0, %0" : "+v"(all) : "m"(from(8)));
    asm("vinserti32x4 $3, %1, %0, %0" : "+v"(all) : "m"(from(12)));
#else
    asm("vinserti128 $1, %1, %0, %0" : "+x"(all) : "m"(from(4)));
#endif
#else
    for (int row = 0; row < LANES; row += 4) {
        const quad x = from(row);
        std::memcpy(reinterpret_cast<char *>(&all) + 4 * row, &x, sizeof x);
    }
#endif
    return all;
}

// Transpose a square of 32-bit numbers: turned[j][i] = number j of row i. rows: the addresses of LANES rows.
// A vector gets quads of several rows when it is loaded, so only squares of 4 × 4 are left to be transposed.
template <class T> [[gnu::always_inline]] inline void turn(const T *const *rows, words (&turned)[LANES]) {
    typedef uint64_t pairs __attribute__((vector_size(4 * LANES)));
    constexpr std::make_integer_sequence<int, LANES> lanes{};
    constexpr std::make_integer_sequence<int, LANES / 2> halves{};
    constexpr int PACKED = sizeof(uint32_t) / sizeof(T);  // Numbers in 32 bits.
#pragma GCC unroll 4
    for (int j = 0; j < LANES; j += 4) {
        words row[4];
        pairs two[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) row[i] = load_quads([&](int k) { return rows[i + k] + j * PACKED; });
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            two[i] = (pairs)interleave<0, 4>(row[2 * i], row[2 * i + 1], lanes);
            two[2 + i] = (pairs)interleave<2, 4>(row[2 * i], row[2 * i + 1], lanes);
        }
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            turned[j + 2 * i] = (words)interleave<0, 2>(two[2 * i], two[2 * i + 1], halves);
            turned[j + 2 * i + 1] = (words)interleave<1, 2>(two[2 * i], two[2 * i + 1], halves);
        }
    }
}

}  // namespace baton
