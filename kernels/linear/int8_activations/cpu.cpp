// x · weightᵀ with weights of integers, and inputs that are rounded to integers of 8 bits, as
// kernels/linear/int8_activations/reference.py defines it. The products of a group are added up as integers, exactly;
// the sums of the groups are scaled and added up one after the other. The results are batch-invariant, for any number
// of threads.
#include <algorithm>
#include <type_traits>

#include "linear/quantized/groups.h"
#include "product.h"
#include "quads.h"
#include "rows.h"
#include "runtime/cpp/parallel.h"
#include "runtime/cpu_graph/call.h"

namespace baton {
namespace {

// Maximum rows of a tile: the sums of a group and those of all groups before it are in registers.
constexpr int MOST = VECTORS == 2 ? 6 : 1;

// Load a number of a rounded row.
template <class T>
__attribute__((always_inline)) inline T number(const uint8_t *from) {
    T found;
    std::memcpy(&found, from, sizeof found);
    return found;
}

// The product of rounded rows with one block of outputs.
template <int BITS>
struct Product {
    using Matrix = RoundedMatrix<BITS>;
    using Order = Quads<BITS>;
    static constexpr int LINES = QUAD / Codes<BITS>::UNIT;  // of a quad's codes, or of their lower bits

    static void multiply(const Matrix &m, int64_t block, float *sums) {
        const int64_t tiles = (m.rows + MOST - 1) / MOST;
        std::fill(sums, sums + m.rows * OUT, 0.0f);
        if (tiles == 1)
            with_rows<1, MOST>(m.rows, [&](auto tile) { multiply_one(m, block, tile, sums); });
        else
            multiply_many(m, tiles, block, sums);
    }

    // Add the products of a group to the sums of a tile. x: the tile's first row. quads(step) returns bytes.
    template <int ROWS, class F>
    __attribute__((always_inline)) static void add_group(RowSums<ROWS> &tile, const Matrix &m, const uint8_t *x,
                                                         int64_t group, const Scales &scales, F quads) {
        integers held[ROWS][VECTORS];
        const int64_t stride = m.x_stride;
        const uint8_t *const starts = x + m.layout.to_starts() + 4 * group;
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++) held[row][v] = integers{} + number<int32_t>(starts + row * stride);
        const uint8_t *codes = x + group * m.form.group;
        for (int step = 0; step < m.form.group / QUAD; step++, codes += QUAD) {
            const Bytes bytes = quads(step);
#pragma GCC unroll 8
            for (int row = 0; row < ROWS; row++) {
                const auto inputs = number<int32_t>(codes + row * stride);
#pragma GCC unroll 8
                for (int v = 0; v < VECTORS; v++) held[row][v] = add_products(held[row][v], bytes.of[v], inputs);
            }
        }
        const uint8_t *const scale = x + m.layout.to_scales() + 4 * (m.form.group < LEAST_ROUNDED ? group / 2 : group);
        tile.each([&](floats &sum, int row, int column) {
            const int v = column / LANES;
            const floats factor = scales.scale[v] * number<float>(scale + row * stride);
            sum = multiply_add(sum, __builtin_convertvector(held[row][v], floats), factor);
        });
        if (!m.form.minimum) return;
        const uint8_t *const less = x + m.layout.to_sums() + 4 * group;
        tile.each([&](floats &sum, int row, int column) {
            sum = multiply_add(sum, scales.minimum[column / LANES], splat(number<float>(less + row * stride)));
        });
    }

    static Scales scales_of(const GroupIterator &group) {
        Scales scales(group);
        Order::reorder(scales.scale);
        if (group.form.minimum) Order::reorder(scales.minimum);
        return scales;
    }

    template <int ROWS>
    static void store(RowSums<ROWS> &tile, float *sums) {
        for (int row = 0; row < ROWS; row++) Order::restore(tile.held[row]);
        tile.each([=](floats sum, int row, int column) { put(sums + row * OUT + column, sum); });
    }

    template <int ROWS>
    static void multiply_one(const Matrix &m, int64_t block, RowSums<ROWS> tile, float *sums) {
        LinesAhead ahead(m.block(block));
        for (GroupIterator group(m, block); group.left(); group.next()) {
            const Codes<BITS> codes(group.codes, m.form.group, m.form.minimum);
            ahead.begin();
            add_group(tile, m, m.x, group.index, scales_of(group),
                      [&](int step) __attribute__((always_inline)) {
                          ahead.fetch(LINES);
                          return Order::unpack(codes, step);
                      });
            ahead.finish(group.codes + m.form.code_bytes);
        }
        store(tile, sums);
    }

