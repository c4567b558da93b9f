// Products of bfloat16 in the tile registers of AMX, from the packed weights of product.h. Each sum is one chain of
// additions over tiles of 32 inputs. Within a tile, the even and the odd inputs are added up separately.
// The chain is the same for any number of rows, so the results are batch-invariant.
#pragma once

#if defined(__AMX_BF16__)
#include <immintrin.h>

#include <algorithm>

#include "product.h"
#include "runtime/cpp/numbers.h"
#include "runtime/cpp/parallel.h"
#include "runtime/cpp/products/registers.h"
#include "runtime/cpp/products/tiles.h"

namespace baton {
namespace {

constexpr int64_t TILE_WEIGHTS = TILE_INPUTS * BLOCK_OUT;  // Weights of a block for a tile of inputs.
constexpr int64_t WEIGHT_STRIDE = 2 * BLOCK_OUT * sizeof(bfloat16);  // Bytes from a pair of inputs to the next.

// Rows that are divided into tiles of the same height. If there is a rest, the last tile overlaps the one before it:
// its first rows are computed twice, with the same results.
struct RowTiles {
    int64_t rows, count, height;

    explicit RowTiles(int64_t rows)
        : rows(rows), count(tiles_of(rows, TILE_HEIGHT)), height(tiles_of(rows, count)) {}

    int64_t first(int64_t tile) const { return std::min(tile * height, rows - height); }
};

// The last tile of inputs, if the inputs end within it: its weights and its rows, padded with zeros.
template <int COUNT>
struct LastInputs {
    alignas(64) bfloat16 weights[TILE_WEIGHTS] = {};
    alignas(64) bfloat16 rows[COUNT][TILE_HEIGHT * TILE_INPUTS] = {};

    // x: COUNT tiles of rows. Rows are `stride` numbers apart, and the second tile begins `across` numbers after x.
    // inputs: how many are left. packed: their weights.
    LastInputs(const bfloat16 *x, int64_t stride, int64_t across, int64_t height, int64_t inputs,
               const bfloat16 *packed) {
        std::copy(packed, packed + (inputs + 1) / 2 * 2 * BLOCK_OUT, weights);
        for (int tile = 0; tile < COUNT; tile++)
            for (int64_t row = 0; row < height; row++) {
                const bfloat16 *const from = x + tile * across + row * stride;
                std::copy(from, from + inputs, rows[tile] + row * TILE_INPUTS);
            }
    }

    TileOperand left() const {
        return {reinterpret_cast<const char *>(rows), 64, 0, static_cast<int64_t>(sizeof rows[0])};
    }
};

inline TileOperand operand(const bfloat16 *weights) {
    return {reinterpret_cast<const char *>(weights), WEIGHT_STRIDE, TILE_STEPS * WEIGHT_STRIDE, 64};
}

constexpr int64_t AHEAD = 4096;  // Weights that come from memory are prefetched this many bytes ahead.

// The inputs [from, to) that are multiplied at a time. Both are multiples of TILE_INPUTS, unless `to` is the
// end of all inputs.
struct Depth {
    int64_t from, to;
    bool fetch;  // whether to prefetch the weights, because they come from memory
};

// Lines of memory that will be written soon, `stride` bytes apart: without the prefetch, writes of results wait for them.
struct Lines {
    const char *next = nullptr;
    int64_t stride = 0, left = 0, at_once = 0;

    void fetch() {
        for (int64_t i = std::min(at_once, left); i > 0; i--, left--, next += stride) __builtin_prefetch(next, 1);
    }
};

// The rows of x in COUNT tiles, `stride` numbers apart. The second tile begins `across` numbers after x.
template <int COUNT>
struct InputTiles {
    const bfloat16 *x;
    int64_t stride, across, height;

    template <class M>
    InputTiles(const M &m, const RowTiles &rows, int64_t tile)
        : x(m.x + rows.first(tile) * m.x_stride), stride(m.x_stride),
          across((rows.first(tile + COUNT - 1) - rows.first(tile)) * m.x_stride), height(rows.height) {}

