// x · weightᵀ with weights of integers, and inputs that are rounded to integers of 8 bits, as
// kernels/linear/int8_activations/reference.py defines it. The products of a group are added up as integers, exactly;
// the sums of the groups are scaled and added up one after the other. The results are batch-invariant, for any number
// of threads.
#include <algorithm>
#include <type_traits>

#include "linear/quantized/groups.h"
#include "quads.h"
#include "rows.h"
#include "runtime/cpp/parallel.h"
#include "runtime/cpu_graph/call.h"

namespace baton {
namespace {

constexpr int ROUNDED = 4;  // Number of the scratch buffer.
// Maximum rows of a tile: the sums of a group and those of all groups before it are in registers.
constexpr int MOST = VECTORS == 2 ? 6 : 1;

// The product of rounded rows with one block of outputs.
template <int BITS>
struct Product {
    using Matrix = QuantizedMatrix<BITS, float>;  // of which only the weights are used
    using Groups = GroupIterator<BITS, float>;
    using Order = Quads<BITS>;

    static void multiply(const Matrix &m, const RoundedRows &x, int64_t rows, int64_t block, float *sums) {
        const int64_t tiles = (rows + MOST - 1) / MOST;
        std::fill(sums, sums + rows * OUT, 0.0f);
        if (tiles == 1)
            with_rows<1, MOST>(rows, [&](auto tile) { multiply_one(m, x, block, tile, sums); });
        else
            multiply_many(m, x, rows, tiles, block, sums);
    }

    // Add the products of a group to the sums of a tile. x: the tile's rows. quads(step) returns bytes.
    template <int ROWS, class F>
    __attribute__((always_inline)) static void add_group(RowSums<ROWS> &tile, const Form &form, const RoundedRows &x,
                                                         int64_t group, const Scales &scales, F quads) {
        integers held[ROWS][VECTORS];
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++) held[row][v] = integers{} + x.starts[row * x.group_count + group];
        const int8_t *codes = x.codes + group * form.group;
        for (int step = 0; step < form.group / QUAD; step++, codes += QUAD) {
            const Bytes bytes = quads(step);
#pragma GCC unroll 8
            for (int row = 0; row < ROWS; row++) {
                int32_t inputs;
                std::memcpy(&inputs, codes + row * x.width, sizeof inputs);
#pragma GCC unroll 8
                for (int v = 0; v < VECTORS; v++) held[row][v] = add_products<BITS>(held[row][v], bytes.of[v], inputs);
            }
        }
        const float *const scale = x.scales + (form.group < LEAST_ROUNDED ? group / 2 : group);
        tile.each([&](floats &sum, int row, int column) {
            const int v = column / LANES;
            const floats factor = scales.scale[v] * scale[row * x.scale_count];
            sum = multiply_add(sum, __builtin_convertvector(held[row][v], floats), factor);
        });
        if (!form.minimum) return;
        tile.each([&](floats &sum, int row, int column) {
            sum = multiply_add(sum, scales.minimum[column / LANES], splat(x.sums[row * x.group_count + group]));
        });
    }

