// A mixture of experts with packed weights, as kernels/moe/experts/reference.py defines it. Pairs of a token and one of
// its experts are sorted by expert and cut into tiles, and an expert's weights are read once per tile. A token's
// experts are added up in the order of their numbers, so the results are batch-invariant.
#include <algorithm>
#include <type_traits>

#include "linear/dense/product.h"
#include "linear/int8_activations/product.h"
#include "linear/quantized/product.h"
#include "runtime/cpp/numbers.h"
#include "runtime/cpp/parallel.h"
#include "runtime/cpu_graph/call.h"

namespace baton {
namespace {

enum Activation : int { SILU_GATED = 0, RELU2 = 1 };

// The experts of each token.
struct Choice {
    const int32_t *experts;  // [rows, top_k]; numbers outside of [0, count) are left out.
    const float *weights;  // [rows, top_k]
    int64_t rows, top_k, count;

    int64_t pairs() const { return rows * top_k; }
};

// `rows` pairs of one expert, from `first` on in sorted order.
struct Tile {
    int32_t expert, first, rows;
};

// The pairs, sorted by expert (counting sort) and cut into tiles of up to ROWS_AT_ONCE pairs. A pair is row · top_k +
// k.
// memory: int32 [count + 1 + 4·pairs], for the end of each expert's pairs, the order of the pairs, and the tiles.
struct SortedPairs {
    const int32_t *order;
    const Tile *tiles;
    int64_t count = 0;

    SortedPairs(const Choice &choice, int32_t *memory) {
        const int32_t pairs = static_cast<int32_t>(choice.pairs()), experts = static_cast<int32_t>(choice.count);
        int32_t *const ends = memory, *const sorted = memory + experts + 1;
        Tile *const cut = reinterpret_cast<Tile *>(sorted + pairs);
        const auto is_there = [=](int32_t pair) { return choice.experts[pair] >= 0 && choice.experts[pair] < experts; };
        std::fill(ends, ends + experts + 1, 0);
        for (int32_t pair = 0; pair < pairs; pair++)
            if (is_there(pair)) ends[choice.experts[pair] + 1]++;
        for (int32_t expert = 0; expert < experts; expert++) {
            const int32_t first = ends[expert], rows = ends[expert + 1];
            for (int32_t row = 0; row < rows; row += ROWS_AT_ONCE)
                cut[count++] = {expert, first + row, std::min<int32_t>(ROWS_AT_ONCE, rows - row)};
            ends[expert + 1] += first;
        }
        for (int32_t pair = 0; pair < pairs; pair++)
            if (is_there(pair)) sorted[ends[choice.experts[pair]]++] = pair;
        order = sorted;
        tiles = cut;
    }