    // Add the products of `inputs` inputs, from input `from` on, with their weights, which are padded with zeros.
    // before(right) is called before each whole tile.
    template <class F>
    void add(TileSums<COUNT, 2> held, int64_t from, int64_t inputs, const bfloat16 *weights, F before) const {
        constexpr int64_t BYTES = sizeof(bfloat16);
        TileOperand left{reinterpret_cast<const char *>(x + from), stride * BYTES, 64, across * BYTES};
        TileOperand right = operand(weights);
        const int64_t whole = inputs / TILE_INPUTS;
        for (int64_t i = 0; i < whole; i++, left.at += left.along, right.at += right.along) {
            before(right);
            held.add(left, right);
        }
        if (const int64_t rest = inputs % TILE_INPUTS) {
            const LastInputs<COUNT> last(x + from + inputs - rest, stride, across, height, rest,
                                         weights + whole * TILE_WEIGHTS);
            held.add(last.left(), operand(last.weights));
        }
    }
};

// Add the products of the inputs `depth` to the sums [height, BLOCK_OUT] of COUNT tiles of rows. The second tile's sums
// are `down` floats after the first one's. weights: those of these inputs.
template <int COUNT>
void add_products(const InputTiles<COUNT> &rows, const bfloat16 *weights, const Depth &depth, float *sums, int64_t down,
                  Lines lines) {
    const TileSums<COUNT, 2> held;
    if (depth.from == 0)
        held.clear();
    else
        held.load(sums, BLOCK_OUT, down);
    rows.add(held, depth.from, depth.to - depth.from, weights, [&](const TileOperand &right) {
        if (depth.fetch)
            for (int64_t byte = 0; byte < right.along; byte += 64)
                __builtin_prefetch(right.at + AHEAD + byte, 0, SECOND_CACHE);
        lines.fetch();
    });
    held.store(sums, BLOCK_OUT, down);
}

// Add the products of the inputs `depth` to the sums of `tile` and of tile + 1, if there is one. at(tile) returns the
// address of a tile's sums.
template <class M, class F>
void add_products(const M &m, const bfloat16 *weights, const Depth &depth, const RowTiles &rows, int64_t tile,
                  Lines lines, F at) {
    float *const sums = at(tile);
    if (tile + 1 == rows.count)
        return add_products<1>(InputTiles<1>(m, rows, tile), weights, depth, sums, 0, lines);
    add_products<2>(InputTiles<2>(m, rows, tile), weights, depth, sums, at(tile + 1) - sums, lines);
}

// block_sums, as product.h declares it.
inline void sums_in_tiles(const PackedMatrix<bfloat16> &m, int64_t block, float *sums, TileRegisters &registers) {
    const RowTiles rows(m.rows);
    registers.set_height(rows.height);
    for (int64_t tile = 0; tile < rows.count; tile += 2)
        add_products(m, m.block(block), {0, m.inputs, tile == 0}, rows, tile, {},
                     [&](int64_t t) { return sums + rows.first(t) * BLOCK_OUT; });
}

// A product with many rows is divided into pieces. These are the maximum rows and blocks of outputs of a piece, and the
// maximum inputs that it multiplies at a time. Its rows, weights and sums take less than two thirds of a second cache
// of 2 MiB.
constexpr int64_t PIECE_ROWS = 256, PIECE_BLOCKS = 8, PIECE_INPUTS = 1024;

// The sums of a piece: `rows` of m, for the blocks [begin, end) of outputs.
template <class M>
struct Piece {
    const M m;
    const RowTiles rows;
    const int64_t begin, end;
    float *const sums;  // [blocks, tiles, height, BLOCK_OUT]
    bfloat16 *const y;  // Where the results of the piece's rows will be written.
    const int64_t y_stride;

    float *at(int64_t block, int64_t tile) const {
        return sums + ((block - begin) * rows.count + tile) * rows.height * BLOCK_OUT;
    }

    // Write the results of a tile for one block of outputs.
    void finish(int64_t block, int64_t tile) const {
        const float *from = at(block, tile);
        bfloat16 *to = y + rows.first(tile) * y_stride;
        for (int64_t row = 0; row < rows.height; row++, from += BLOCK_OUT, to += y_stride) finish_row(from, block, to);
    }

