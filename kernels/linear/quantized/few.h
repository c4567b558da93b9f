// The product of a few rows with one block of outputs. Codes are converted to numbers, and multiplied, in registers.
#pragma once

#include <type_traits>

#include "groups.h"

namespace baton {
namespace {

constexpr int BATCH = 8;  // Maximum groups whose sums are computed before they are scaled.

// Consecutive groups of a block: their scales and minima, and where their codes are. If groups share a span's scale, all
// are of the same span.
template <int BITS, class T>
struct GroupBatch {
    const Form &form;
    const uint8_t *span;  // the span of the first group
    int64_t index = 0;  // the first group's index in the block
    int within = 0;  // the first group's index in its span
    int count = 0;  // how many groups
    floats scales[BATCH][VECTORS], minima[BATCH][VECTORS];

    GroupBatch(const QuantizedMatrix<BITS, T> &m, int64_t block) : form(m.form), span(m.block(block)) { enter(); }

    bool left() const { return index < form.groups; }

    // Bytes from a group's codes to the next one's.
    int64_t stride() const { return form.span == 1 ? form.span_bytes : form.code_bytes; }

    const uint8_t *codes(int group) const {
        return span + form.head_bytes + within * form.code_bytes + group * stride();
    }

    void next() {
        index += count;
        if (form.span == 1) {
            span += count * form.span_bytes;
        } else if ((within += count) == form.span) {
            within = 0;
            span += form.span_bytes;
        }
        if (left()) enter();
    }

    void enter() {
        const int64_t most = form.span == 1 ? BATCH : std::min(BATCH, form.span - within);
        count = static_cast<int>(std::min(most, form.groups - index));
        const uint8_t *const factors = span + OUT * 2 * (1 + form.minimum) + within * OUT;
        for (int v = 0; v < VECTORS; v++) {
            read(scales, v, span, factors);
            if (form.minimum) read(minima, v, span + OUT * 2, factors + form.span * OUT);
        }
    }

    // Set the scales or the minima of all groups for one vector of outputs. shared: the numbers that a span's groups
    // share. factors: those of the first group, used if a span has several groups.
    void read(floats (*to)[VECTORS], int v, const uint8_t *shared, const uint8_t *factors) {
        if (form.span == 1) {
            for (int g = 0; g < count; g++) to[g][v] = numbers(shared + g * form.span_bytes, v);
            return;
        }
        const floats all = numbers(shared, v);
        for (int g = 0; g < count; g++) to[g][v] = all * load_bytes(factors + g * OUT + v * LANES);
    }

    floats numbers(const uint8_t *from, int vector) const {
        from += vector * LANES * 2;
        return form.half ? load_halves(from) : load(reinterpret_cast<const bfloat16 *>(from));
    }

    // Add `found`, the groups' sums [count, rows, OUT], to the sums [rows, OUT] of the groups before them.
    template <class M>
    void add(const M &m, const float *found, int rows, float *sums) const {
        for (int row = 0; row < rows; row++, sums += OUT, found += OUT) {
            floats held[VECTORS];
            for (int v = 0; v < VECTORS; v++) held[v] = load(sums + v * LANES);
            if (!m.input_sums)
                for (int g = 0; g < count; g++)
                    for (int v = 0; v < VECTORS; v++)
                        held[v] = multiply_add(held[v], load(found + g * rows * OUT + v * LANES), scales[g][v]);
            else
                for (int g = 0; g < count; g++) {
                    const floats less = splat(-m.input_sums[row * form.groups + index + g]);
                    for (int v = 0; v < VECTORS; v++) {
                        held[v] = multiply_add(held[v], load(found + g * rows * OUT + v * LANES), scales[g][v]);
                        held[v] = multiply_add(held[v], minima[g][v], less);
                    }
                }
            for (int v = 0; v < VECTORS; v++) put(sums + v * LANES, held[v]);
        }
    }
};

// Compute `found`, the sums [COUNT, ROWS, OUT] of one group or of two consecutive ones. Two groups are added up at the
// same time, in separate chains: while one waits for its last addition, the other's codes are converted.
// codes: the first group's; the second one's are `stride` bytes later.
template <int BITS, int COUNT, int ROWS, class T>
__attribute__((always_inline)) inline void multiply_groups(const QuantizedMatrix<BITS, T> &m, int64_t index,
                                                           const uint8_t *codes, int64_t stride, LinesAhead &ahead,
                                                           float *found) {
    constexpr int UNIT = Codes<BITS>::UNIT, INPUTS = Step<T>::INPUTS;
    const int size = m.form.group;
    const Inputs<T, ROWS, COUNT> x(m, index);
    const Codes<BITS> first(codes, size, m.form.minimum), second(codes + stride, size, m.form.minimum);
    RowSums<ROWS> held, other;
    const auto add = [&](const Codes<BITS> &group, int unit, const T *from, RowSums<ROWS> &to)
                         __attribute__((always_inline)) {
        T weights[UNIT * OUT];
        group.unpack(unit, weights);
#pragma GCC unroll 4
        for (int input = 0; input < UNIT; input += INPUTS) to.add(from + input, x.stride, weights + input * OUT, 1);
    };
    ahead.begin();
    for (int unit = 0; unit < size / UNIT; unit++) {
        ahead.fetch(COUNT);
        const T *const from = x.numbers + unit * UNIT;
        add(first, unit, from, held);
        if (COUNT == 2) add(second, unit, from + size, other);
    }
    held.each([&](floats sum, int row, int column) { put(found + row * OUT + column, sum); });
    if (COUNT == 2)
        other.each([&](floats sum, int row, int column) { put(found + (ROWS + row) * OUT + column, sum); });
    ahead.finish(codes + (COUNT - 1) * stride + m.form.code_bytes);
}

// Compute the sums [ROWS, OUT] of one block for a single tile of rows.
template <int BITS, class T, int ROWS>
void multiply_few(const QuantizedMatrix<BITS, T> &m, int64_t block, float *sums) {
    // The sums of two groups must not take more than half of the registers.
    constexpr int REGISTERS = LANES == 16 ? 32 : 16, AT_ONCE = 2 * ROWS * VECTORS <= REGISTERS / 2 ? 2 : 1;
    alignas(LINE) float found[BATCH * ROWS * OUT];
    LinesAhead ahead(m.block(block));
    for (GroupBatch<BITS, T> batch(m, block); batch.left(); batch.next()) {
        const auto multiply = [&](auto count, int g) {
            multiply_groups<BITS, decltype(count)::value, ROWS>(m, batch.index + g, batch.codes(g), batch.stride(),
                                                                ahead, found + g * ROWS * OUT);
        };
        int g = 0;
        for (; g + AT_ONCE <= batch.count; g += AT_ONCE) multiply(std::integral_constant<int, AT_ONCE>(), g);
        if (g < batch.count) multiply(std::integral_constant<int, 1>(), g);
        batch.add(m, found, ROWS, sums);
    }
}

}  // namespace
}  // namespace baton
