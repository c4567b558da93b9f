// Products of float32 matrices whose operands are rounded to bfloat16, in the tile registers of AMX.
#pragma once

#if defined(__AMX_BF16__)
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "registers.h"
#include "matrix.h"
#include "runtime/cpp/numbers.h"
#include "tiles.h"

namespace baton {

// A rounded matrix: tiles of 16 lines of 32 numbers, padded with zeros.
struct RoundedMatrix {
    static constexpr int64_t LINE = 32, TILE = 16 * LINE;
    bfloat16 *at;
    int64_t along, across;  // Numbers to the tile of the next inputs, and to that of the next rows or columns.

    TileOperand from(int64_t index) const {
        constexpr int64_t BYTES = sizeof(bfloat16);
        return {reinterpret_cast<const char *>(at + index * across), LINE * BYTES, along * BYTES, across * BYTES};
    }

    bfloat16 *line(int64_t input, int64_t index, int64_t number) const {
        return at + input * along + index * across + number * LINE;
    }
};

// Products with rounded operands, with the interface of Plain (tile.h). The tile registers must be set up with 16 rows.
struct Rounded {
    static constexpr int BLOCK = TILE_HEIGHT;
    using Left = RoundedMatrix;  // Tiles of 16 rows and 32 inputs.
    using Right = RoundedMatrix;  // Tiles of 16 pairs of inputs and 16 columns.

    static int64_t left_size(int64_t rows, int64_t count) {
        return tiles_of(rows, TILE_HEIGHT) * tiles_of(count, TILE_INPUTS) * Left::TILE / 2;
    }

    static int64_t right_size(int64_t count, int64_t columns) {
        return tiles_of(count, TILE_INPUTS) * (columns / LANES) * Right::TILE / 2;
    }

    static Left left(int64_t count, Matrix<const float>, float *memory) {
        return {reinterpret_cast<bfloat16 *>(memory), Left::TILE, tiles_of(count, TILE_INPUTS) * Left::TILE};
    }

    static Left make_left(int64_t rows, int64_t count, Matrix<const float> from, float *memory) {
        const Left to = left(count, from, memory);
        for (int64_t row = 0; row < tiles_of(rows, TILE_HEIGHT) * TILE_HEIGHT; row++)
            for (int64_t input = 0; input < count; input += TILE_INPUTS) {
                const auto numbers = [&](int64_t first) {
                    const bool is_there = row < rows && first < count;
                    return is_there ? load(from.at + row * from.stride + first, count - first) : floats{};
                };
                bfloat16 *const line = to.line(input / TILE_INPUTS, row / TILE_HEIGHT, row % TILE_HEIGHT);
                put(line, numbers(input));
                put(line + LANES, numbers(input + LANES));
            }
        return to;
    }

    static Right make_right(int64_t count, int64_t columns, Matrix<const float> from, float *memory) {
        const Right to = right(columns, memory);
        put_inputs(0, tiles_of(count, TILE_INPUTS) * TILE_INPUTS, count, columns, from, to);
        return to;
    }

    static Right empty_right(int64_t count, int64_t columns, Matrix<const float>, float *memory) {
        std::fill(memory, memory + right_size(count, columns), 0.0f);
        return right(columns, memory);
    }

    static void put_right(int64_t begin, int64_t end, int64_t columns, Matrix<const float> from, const Right &to) {
        put_inputs(begin, end, end, columns, from, to);
    }

    static void multiply(int64_t rows, int64_t columns, int64_t count, const Left &left, const Right &right,
                         Matrix<const float> kept, Matrix<float> to) {
        in_tiles(rows, columns, kept, to, [&](auto sums, int64_t row, int64_t column) {
            sums.add(left.from(row), right.from(column), tiles_of(count, TILE_INPUTS));
        });
    }

    static void multiply_lower(int64_t rows, int64_t columns, const Left &left, const Right &right,
                               Matrix<const float> kept, Matrix<float> to) {
        in_tiles(rows, columns, kept, to, [&](auto sums, int64_t row, int64_t column) {
            const int64_t end = std::min((row + 2) * TILE_HEIGHT, rows);  // After the last row's diagonal.
            sums.add(left.from(row), right.from(column), tiles_of(end, TILE_INPUTS));
        });
    }

    static void add_lower(int64_t begin, int64_t end, int64_t columns, const Left &left, const Right &right,
                          Matrix<float> to) {
        const float one = 1;
        in_tiles(end - begin, columns, {&one, 0}, {to.at + begin * to.stride, to.stride},
                 [&](auto sums, int64_t, int64_t column) {
                     sums.add(left.from(begin / TILE_HEIGHT), right.from(column), tiles_of(begin, TILE_INPUTS));
                 });
    }

private:
    static Right right(int64_t columns, float *memory) {
        return {reinterpret_cast<bfloat16 *>(memory), columns / LANES * Right::TILE, Right::TILE};
    }

    // Store inputs [begin, end) of a right side; those from `count` on are 0. begin is even.
    static void put_inputs(int64_t begin, int64_t end, int64_t count, int64_t columns, Matrix<const float> from,
                           const Right &to) {
        const auto numbers = [&](int64_t input, int64_t column) {
            return input < count ? load(from.at + input * from.stride + column) : floats{};
        };
        for (int64_t input = begin; input < end; input += 2)
            for (int64_t column = 0; column < columns; column += LANES) {
                const words pairs = in_pairs(numbers(input, column), numbers(input + 1, column));
                std::memcpy(to.line(input / TILE_INPUTS, column / LANES, input % TILE_INPUTS / 2), &pairs,
                            sizeof pairs);
            }
    }

    // Return pairs of the numbers, rounded: the first one in the lower half of a word.
    static words in_pairs(floats first, floats second) {
        const __m512i places = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22,
                                                6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
        const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
        return (words)_mm512_maskz_permutexvar_epi16(0xffffffff, places, both);
    }
};

}  // namespace baton
#endif