    // Write the results of a row for one block of outputs to the row of y that begins at `to`.
    void finish_row(const float *from, int64_t block, bfloat16 *to) const {
        const int64_t first = block * BLOCK_OUT, left = m.outputs - first;
        const auto added = [&](int64_t i) {  // Without a bias, 0 makes -0 positive, as in `finish` of rows.h.
            return baton::load(from + i) + (m.bias && i < left ? baton::load(m.bias + first + i, left - i) : floats{});
        };
        const floats low = added(0), high = added(LANES);
        if (left >= BLOCK_OUT) {
            _mm512_storeu_si512(to + first, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
            return;
        }
        put(to + first, low, left);
        if (left > LANES) put(to + first + LANES, high, left - LANES);
    }

    // Multiply with the packed weights of m. fetch: whether they come from memory, because this thread's previous piece
    // had other weights; then they are prefetched.
    void multiply(TileRegisters &registers, bool fetch) const {
        const int64_t parts = tiles_of(m.inputs, PIECE_INPUTS);
        multiply(registers, tiles_of(m.inputs, parts * TILE_INPUTS) * TILE_INPUTS, fetch,
                 [&](int64_t block, const Depth &depth, int64_t) { return m.block(block) + depth.from * BLOCK_OUT; });
    }

    // Multiply `inputs` inputs at a time, which is a multiple of TILE_INPUTS. weights(block, depth, tile) returns their
    // weights. For each of these parts it is called for tile 0 and all blocks before it is called for the next tiles.
    template <class F>
    void multiply(TileRegisters &registers, int64_t inputs, bool fetch, F weights) const {
        registers.set_height(rows.height);
        for (int64_t from = 0; from < m.inputs; from += inputs)
            for (int64_t tile = 0; tile < rows.count; tile += 2)
                for (int64_t block = begin; block < end; block++) {
                    const bool is_last = from + inputs >= m.inputs;
                    const Depth depth{from, std::min(from + inputs, m.inputs), fetch && tile == 0};
                    add_products(m, weights(block, depth, tile), depth, rows, tile,
                                 is_last ? results(tile, block, depth) : Lines{},
                                 [&](int64_t t) { return at(block, t); });
                    for (int64_t t = tile; is_last && t < std::min(tile + 2, rows.count); t++) finish(block, t);
                }
    }

    // Return the lines to which the results of two tiles will be written: only each row's last line, because the
    // results of the previous block were written to the first one.
    Lines results(int64_t tile, int64_t block, const Depth &depth) const {
        const int64_t steps = std::max<int64_t>((depth.to - depth.from) / TILE_INPUTS, 1), lines = 2 * rows.height;
        const bfloat16 *const first =
            y + rows.first(tile) * y_stride + std::min((block + 1) * BLOCK_OUT, m.outputs) - 1;
        return {reinterpret_cast<const char *>(first), y_stride * 2, lines, (lines + steps - 1) / steps};
    }
};

// y = the product of many rows, in pieces of at most `most` rows.
// multiply(piece, registers, is_first) computes a piece. is_first: whether the thread's previous piece had other
// weights.
template <class M, class F>
void multiply_pieces(const M &m, int64_t most, bfloat16 *y, int64_t y_stride, F multiply) {
    const int64_t blocks = std::clamp<int64_t>(m.blocks() / (2 * pool.threads()), 1, PIECE_BLOCKS);
    const int64_t across = (m.blocks() + blocks - 1) / blocks, down = (m.rows + most - 1) / most;
    parallel_for_with<TileRegisters>(across * down, 1, [&](TileRegisters &registers, int64_t begin, int64_t end) {
        float *const sums = scratch(0, PIECE_BLOCKS * (most + TILE_HEIGHT) * BLOCK_OUT);
        for (int64_t i = begin; i < end; i++) {  // Pieces with the same weights follow one another.
            const int64_t row = m.rows * (i % down) / down, rows = m.rows * (i % down + 1) / down - row;
            const int64_t first = m.blocks() * (i / down) / across, last = m.blocks() * (i / down + 1) / across;
            const M part = m.from_row(row, rows);
            multiply(Piece<M>{part, RowTiles(rows), first, last, sums, y + row * y_stride, y_stride}, registers,
                     i == begin || i % down == 0);
        }
    });
}

}  // namespace
}  // namespace baton
#endif