    int64_t pairs() const { return count ? tiles[count - 1].first + tiles[count - 1].rows : 0; }
};

// Return the minimum iterations per part of a parallel loop, if an iteration multiplies `weights` weights: see grain()
// in kernels/linear/dense/cpu.cpp.
int64_t grain(int64_t weights, const Choice &choice, const SortedPairs &sorted) {
    const int64_t rows = choice.pairs() / std::max<int64_t>(sorted.count, 1);
    return 65536 / (weights * (1 + rows / 16) + 1) + 1;
}

// Return the inputs of a tile's pairs as consecutive rows, in this thread's scratch memory. A single pair is not copied.
template <class T>
const T *gathered(const T *x, int64_t stride, int64_t inputs, const Tile &tile, const int32_t *order, int64_t top_k) {
    if (tile.rows == 1) return x + order[tile.first] / top_k * stride;
    T *const rows = reinterpret_cast<T *>(scratch(0, (tile.rows * inputs * sizeof(T) + 3) / 4));
    for (int64_t row = 0; row < tile.rows; row++) {
        const T *const from = x + order[tile.first + row] / top_k * stride;
        std::copy(from, from + inputs, rows + row * inputs);
    }
    return rows;
}

// Write one block of hidden [rows, outputs]: silu(gate)·up, or relu(up)² if gate is null. gate, up: [rows, BLOCK_OUT].
template <class T>
void activate(const float *gate, const float *up, int64_t rows, int64_t block, int64_t outputs, T *hidden) {
    const int64_t first = block * BLOCK_OUT, last = std::min(first + BLOCK_OUT, outputs);
    for (int64_t row = 0; row < rows; row++, hidden += outputs)
        for (int64_t i = first; i < last; i += LANES) {
            const int64_t at = row * BLOCK_OUT + i - first;
            const floats given = load(up + at), positive = given < 0 ? floats{} : given;  // keeps NaN: NaN < 0 is false
            put(hidden + i, gate ? silu(load(gate + at)) * given : positive * positive, last - i);
        }
}

// Compute hidden [pairs in sorted order, m.outputs]. m: the first expert's first matrix, with the rows of x. If gated,
// each expert has two matrices.
template <class M, class T>
void project_in(const M &m, bool gated, const Choice &c, const SortedPairs &sorted, T *hidden) {
    const int64_t blocks = m.blocks();
    const auto matrix = [&](const Tile &tile) { return m.number(gated ? 2 * tile.expert : tile.expert); };
    const int64_t weights = BLOCK_OUT * m.inputs * (gated ? 2 : 1);
    parallel_for_with<TileRegisters>(
        sorted.count * blocks, grain(weights, c, sorted), [&](TileRegisters &registers, int64_t begin, int64_t end) {
            float gate[ROWS_AT_ONCE * BLOCK_OUT], up[ROWS_AT_ONCE * BLOCK_OUT];
            const typename M::Input *rows = nullptr;
            const float *sums = nullptr;
            for (int64_t task = begin; task < end; task++) {
                const Tile &tile = sorted.tiles[task / blocks];
                const int64_t block = task % blocks;
                if (task == begin || block == 0) {
                    rows = gathered(m.x, m.x_stride, m.inputs, tile, sorted.order, c.top_k);
                    sums = input_sums(m.with(rows, m.inputs, tile.rows, nullptr));
                }
                const M first = matrix(tile), last = gated ? m.number(2 * tile.expert + 1) : first;
                const M coming = matrix(sorted.tiles[std::min(task + 1, end - 1) / blocks]);
                const auto given = [&](const M &matrix) { return matrix.with(rows, m.inputs, tile.rows, sums); };
                if (gated) block_sums(given(first), block, gate, registers, last.block(block));
                block_sums(given(last), block, up, registers, coming.block((task + 1) % blocks));
                activate(gated ? gate : nullptr, up, tile.rows, block, m.outputs, hidden + tile.first * m.outputs);
            }
        });
}

// Return how many consecutive blocks of outputs are computed together: several, so that they share a tile's inputs
// while the inputs are in the cache, but so few that their sums stay in the cache, too.
int64_t blocks_at_once(const Choice &c) { return std::clamp<int64_t>(2048 / std::max<int64_t>(c.rows, 1), 1, 8); }

// Compute y [rows, m.outputs], the weighted sums over each token's pairs. m: the first expert's matrix, with hidden.
template <class M, class T>
void project_out(const M &m, const Choice &c, const SortedPairs &sorted, T *y) {
    const int64_t most = blocks_at_once(c), size = c.rows * BLOCK_OUT;
    const int64_t together = std::min(most, m.blocks() / (2 * pool.threads()));  // Fewer if threads would idle.
    const int64_t weights = BLOCK_OUT * m.inputs * sorted.count;
    parallel_for_with<TileRegisters>(
        m.blocks(), std::max(grain(weights, c, sorted), together),
        [&](TileRegisters &registers, int64_t begin, int64_t end) {
            float sums[ROWS_AT_ONCE * BLOCK_OUT];
            float *const totals = scratch(1, most * size);
            for (int64_t first = begin; first < end; first += most) {
                const int64_t blocks = std::min(most, end - first);
                std::fill(totals, totals + blocks * size, 0.0f);
                for (int64_t t = 0; t < sorted.count; t++) {
                    const Tile &tile = sorted.tiles[t];
                    const auto *const rows = m.x + tile.first * m.inputs;
                    const float *const of_inputs = input_sums(m.with(rows, m.inputs, tile.rows, nullptr));
                    const M of_tile = m.number(tile.expert).with(rows, m.inputs, tile.rows, of_inputs);
                    const M coming = m.number(sorted.tiles[std::min(t + 1, sorted.count - 1)].expert);
                    for (int64_t block = 0; block < blocks; block++) {
                        const auto *const following = block + 1 < blocks ? nullptr : coming.block(first);
                        block_sums(of_tile, first + block, sums, registers, following);
                        for (int64_t row = 0; row < tile.rows; row++) {
                            const int64_t pair = sorted.order[tile.first + row];
                            float *const total = totals + block * size + pair / c.top_k * BLOCK_OUT;
                            for (int64_t i = 0; i < BLOCK_OUT; i += LANES)
                                put(total + i, load(total + i) + load(sums + row * BLOCK_OUT + i) * c.weights[pair]);
                        }
                    }
                }
                for (int64_t block = 0; block < blocks; block++)
                    for (int64_t row = 0; row < c.rows; row++) {
                        const int64_t from = (first + block) * BLOCK_OUT, to = std::min(from + BLOCK_OUT, m.outputs);
                        for (int64_t i = from; i < to; i += LANES)
                            put(y + row * m.outputs + i, load(totals + block * size + row * BLOCK_OUT + i - from),
                                to - i);
                    }
            }
        });
}

constexpr int ROUNDS = 64;  // Added to a form whose inputs are rounded to 8 bits.

// Call f(matrix) for a weight [outputs, inputs], or for the first of several, with rows in the type that is multiplied.
// form: 0 if the weight is packed as for baton_linear, else as for baton_quantized_linear, or with ROUNDS.
template <class T, class F>
void with_matrix(int form, const void *weight, int64_t outputs, int64_t inputs, const T *x, int64_t stride,
                 int64_t rows, F f) {
    if (form == 0)
        return f(PackedMatrix<T>{x, static_cast<const T *>(weight), nullptr, stride, rows, inputs, outputs});
    const Form given(form, inputs);
    with_bits(given.bits, [=](auto bits) {
        const auto *const data = static_cast<const uint8_t *>(weight);
        if (form & ROUNDS) return f(with_rounded<bits>(data, given, x, stride, rows, inputs, outputs));
        f(QuantizedMatrix<bits, T>{data, given, x, nullptr, stride, rows, inputs, outputs, nullptr});
    });
}

}  // namespace
}  // namespace baton

