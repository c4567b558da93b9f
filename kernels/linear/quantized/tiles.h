// Products of weights of 8 bits with rows of bfloat16 in the tile registers of AMX. The weights, scaled, are rounded to
// bfloat16 for them: to read, scale and store the sums of each group would take longer than to multiply. A weight is the
// same for any number of rows, so the results are batch-invariant.
#pragma once

#if defined(__AMX_BF16__)
#include <immintrin.h>

#include <algorithm>
#include <cmath>

#include "groups.h"
#include "linear/dense/tiles.h"
#include "product.h"

namespace baton {
namespace {

using Int8Matrix = QuantizedMatrix<8, bfloat16>;

constexpr float OFFSET = 0x1p15f + 128;  // The number that `raised` adds to a code.

// Return OFFSET + the codes that are the second byte of each word, as float32: with its upper bit inverted, a byte counts
// units of 1 among the bits of 2^15.
__attribute__((always_inline)) inline floats raised(words codes) {
    const __m512i byte = _mm512_set1_epi32(0xff00), inverted = _mm512_set1_epi32(0x47008000);
    return (floats)_mm512_ternarylogic_epi32((__m512i)codes, byte, inverted, 0x6a);  // codes & byte ^ inverted
}

// Store the upper halves of the words of both vectors, interleaved.
__attribute__((always_inline)) inline void put_pairs(bfloat16 *to, words first, words second) {
    const __m512i upper_half = _mm512_set4_epi32(0x0f0e0f0e, 0x0b0a0b0a, 0x07060706, 0x03020302);
    constexpr __mmask64 LOWER_HALVES = 0x3333333333333333;
    _mm512_storeu_si512(to, _mm512_mask_shuffle_epi8((__m512i)second, LOWER_HALVES, (__m512i)first, upper_half));
}

// Convert a group's weights: to, [inputs / 2, OUT, 2], rounded to nearest, ties away from zero. Forms of 8 bits have
// neither minima nor factors, so that the scaled OFFSET is exact; scales are below 1e34.
inline void round_group(const GroupIterator &group, LinesAhead &ahead, bfloat16 *to) {
    const Form &form = group.form;
    const Codes<8> codes(group.codes, form.group, form.minimum);
    floats scale[VECTORS], origin[VECTORS];
    for (int v = 0; v < VECTORS; v++) {
        scale[v] = group.scale(v);
        scale[v] = scale[v] == scale[v] ? scale[v] : splat(NAN);  // Another NaN might be rounded to zero.
        origin[v] = scale[v] * -OFFSET;
    }
    ahead.begin();
    for (int unit = 0; unit < form.group / Codes<8>::UNIT; unit++, to += Codes<8>::UNIT * OUT) {
        ahead.fetch(1);
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) {
            const auto rounded = [&](words both) __attribute__((always_inline)) {
                return (words)multiply_add(origin[v], raised(both), scale[v]) + 0x8000;
            };
            const words both = (words)load_signed(codes.lower + unit * LINE + v * LANES * 2);
            put_pairs(to + v * LANES * 2, rounded(both << 8), rounded(both));
        }
    }
    ahead.finish(group.codes + form.code_bytes);
}

// Convert the groups' weights until input `until`.
inline void round_groups(GroupIterator &group, LinesAhead &ahead, int64_t until, bfloat16 *to) {
    for (; group.index * group.form.group < until; group.next(), to += group.form.group * OUT)
        round_group(group, ahead, to);
}

// Compute the sums [COUNT, height, OUT] of a block for COUNT tiles of rows. Weights are rounded while those before them
// are multiplied.
template <int COUNT>
void multiply_in_registers(const Int8Matrix &m, const RowTiles &rows, int64_t block, float *sums) {
    alignas(LINE) bfloat16 weights[2][MOST_GROUP * OUT];
    const int64_t size = std::max<int64_t>(m.form.group, TILE_INPUTS);
    const InputTiles<COUNT> x(m, rows, 0);
    const TileSums<COUNT, 2> held;
    held.clear();
    GroupIterator group(m, block);
    LinesAhead ahead(m.block(block));
    for (int64_t from = 0; from < m.inputs; from += size) {
        bfloat16 *const rounded = weights[from / size % 2];
        const int64_t until = std::min(from + size, m.inputs);
        round_groups(group, ahead, until, rounded);
        x.add(held, from, until - from, rounded, [](const TileOperand &) {});
    }
    held.store(sums, OUT, rows.height * OUT);
}

// Rounded weights of some inputs, whole spans of every form, for a block.
constexpr int64_t ROUNDED_INPUTS = 256;
struct RoundedWeights {
    alignas(LINE) bfloat16 numbers[ROUNDED_INPUTS * OUT];
};

// block_sums, as product.h declares it.
inline void sums_of_rounded(const Int8Matrix &m, int64_t block, float *sums, TileRegisters &registers) {
    const RowTiles rows(m.rows);
    registers.set_height(rows.height);
    if (rows.count == 1) return multiply_in_registers<1>(m, rows, block, sums);
    alignas(LINE) float found[(ROWS_AT_ONCE + TILE_HEIGHT) * OUT];  // [tiles, height, OUT]
    if (rows.count == 2) {
        multiply_in_registers<2>(m, rows, block, found);
    } else {
        RoundedWeights rounded;
        GroupIterator group(m, block);
        LinesAhead ahead(m.block(block));
        for (int64_t from = 0; from < m.inputs; from += ROUNDED_INPUTS) {
            const Depth depth{from, std::min(from + ROUNDED_INPUTS, m.inputs), false};
            round_groups(group, ahead, depth.to, rounded.numbers);
            for (int64_t tile = 0; tile < rows.count; tile += 2)
                add_products(m, rounded.numbers, depth, rows, tile, {},
                             [&](int64_t t) { return found + t * rows.height * OUT; });
        }
    }
    for (int64_t tile = 0; tile < rows.count; tile++)
        std::copy_n(found + tile * rows.height * OUT, rows.height * OUT, sums + rows.first(tile) * OUT);
}

// y = the product of many rows. Only a part of the inputs is in use at once, so that a piece may have more rows than one
// of linear/dense/tiles.h.
inline void multiply_rounded(const Int8Matrix &m, bfloat16 *y, int64_t y_stride) {
    multiply_pieces(m, 2 * PIECE_ROWS, y, y_stride, [](const auto &piece, TileRegisters &registers, bool) {
        constexpr int64_t FLOATS = sizeof(RoundedWeights) / sizeof(float);
        auto *const rounded = reinterpret_cast<RoundedWeights *>(scratch(1, PIECE_BLOCKS * FLOATS));
        piece.multiply(registers, ROUNDED_INPUTS, false, [&](int64_t block, const Depth &depth, int64_t tile) {
            bfloat16 *const weights = rounded[block - piece.begin].numbers;
            if (tile > 0) return weights;
            GroupIterator group(piece.m, block, depth.from / piece.m.form.group);
            LinesAhead ahead(group.codes);
            round_groups(group, ahead, depth.to, weights);
            return weights;
        });
    });
}

}  // namespace
}  // namespace baton
#endif