    static void multiply_many(const Matrix &m, int64_t tiles, int64_t block, float *sums) {
        constexpr int LEAST = (MOST + 1) / 2;
        const int64_t size = m.form.group;
        alignas(LINE) uint8_t bytes[STRETCH * OUT];
        Scales scales[STRETCH / LEAST_GROUP];
        LinesAhead ahead(m.block(block));
        for (GroupIterator group(m, block); group.left();) {
            const int64_t first = group.index, count = std::min(STRETCH / size, m.form.groups - first);
            const auto add = [&](int64_t t, auto quads) __attribute__((always_inline)) {
                const int64_t row = m.rows * t / tiles;
                with_rows<LEAST, MOST>(m.rows * (t + 1) / tiles - row, [&](auto tile) {
                    tile.update(sums + row * OUT, [&]() __attribute__((always_inline)) {
                        for (int g = 0; g < count; g++) quads(g, tile, m.x + row * m.x_stride);
                    });
                });
            };
            add(0, [&](int g, auto &tile, const uint8_t *own) __attribute__((always_inline)) {
                const Codes<BITS> codes(group.codes, m.form.group, m.form.minimum);
                scales[g] = scales_of(group);
                ahead.begin();
                add_group(tile, m, own, first + g, scales[g],
                          [&](int step) __attribute__((always_inline)) {
                              ahead.fetch(LINES);
                              const Bytes unpacked = Order::unpack(codes, step);
                              unpacked.store(bytes + (g * size + step * QUAD) * OUT);
                              return unpacked;
                          });
                ahead.finish(group.codes + m.form.code_bytes);
                group.next();
            });
            for (int64_t t = 1; t < tiles; t++)
                add(t, [&](int g, auto &tile, const uint8_t *own) __attribute__((always_inline)) {
                    add_group(tile, m, own, first + g, scales[g],
                              [&](int step) __attribute__((always_inline)) {
                                  return Bytes(bytes + (g * size + step * QUAD) * OUT);
                              });
                });
        }
        for (int64_t row = 0; row < m.rows; row++) {
            RowSums<1> one;
            one.each([=](floats &sum, int, int column) { sum = load(sums + row * OUT + column); });
            store(one, sums + row * OUT);
        }
    }
};

}  // namespace

template <class T>
void round_rows(const T *x, int64_t stride, int64_t rows, int64_t inputs, const Form &form, uint8_t *to) {
    const int64_t bytes = RoundedRow(form, inputs).bytes();
    const int zero = zero_of(form.bits, form.minimum);
    parallel_for(rows, 16384 / inputs + 1, [=, &form](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) round_row(x + row * stride, inputs, form, zero, to + row * bytes);
    });
}

template void round_rows(const float *, int64_t, int64_t, int64_t, const Form &, uint8_t *);
template void round_rows(const bfloat16 *, int64_t, int64_t, int64_t, const Form &, uint8_t *);

template <int BITS>
void block_sums(const RoundedMatrix<BITS> &m, int64_t block, float *sums, TileRegisters &, const void *) {
    Product<BITS>::multiply(m, block, sums);
}

template void block_sums(const RoundedMatrix<4> &, int64_t, float *, TileRegisters &, const void *);
template void block_sums(const RoundedMatrix<5> &, int64_t, float *, TileRegisters &, const void *);
template void block_sums(const RoundedMatrix<6> &, int64_t, float *, TileRegisters &, const void *);
template void block_sums(const RoundedMatrix<8> &, int64_t, float *, TileRegisters &, const void *);

namespace {

template <int BITS, class T>
void linear(const QuantizedMatrix<BITS, T> &m, T *y, int64_t y_stride) {
    constexpr int64_t MOST_ROUNDED = 4 * ROWS_AT_ONCE;
    const int64_t grain = 65536 / (OUT * m.inputs * (1 + m.rows / 16)) + 1;
    for (int64_t row = 0; row < m.rows; row += MOST_ROUNDED) {
        const int64_t rows = std::min(MOST_ROUNDED, m.rows - row);
        const auto all = with_rounded<BITS>(m.data, m.form, m.x + row * m.x_stride, m.x_stride, rows, m.inputs, m.outputs);
        T *const results = y + row * y_stride;
        parallel_for(m.blocks(), grain, [&](int64_t begin, int64_t end) {
            float sums[ROWS_AT_ONCE * OUT];
            // Rows are in the cache while a part's blocks are multiplied with them.
            for (int64_t first = 0; first < rows; first += ROWS_AT_ONCE) {
                const auto part = all.from_row(first, std::min(ROWS_AT_ONCE, rows - first));
                for (int64_t block = begin; block < end; block++) {
                    prefetch_results(part.rows, block, results + first * y_stride, y_stride);
                    Product<BITS>::multiply(part, block, sums);
                    finish(sums, m.bias, part.rows, block, m.outputs, results + first * y_stride, y_stride);
                }
            }
        });
    }
}

}  // namespace
}  // namespace baton

// y = x · weightᵀ + bias, with the arguments of baton_quantized_linear.
extern "C" void baton_int8_activations_linear(int type, int form, const void *x, int64_t x_stride, const void *blocks,
                                              const void *bias, void *y, int64_t y_stride, int64_t rows,
                                              int64_t inputs, int64_t outputs) {
    using namespace baton;
    with_matrix(type, form, blocks, {x, bias, x_stride, rows, inputs, outputs}, [=](const auto &m) {
        linear(m, static_cast<typename std::decay_t<decltype(m)>::Input *>(y), y_stride);
    });
}

// Set answer to whether the target has an instruction for products of bytes. Without one, products of floats are faster.
extern "C" void baton_int8_activations_pay(int64_t *answer) { *answer = baton::MULTIPLIES_BYTES; }

BATON_RECORDABLE(baton_int8_activations_linear)
BATON_RECORDABLE(baton_int8_activations_pay)
