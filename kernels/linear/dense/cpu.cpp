// x · weightᵀ with packed weights. Each output is added up in one chain along the inputs, in the same order for any
// number of rows and threads, so the results are batch-invariant.
#include <algorithm>
#include <type_traits>

#include "tiles.h"
#include "product.h"
#include "rows.h"
#include "runtime/cpp/numbers.h"
#include "runtime/cpp/parallel.h"
#include "runtime/cpu_graph/call.h"

namespace baton {
namespace {

// The steps along the inputs are divided into parts of about DEPTH steps. All tiles of rows compute one part before the
// next, so that a part's weights stay in the L1 cache while the next part's weights are prefetched. Up to FEW rows are
// limited by memory: parts have DEPTH_OF_FEW steps, and weights are prefetched into L2, where more fetches can be in
// flight, except for one line of each page. sums_of_converted has parts of STRETCH inputs instead, and for_row_tiles
// prefetches the next part into L1 for any number of rows.
constexpr int64_t FEW = 16, DEPTH = 256, DEPTH_OF_FEW = 64;
constexpr int64_t MOST_RESIDENT = 64;  // Rows that stay in the second cache: 512 KiB for 2,048 inputs.
constexpr int64_t STEP_BYTES = OUT * 4;

#if !defined(__AVX512BF16__)
// sums_of for targets that multiply bfloat16 as float32, for several tiles: each weight is converted once, by the first.
__attribute__((noinline)) void sums_of_converted(const PackedMatrix<bfloat16> &m, const Rows<bfloat16> &rows_of_x,
                                                 int64_t block, float *sums, const void *following) {
    alignas(LINE) float weights[STRETCH * OUT];
    std::fill(sums, sums + m.rows * OUT, 0.0f);
    const bfloat16 *packed = m.block(block);
    for (int64_t from = 0; from < m.inputs; from += STRETCH) {
        const int64_t inputs = std::min(STRETCH, m.inputs - from), whole = inputs / 2 * 2;
        const void *const next = from + STRETCH >= m.inputs && following ? following : packed + STRETCH * OUT;
        for_row_tiles(
            m.rows, sums, next, OUT * sizeof *packed,
            [&](auto &tile, int64_t row, Prefetch prefetch) {
                const float *const x = rows_of_x.from(row).first + from;
                for (int64_t i = 0; i < whole; i += 2) {
                    prefetch.step(2);
                    const Step<bfloat16> step(packed + i * OUT);
                    step.write(weights + i * OUT);
                    tile.add(x + i, rows_of_x.stride, step);
                }
                if (whole == inputs) return;
                Step<bfloat16>(packed + whole * OUT).write(weights + whole * OUT);
                tile.add(x + whole, rows_of_x.stride, weights + whole * OUT, 1);
            },
            [&](auto &tile, int64_t row, Prefetch prefetch) {
                tile.add(rows_of_x.from(row).first + from, rows_of_x.stride, weights, inputs, prefetch);
            });
        packed += STRETCH * OUT;
    }
}
#endif

// Compute block_sums of product.h for rows that are already in the type that is multiplied.
template <class T>
void sums_of(const PackedMatrix<T> &m, const Rows<T> &rows_of_x, int64_t block, float *sums,
             [[maybe_unused]] TileRegisters &registers, const void *following = nullptr) {
#if defined(__AMX_BF16__)
    if constexpr (std::is_same_v<T, bfloat16>) return sums_in_tiles(m, block, sums, registers);
#endif
    const int64_t tiles = (m.rows + MAX_ROWS - 1) / MAX_ROWS;
#if !defined(__AVX512BF16__)
    if constexpr (std::is_same_v<T, bfloat16>)
        if (m.rows > std::max(MAX_ROWS, 3)) return sums_of_converted(m, rows_of_x, block, sums, following);
#endif
    std::fill(sums, sums + m.rows * OUT, 0.0f);
    const bool are_few = m.rows <= FEW;
    const int64_t depth = are_few ? DEPTH_OF_FEW : DEPTH, parts = (m.whole_steps() + depth - 1) / depth;
    for (int64_t part = 0; part < parts; part++) {
        const int64_t from = m.whole_steps() * part / parts, steps = m.whole_steps() * (part + 1) / parts - from;
        const T *weights = m.block(block) + from * OUT * Step<T>::INPUTS;
        const char *next = reinterpret_cast<const char *>(weights + steps * OUT * Step<T>::INPUTS);
        if (part + 1 == parts && following) next = static_cast<const char *>(following);
        for (int64_t byte = 0; are_few && byte < steps * STEP_BYTES; byte += PAGE) __builtin_prefetch(next + byte);
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t row = m.rows * t / tiles, rows = m.rows * (t + 1) / tiles - row;
            const Number<T> *x = rows_of_x.from(row).first + from * Step<T>::INPUTS;
            const int64_t of_input = STEP_BYTES / Step<T>::INPUTS;
            const Prefetch prefetch{next + steps * STEP_BYTES * t / tiles, of_input / tiles, !are_few};
            with_rows(rows, [&](auto tile) {
                tile.update(sums + row * OUT, [&]() __attribute__((always_inline)) {
                    tile.add(x, rows_of_x.stride, weights, steps, prefetch);
                });
            });
        }
    }
    if (m.whole_steps() == m.steps()) return;
    const Step<T> last(m.block(block) + m.whole_steps() * OUT * Step<T>::INPUTS);
    for (int64_t row = 0; row < m.rows; row++) {
        const Number<T> x[2] = {rows_of_x.from(row).first[m.inputs - 1], Number<T>{}};
        floats held[VECTORS];
        for (int v = 0; v < VECTORS; v++) held[v] = load(sums + row * OUT + v * LANES);
        last.add(held, x);
        for (int v = 0; v < VECTORS; v++) put(sums + row * OUT + v * LANES, held[v]);
    }
}

}  // namespace