// Compute reference.experts.
// x: [rows, wide], rows `stride` elements apart, and y: [rows, wide], of dtype `type`.
// chosen, weights: [rows, top_k], of `count` experts.
// first: 2·count matrices [inner, wide] (gate and up of each expert), or count matrices for relu².
// second: count matrices [wide, inner].
// first_form, second_form: 0 if matrices are packed as for baton_linear, else the form for baton_quantized_linear; and
// 64 more if their inputs are rounded, as for baton_int8_activations_linear.
// hidden: [rows·top_k, inner] of `type`, and memory: [count + 1 + 4·rows·top_k], for intermediate results.
extern "C" void baton_experts(int type, int first_form, int second_form, int activation, const void *x, int64_t stride,
                              const int32_t *chosen, const float *weights, const void *first, const void *second,
                              void *hidden, int32_t *memory, void *y, int64_t rows, int64_t top_k, int64_t count,
                              int64_t wide, int64_t inner) {
    using namespace baton;
    with_type(type, [=](auto *t) {
        using T = std::remove_pointer_t<decltype(t)>;
        const Choice choice{chosen, weights, rows, top_k, count};
        const SortedPairs sorted(choice, memory);
        auto *const between = static_cast<T *>(hidden);
        with_matrix(first_form, first, inner, wide, static_cast<const T *>(x), stride, rows, [&](const auto &m) {
            project_in(m, activation == SILU_GATED, choice, sorted, between);
        });
        with_matrix(second_form, second, wide, inner, between, inner, sorted.pairs(),
                    [&](const auto &m) { project_out(m, choice, sorted, static_cast<T *>(y)); });
    });
}

BATON_RECORDABLE(baton_experts)