    static Scales scales_of(const Groups &group) {
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
    static void multiply_one(const Matrix &m, const RoundedRows &x, int64_t block, RowSums<ROWS> tile, float *sums) {
        for (Groups group(m, block); group.left(); group.next()) {
            const Codes<BITS> codes(group.codes, m.form.group, m.form.minimum);
            add_group(tile, m.form, x, group.index, scales_of(group),
                      [&](int step) __attribute__((always_inline)) {
                          codes.prefetch(step, m.form.ahead);
                          return Order::unpack(codes, step);
                      });
        }
        store(tile, sums);
    }

    static void multiply_many(const Matrix &m, const RoundedRows &x, int64_t rows, int64_t tiles, int64_t block,
                              float *sums) {
        constexpr int LEAST = (MOST + 1) / 2;
        const int64_t size = m.form.group;
        alignas(LINE) uint8_t bytes[STRETCH * OUT];
        Scales scales[STRETCH / LEAST_GROUP];
        for (Groups group(m, block); group.left();) {
            const int64_t first = group.index, count = std::min(STRETCH / size, m.form.groups - first);
            const auto add = [&](int64_t t, auto quads) __attribute__((always_inline)) {
                const int64_t row = rows * t / tiles;
                with_rows<LEAST, MOST>(rows * (t + 1) / tiles - row, [&](auto tile) {
                    float *const kept = sums + row * OUT;
                    tile.each([=](floats &sum, int r, int column) { sum = load(kept + r * OUT + column); });
                    for (int g = 0; g < count; g++) quads(g, tile, x.from(row));
                    tile.each([=](floats sum, int r, int column) { put(kept + r * OUT + column, sum); });
                });
            };
            add(0, [&](int g, auto &tile, const RoundedRows &own) __attribute__((always_inline)) {
                const Codes<BITS> codes(group.codes, m.form.group, m.form.minimum);
                scales[g] = scales_of(group);
                add_group(tile, m.form, own, first + g, scales[g],
                          [&](int step) __attribute__((always_inline)) {
                              codes.prefetch(step, m.form.ahead);
                              const Bytes unpacked = Order::unpack(codes, step);
                              unpacked.store(bytes + (g * size + step * QUAD) * OUT);
                              return unpacked;
                          });
                group.next();
            });
            for (int64_t t = 1; t < tiles; t++)
                add(t, [&](int g, auto &tile, const RoundedRows &own) __attribute__((always_inline)) {
                    add_group(tile, m.form, own, first + g, scales[g],
                              [&](int step) __attribute__((always_inline)) {
                                  return Bytes(bytes + (g * size + step * QUAD) * OUT);
                              });
                });
        }
        for (int64_t row = 0; row < rows; row++) {
            RowSums<1> one;
            one.each([=](floats &sum, int, int column) { sum = load(sums + row * OUT + column); });
            store(one, sums + row * OUT);
        }
    }
};

template <int BITS, class T>
void linear(const QuantizedMatrix<BITS, T> &m, T *y, int64_t y_stride) {
    constexpr int64_t MOST_ROUNDED = 4 * ROWS_AT_ONCE;
    const int64_t blocks = (m.outputs + OUT - 1) / OUT, grain = 65536 / (OUT * m.inputs * (1 + m.rows / 16)) + 1;
    for (int64_t done = 0; done < m.rows; done += MOST_ROUNDED) {
        const auto part = m.from_row(done, std::min(MOST_ROUNDED, m.rows - done));
        const RoundedRows rounded =
            RoundedRows::in([](int64_t count) { return scratch(ROUNDED, count); }, m.form, part.rows, m.inputs);
        parallel_for(part.rows, 16384 / m.inputs + 1, [&](int64_t begin, int64_t end) {
            round_rows(part.x, part.x_stride, m.inputs, m.form, zero_of(BITS, m.form.minimum),
                       Quads<BITS>::MIDDLE_SWAPPED, begin, end, rounded);
        });
        const QuantizedMatrix<BITS, float> weights{m.data, m.form, nullptr, nullptr, 0, 0, m.inputs, m.outputs, nullptr};
        parallel_for(blocks, grain, [&](int64_t begin, int64_t end) {
            float sums[ROWS_AT_ONCE * OUT];
            // Rows are in the cache while a part's blocks are multiplied with them.
            for (int64_t row = 0; row < part.rows; row += ROWS_AT_ONCE) {
                const int64_t count = std::min(ROWS_AT_ONCE, part.rows - row);
                for (int64_t block = begin; block < end; block++) {
                    prefetch_results(count, block, y + (done + row) * y_stride, y_stride);
                    Product<BITS>::multiply(weights, rounded.from(row), count, block, sums);
                    finish(sums, m.bias, count, block, m.outputs, y + (done + row) * y_stride, y_stride);
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
    with_type(type, [=](auto *t) {
        const Form given(form, inputs);
        with_bits(given.bits, [=](auto bits) {
            using T = std::remove_pointer_t<decltype(t)>;
            const auto *const data = static_cast<const uint8_t *>(blocks);
            const auto *const row = static_cast<const T *>(x), *const added = static_cast<const T *>(bias);
            const QuantizedMatrix<bits, T> m{data, given, row, added, x_stride, rows, inputs, outputs, nullptr};
            linear(m, static_cast<T *>(y), y_stride);
        });
    });
}

// Set answer to whether the target has an instruction for products of bytes. Without one, products of floats are faster.
extern "C" void baton_int8_activations_pay(int64_t *answer) { *answer = baton::MULTIPLIES_BYTES; }

BATON_RECORDABLE(baton_int8_activations_linear)
BATON_RECORDABLE(baton_int8_activations_pay)