template <class T>
void block_sums(const PackedMatrix<T> &m, int64_t block, float *sums, TileRegisters &registers,
                const void *following) {
    sums_of(m, converted(m), block, sums, registers, following);
}

template void block_sums(const PackedMatrix<float> &, int64_t, float *, TileRegisters &, const void *);
template void block_sums(const PackedMatrix<bfloat16> &, int64_t, float *, TileRegisters &, const void *);

namespace {

// Return the minimum blocks per part of a parallel loop. Waking another thread takes as long as multiplying about 64K
// weights, which are in the cache, with a few rows.
template <class T>
int64_t grain(const PackedMatrix<T> &m) {
    return 65536 / (OUT * m.inputs * (1 + m.rows / 16)) + 1;
}

// Compute y = x · weightᵀ + bias for rows that are already in the type that is multiplied.
template <class T>
void multiply(const PackedMatrix<T> &m, const Rows<T> &x, T *y, int64_t y_stride) {
    parallel_for_with<TileRegisters>(m.blocks(), grain(m), [&](TileRegisters &registers, int64_t begin, int64_t end) {
        float sums[ROWS_AT_ONCE * OUT];
        // Rows stay in the second cache while all blocks are multiplied with them.
        for (int64_t row = 0; row < m.rows; row += MOST_RESIDENT) {
            const PackedMatrix<T> part = m.from_row(row, std::min(MOST_RESIDENT, m.rows - row));
            for (int64_t block = begin; block < end; block++) {
                prefetch_results(part.rows, block, y + row * y_stride, y_stride);
                sums_of(part, x.from(row), block, sums, registers);
                finish(sums, m.bias, part.rows, block, m.outputs, y + row * y_stride, y_stride);
            }
        }
    });
}

template <class T>
void linear(const PackedMatrix<T> &m, T *y, int64_t y_stride) {
#if defined(__AMX_BF16__)
    if constexpr (std::is_same_v<T, bfloat16>)
        if (m.rows > MOST_RESIDENT)
            return multiply_pieces(m, PIECE_ROWS, y, y_stride, [](const auto &piece, auto &registers, bool is_first) {
                piece.multiply(registers, is_first);
            });
#endif
    with_converted(m, [&](int64_t row, int64_t count, const Rows<T> &x) {
        multiply(m.from_row(row, count), x, y + row * y_stride, y_stride);
    });
}

// Copy rows `tokens` of a matrix, which is packed as for `linear`, to y [rows, inputs].
template <class T>
void look_up(const PackedMatrix<T> &m, const int64_t *tokens, T *y) {
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

// y = x · weightᵀ + bias. All tensors have dtype `type`; strides are in elements.
// x: [rows, inputs] and y: [rows, outputs], rows x_stride and y_stride apart. bias: [outputs] or null.
// weights: [ceil(outputs/32), ceil(inputs/k), 32, k], padded with zeros; k is 1 for float32 and 2 for bfloat16.
extern "C" void baton_linear(int type, const void *x, int64_t x_stride, const void *weights, const void *bias, void *y,
                             int64_t y_stride, int64_t rows, int64_t inputs, int64_t outputs) {
    baton::with_type(type, [=](auto *t) {
        using T = std::remove_pointer_t<decltype(t)>;
        const baton::PackedMatrix<T> m{static_cast<const T *>(x),
                                       static_cast<const T *>(weights),
                                       static_cast<const T *>(bias),
                                       x_stride,
                                       rows,
                                       inputs,
                                       outputs};
        baton::linear(m, static_cast<T *>(y), y_stride);
    });
}

// Copy rows `tokens` of a matrix [.., inputs], which is packed as for baton_linear, to y [rows, inputs].
extern "C" void baton_look_up(int type, const void *weights, const int64_t *tokens, void *y, int64_t rows,
                              int64_t inputs) {
    baton::with_type(type, [=](auto *t) {
        using T = std::remove_pointer_t<decltype(t)>;
        const baton::PackedMatrix<T> m{nullptr, static_cast<const T *>(weights), nullptr, 0, rows, inputs, 0};
        baton::look_up(m, tokens, static_cast<T *>(y));
    });
}

BATON_RECORDABLE(baton_linear)
BATON_RECORDABLE(baton_look_up)
