// x · weightᵀ with weights of integers and a scale for each group of inputs, as kernels/linear/quantized/reference.py
// defines it. The integers of a group are converted to floating point, exactly, once for all rows. A group's sums are
// scaled and added to the sums of the previous groups; if the group has a minimum, the sum of its inputs, times the
// minimum, is subtracted. On AMX, weights of 8 bits are rounded instead (tiles.h). The results are batch-invariant, for
// any number of threads.
#include <algorithm>
#include <type_traits>

#include "few.h"
#include "groups.h"
#include "linear/dense/rows.h"
#include "linear/dense/tiles.h"
#include "product.h"
#include "runtime/cpp/numbers.h"
#include "runtime/cpp/parallel.h"
#include "runtime/cpu_graph/call.h"
#include "tiles.h"

namespace baton {
namespace {

constexpr int INPUT_SUMS = 2;  // Number of the scratch buffer; moe/experts, which calls input_sums, uses 0 and 1.

// Maximum rows of a tile. Each number of rows is compiled separately, so where bfloat16 is multiplied as such, float32,
// which is then rarely used with integer weights, has at most 4.
template <class T>
constexpr int MOST_ROWS = MULTIPLIES_BFLOAT16 && sizeof(T) == 4 ? std::min(MAX_ROWS, 4) : MAX_ROWS;

// Add the products of consecutive groups to `sums` [ROWS, OUT]. m: ROWS rows. scales: of each group.
// weights [groups, inputs, OUT]. before(number) is called before each group.
// Only a group's sums are in registers. With those of all groups before it, a tile would have fewer rows.
template <int ROWS, int BITS, class T, class F>
__attribute__((always_inline)) inline void add_groups(const QuantizedMatrix<BITS, T> &m, int64_t first, int count,
                                                      const Scales *scales, const T *weights, float *sums, F before) {
    for (int g = 0; g < count; g++, weights += m.form.group * OUT) {
        before(g);
        const Inputs<T, ROWS> x(m, first + g);
        const float *const input_sums = m.input_sums + first + g;
        RowSums<ROWS> held;
        held.add(x.numbers, x.stride, weights, m.form.group / Step<T>::INPUTS);
        if (!m.input_sums)
            held.each([&](floats sum, int row, int column) {
                float *const to = sums + row * OUT + column;
                put(to, scales[g].added(load(to), sum, column / LANES));
            });
        else
            held.each([&](floats sum, int row, int column) {
                float *const to = sums + row * OUT + column;
                put(to, scales[g].added(load(to), sum, column / LANES, input_sums[row * m.form.groups]));
            });
    }
}

// Compute the sums [rows, OUT] of one block for several tiles: the first one unpacks the weights of some groups, and the
// others are multiplied with them while they are in the first cache.
template <int BITS, class T>
void multiply_many(const QuantizedMatrix<BITS, T> &m, int64_t block, float *sums) {
    constexpr int UNIT = Codes<BITS>::UNIT, MOST = MOST_ROWS<T>, LEAST = (MOST + 1) / 2;
    const int64_t tiles = (m.rows + MOST - 1) / MOST, size = m.form.group;
    alignas(LINE) T weights[STRETCH * OUT];
    Scales scales[STRETCH / LEAST_GROUP];
    LinesAhead ahead(m.block(block));
    for (GroupIterator group(m, block); group.left();) {
        const int64_t first = group.index, count = std::min(STRETCH / size, m.form.groups - first);
        const auto add = [&](int64_t t, auto before) {
            const int64_t row = m.rows * t / tiles;
            with_rows<LEAST, MOST>(m.rows * (t + 1) / tiles - row, [&](auto tile) {
                add_groups<tile.COUNT>(m.from_row(row, tile.COUNT), first, static_cast<int>(count), scales, weights,
                                       sums + row * OUT, before);
            });
        };
        add(0, [&](int g) __attribute__((always_inline)) {
            const Codes<BITS> codes(group.codes, m.form.group, m.form.minimum);
            scales[g] = Scales(group);
            ahead.begin();
            for (int unit = 0; unit < size / UNIT; unit++) {
                ahead.fetch(1);
                codes.unpack(unit, weights + (g * size + unit * UNIT) * OUT);
            }
            ahead.finish(group.codes + m.form.code_bytes);
            group.next();
        });
        for (int64_t t = 1; t < tiles; t++) add(t, [](int) {});
    }
}

#if defined(__AMX_BF16__)
// sums [rows, OUT] += scales · x · weights - minima · (sum of x) of one group, for tiles `tile` and, if COUNT is 2,
// tile + 1 of the rows.
template <int COUNT, class M, class G>
void add_group(const M &m, const G &group, const Inputs<bfloat16, ROWS_AT_ONCE> &x, const RowTiles &rows, int64_t tile,
               const bfloat16 *weights, float *sums) {
    const TileSums<COUNT, 2> held;
    alignas(LINE) float found[COUNT * TILE_HEIGHT * OUT];
    const int64_t first = rows.first(tile), across = rows.first(tile + COUNT - 1) - first, bytes = 2 * x.stride;
    const TileOperand left{reinterpret_cast<const char *>(x.numbers + first * x.stride), bytes, 64, across * bytes};
    held.clear();
    held.add(left, operand(weights), m.form.group / TILE_INPUTS);
    held.store(found, OUT, rows.height * OUT);
    const Scales scales(group);
    for (int64_t t = tile; t < tile + COUNT; t++)
        // The last tile may overlap the one before it. Leave out the rows that were already added.
        for (int64_t row = t * rows.height; row < rows.first(t) + rows.height; row++) {
            const float *const from = found + ((t - tile) * rows.height + row - rows.first(t)) * OUT;
            float *const to = sums + row * OUT;
            if (!m.input_sums)
                for (int v = 0; v < VECTORS; v++)
                    put(to + v * LANES, scales.added(load(to + v * LANES), load(from + v * LANES), v));
            else
                for (int v = 0; v < VECTORS; v++)
                    put(to + v * LANES, scales.added(load(to + v * LANES), load(from + v * LANES), v,
                                                     m.input_sums[row * group.form.groups + group.index]));
        }
}

// block_sums: a group's integers are converted to weights once for all rows. Two groups' weights alternate, so that one
// group's can be multiplied while the next one's are stored.
template <int BITS>
void sums_in_tiles(const QuantizedMatrix<BITS, bfloat16> &m, int64_t block, float *sums, TileRegisters &registers) {
    constexpr int UNIT = Codes<BITS>::UNIT;
    const RowTiles rows(m.rows);
    registers.set_height(rows.height);
    alignas(LINE) bfloat16 weights[2][MOST_GROUP * OUT];
    LinesAhead ahead(m.block(block));
    for (GroupIterator group(m, block); group.left(); group.next()) {
        bfloat16 *const numbers = weights[group.index % 2];
        const Codes<BITS> codes(group.codes, m.form.group, m.form.minimum);
        ahead.begin();
        for (int unit = 0; unit < m.form.group / UNIT; unit++) {
            ahead.fetch(1);
            codes.unpack(unit, numbers + unit * UNIT * OUT);
        }
        ahead.finish(group.codes + m.form.code_bytes);
        const Inputs<bfloat16, ROWS_AT_ONCE> x(m, group.index);
        for (int64_t tile = 0; tile < rows.count; tile += 2)
            if (tile + 1 < rows.count)
                add_group<2>(m, group, x, rows, tile, numbers, sums);
            else
                add_group<1>(m, group, x, rows, tile, numbers, sums);
    }
}
#endif

// Whether weights are rounded to bfloat16 with their scales, instead of scaling sums: see tiles.h.
template <int BITS, class T>
constexpr bool ROUNDS_WEIGHTS = TILE_HEIGHT > 1 && BITS == 8 && std::is_same_v<T, bfloat16>;

// block_sums of rows in the type that is multiplied.
template <int BITS, class T>
void sums_of(const QuantizedMatrix<BITS, T> &m, int64_t block, float *sums,
             [[maybe_unused]] TileRegisters &registers) {
#if defined(__AMX_BF16__)
    if constexpr (ROUNDS_WEIGHTS<BITS, T>) return sums_of_rounded(m, block, sums, registers);
#endif
    std::fill(sums, sums + m.rows * OUT, 0.0f);
#if defined(__AMX_BF16__)
    if constexpr (std::is_same_v<T, bfloat16>)
        if (m.form.group >= TILE_INPUTS) return sums_in_tiles(m, block, sums, registers);
#endif
    if (m.rows > MOST_ROWS<T>) return multiply_many(m, block, sums);
    with_rows<1, MOST_ROWS<T>>(m.rows, [&](auto held) { multiply_few<BITS, T, held.COUNT>(m, block, sums); });
}

// Return the matrix with its rows in the type that is multiplied: in this thread's scratch memory if they are converted.
template <int BITS, class T>
QuantizedMatrix<BITS, Number<T>> with_numbers(const QuantizedMatrix<BITS, T> &m) {
    const Rows<T> x = converted(m);
    return {m.data, m.form, x.first, nullptr, x.stride, m.rows, m.inputs, m.outputs, m.input_sums};
}

}  // namespace

template <int BITS, class T>
void block_sums(const QuantizedMatrix<BITS, T> &m, int64_t block, float *sums, TileRegisters &registers,
                const void *) {
    sums_of(with_numbers(m), block, sums, registers);
}

// Compute the sums of the groups of rows [begin, end): sums, [rows, groups].
template <int BITS, class T>
void sum_groups(const QuantizedMatrix<BITS, T> &m, int64_t begin, int64_t end, float *sums) {
    const int64_t groups = m.form.groups, size = m.form.group;
    for (int64_t row = begin; row < end; row++)
        for (int64_t g = 0; g < groups; g++) {
            floats partial = {};
            for (int64_t i = g * size; i < std::min((g + 1) * size, m.inputs); i += LANES)
                partial += load(m.x + row * m.x_stride + i, m.inputs - i);
            float sum = 0;
            for (int lane = 0; lane < LANES; lane++) sum += partial[lane];
            sums[row * groups + g] = sum;
        }
}

template <int BITS, class T>
const float *input_sums(const QuantizedMatrix<BITS, T> &m) {
    if (!m.form.minimum) return nullptr;
    float *const sums = scratch(INPUT_SUMS, m.rows * m.form.groups);
    sum_groups(m, 0, m.rows, sums);
    return sums;
}

#define BATON_FOR_BITS(BITS, T)                                                                                    \
    template void block_sums(const QuantizedMatrix<BITS, T> &, int64_t, float *, TileRegisters &, const void *); \
    template const float *input_sums(const QuantizedMatrix<BITS, T> &);
BATON_FOR_BITS(4, float)
BATON_FOR_BITS(4, bfloat16)
BATON_FOR_BITS(5, float)
BATON_FOR_BITS(5, bfloat16)
BATON_FOR_BITS(6, float)
BATON_FOR_BITS(6, bfloat16)
BATON_FOR_BITS(8, float)
BATON_FOR_BITS(8, bfloat16)

namespace {

// Rows for which weights are converted once.
constexpr int64_t ROWS_OF_PART = TILE_HEIGHT > 1 ? ROWS_AT_ONCE : 2 * ROWS_AT_ONCE;

template <int BITS, class T>
void linear(QuantizedMatrix<BITS, T> m, T *y, int64_t y_stride) {
#if defined(__AMX_BF16__)
    if constexpr (ROUNDS_WEIGHTS<BITS, T>)
        if (m.rows > ROWS_AT_ONCE) return multiply_rounded(m, y, y_stride);
#endif
    if (m.form.minimum) {
        float *const input_sums = scratch(INPUT_SUMS, m.rows * m.form.groups);
        parallel_for(m.rows, 16384 / m.inputs + 1,
                     [&](int64_t begin, int64_t end) { sum_groups(m, begin, end, input_sums); });
        m.input_sums = input_sums;
    }
    const int64_t blocks = (m.outputs + OUT - 1) / OUT, grain = 65536 / (OUT * m.inputs * (1 + m.rows / 16)) + 1;
    parallel_for_with<TileRegisters>(blocks, grain, [&](TileRegisters &registers, int64_t begin, int64_t end) {
        float sums[ROWS_OF_PART * OUT];
        // Rows are in the cache while a part's blocks are multiplied with them.
        for (int64_t row = 0; row < m.rows; row += ROWS_OF_PART) {
            const auto part = m.from_row(row, std::min(ROWS_OF_PART, m.rows - row));
            const auto numbers = with_numbers(part);
            for (int64_t block = begin; block < end; block++) {
                sums_of(numbers, block, sums, registers);
                finish(sums, m.bias, part.rows, block, m.outputs, y + row * y_stride, y_stride);
            }
        }
    });
}

template <int BITS, class T>
void look_up(const QuantizedMatrix<BITS, T> &m, const int64_t *tokens, T *y) {
    constexpr int UNIT = Codes<BITS>::UNIT;
    parallel_for(m.rows, 16, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) {
            const int output = static_cast<int>(tokens[row] % OUT);
            T *to = y + row * m.inputs;
            for (GroupIterator group(m, tokens[row] / OUT); group.left(); group.next()) {
                const Codes<BITS> codes(group.codes, m.form.group, m.form.minimum);
                const Scales scales(group);
                const float scale = scales.scale[output / LANES][output % LANES];
                const float minimum = m.form.minimum ? scales.minimum[output / LANES][output % LANES] : 0.0f;
                const int64_t count = std::min<int64_t>(m.form.group, m.inputs - group.index * m.form.group);
                for (int i = 0; i < count; i++)
                    put(to++, scale * static_cast<float>(codes.one(i / UNIT, output, i % UNIT)) - minimum);
            }
        }
    });
}

}  // namespace
}  // namespace baton

