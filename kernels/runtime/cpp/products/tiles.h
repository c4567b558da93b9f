// Products in the tile registers of AMX, of bfloat16 operands that lie in memory as tiles.
#pragma once

#if defined(__AMX_BF16__)
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "registers.h"
#include "matrix.h"
#include "runtime/cpp/numbers.h"

namespace baton {

inline int64_t tiles_of(int64_t count, int64_t size) { return (count + size - 1) / size; }

// One side of a product. A tile is 16 rows (left) or 16 pairs of inputs (right), of 64 bytes, `stride` bytes apart.
struct TileOperand {
    const char *at;
    int64_t stride;
    int64_t along;  // Bytes to the tile of the next inputs,
    int64_t across;  // and to that of the next rows or columns.

    TileOperand from(int64_t input, int64_t index) const {
        return {at + input * along + index * across, stride, along, across};
    }
};

// The sums of ROWS × COLUMNS tiles, one or two each way, in the registers 0 to 3: [0, 1] over [2, 3]. Registers 4 and 5
// hold tiles of the left side, 6 and 7 of the right side.
template <int ROWS, int COLUMNS>
struct TileSums {
    static_assert(ROWS <= 2 && COLUMNS <= 2);

    static void clear() {
        clear_tile<0>();
        if constexpr (COLUMNS == 2) clear_tile<1>();
        if constexpr (ROWS == 2) clear_tile<2>();
        if constexpr (ROWS == 2 && COLUMNS == 2) clear_tile<3>();
    }

    // from, to: the sums, rows `stride` floats apart; the second tile of rows is `down` floats after the first one.
    static void load(const float *from, int64_t stride, int64_t down) {
        const int64_t bytes = stride * static_cast<int64_t>(sizeof(float));
        load_tile<0>(from, bytes);
        if constexpr (COLUMNS == 2) load_tile<1>(from + LANES, bytes);
        if constexpr (ROWS == 2) load_tile<2>(from + down, bytes);
        if constexpr (ROWS == 2 && COLUMNS == 2) load_tile<3>(from + down + LANES, bytes);
    }

    static void store(float *to, int64_t stride, int64_t down) {
        const int64_t bytes = stride * static_cast<int64_t>(sizeof(float));
        store_tile<0>(to, bytes);
        if constexpr (COLUMNS == 2) store_tile<1>(to + LANES, bytes);
        if constexpr (ROWS == 2) store_tile<2>(to + down, bytes);
        if constexpr (ROWS == 2 && COLUMNS == 2) store_tile<3>(to + down + LANES, bytes);
    }

    // Add the products of one tile of inputs.
    static void add(const TileOperand &left, const TileOperand &right) {
        load_tile<6>(right.at, right.stride);
        load_tile<4>(left.at, left.stride);
        multiply_add<0, 4, 6>();
        if constexpr (COLUMNS == 2) load_tile<7>(right.at + right.across, right.stride);
        if constexpr (COLUMNS == 2) multiply_add<1, 4, 7>();
        if constexpr (ROWS == 1) return;
        load_tile<5>(left.at + left.across, left.stride);
        multiply_add<2, 5, 6>();
        if constexpr (COLUMNS == 2) multiply_add<3, 5, 7>();
    }

    static void add(TileOperand left, TileOperand right, int64_t inputs) {
        for (; inputs > 0; inputs--, left.at += left.along, right.at += right.along) add(left, right);
    }
};

// to [rows, columns] ← kept·to + sums. add(sums, row, column) adds the products of two tiles of rows, from tile `row`
// on, and of two tiles of columns, from tile `column` on, or of one where there is no second.
// Tiles are 16 rows high, and columns is a multiple of LANES. kept: a factor for each row; null: `to` is overwritten
// without being read.
template <class F>
void in_tiles(int64_t rows, int64_t columns, Matrix<const float> kept, Matrix<float> to, F add) {
    const auto block = [&](auto down, auto across, int64_t row, int64_t column) {
        constexpr int64_t WIDE = across * LANES;
        const TileSums<down, across> sums;
        // Sums are added to `to` in vectors: tiles would wait for vectors that were stored just before.
        alignas(64) float found[down * TILE_HEIGHT * WIDE];
        sums.clear();
        add(sums, row, column);
        sums.store(found, WIDE, TILE_HEIGHT * WIDE);
        const int64_t first = row * TILE_HEIGHT, last = std::min(first + down * TILE_HEIGHT, rows);
        for (int64_t r = first; r < last; r++)
#pragma GCC unroll 2
            for (int64_t c = 0; c < WIDE; c += LANES) {
                float *const at = to.at + r * to.stride + column * LANES + c;
                const floats sum = load(found + (r - first) * WIDE + c);
                put(at, kept.at ? sum + load(at) * kept.at[r * kept.stride] : sum);
            }
    };
    constexpr std::integral_constant<int, 1> one;
    constexpr std::integral_constant<int, 2> two;
    const int64_t down = tiles_of(rows, TILE_HEIGHT), across = columns / LANES;
    for (int64_t row = 0; row < down; row += 2)
        for (int64_t column = 0; column < across; column += 2) {
            if (row + 1 < down)
                column + 1 < across ? block(two, two, row, column) : block(two, one, row, column);
            else
                column + 1 < across ? block(one, two, row, column) : block(one, one, row, column);
        }
}

// to [rows, columns] ← kept·to + left [rows, count] · right [count / 2, columns, 2], padded with zeros to whole tiles of
// inputs. The left side has memory for whole tiles of rows.
inline void multiply_pairs(int64_t rows, int64_t columns, int64_t count, Matrix<const bfloat16> left,
                           Matrix<const bfloat16> right, Matrix<const float> kept, Matrix<float> to) {
    const int64_t left_stride = left.stride * static_cast<int64_t>(sizeof(bfloat16));
    const int64_t right_stride = right.stride * static_cast<int64_t>(sizeof(bfloat16));
    const TileOperand a{reinterpret_cast<const char *>(left.at), left_stride, 64, TILE_HEIGHT * left_stride};
    const TileOperand b{reinterpret_cast<const char *>(right.at), right_stride, TILE_STEPS * right_stride, 64};
    in_tiles(rows, columns, kept, to, [&](auto sums, int64_t row, int64_t column) {
        sums.add(a.from(0, row), b.from(0, column), tiles_of(count, TILE_INPUTS));
    });
}

}  // namespace baton
#endif