// y = x · weightᵀ + bias.
// form: what Form.code in forms.py returns.
// blocks: the weight, as packed() in native.py says.
// x: [rows, inputs] and y: [rows, outputs], rows x_stride and y_stride elements apart, and bias: [outputs] or null, all
// of dtype `type`.
extern "C" void baton_quantized_linear(int type, int form, const void *x, int64_t x_stride, const void *blocks,
                                       const void *bias, void *y, int64_t y_stride, int64_t rows, int64_t inputs,
                                       int64_t outputs) {
    using namespace baton;
    with_matrix(type, form, blocks, {x, bias, x_stride, rows, inputs, outputs}, [=](const auto &m) {
        linear(m, static_cast<typename std::decay_t<decltype(m)>::Input *>(y), y_stride);
    });
}

// Copy rows `tokens` of a matrix [.., inputs], which is packed as for baton_quantized_linear, to y [rows, inputs].
extern "C" void baton_quantized_look_up(int type, int form, const void *blocks, const int64_t *tokens, void *y,
                                        int64_t rows, int64_t inputs) {
    using namespace baton;
    with_matrix(type, form, blocks, {nullptr, nullptr, 0, rows, inputs, 0}, [=](const auto &m) {
        look_up(m, tokens, static_cast<typename std::decay_t<decltype(m)>::Input *>(y));
    });
}

BATON_RECORDABLE(baton_quantized_linear)
BATON_RECORDABLE(baton_quantized_look_up)
