// The product of a few rows with one block of outputs. Numbers are used in the registers that codes are converted in.
#pragma once

#include "groups.h"

namespace baton {
namespace {

// The scales and minima of up to BATCH consecutive groups of a block, and where the groups' codes are.
constexpr int BATCH = 8;

template <int BITS, class T>
struct Batch {
    const Form &form;
    const uint8_t *span;
    int64_t index = 0;  // of the first group
    int within = 0;  // the first group's number within its span
    int count = 0;
    floats scales[BATCH][VECTORS], minima[BATCH][VECTORS];

    Batch(const QuantizedMatrix<BITS, T> &m, int64_t block) : form(m.form), span(m.block(block)) { enter(); }

    bool left() const { return index < form.groups; }

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

    // Add the sums of the groups [count, rows, OUT] to those of the groups before them.
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

// Compute the sums [ROWS, OUT] of COUNT consecutive groups.
template <int BITS, int COUNT, int ROWS, class T>
__attribute__((always_inline)) inline void multiply_groups(const QuantizedMatrix<BITS, T> &m, int64_t index, const uint8_t *codes, int64_t stride, const uint8_t *&next,
                     float *found) {
    constexpr int UNIT = Codes<BITS>::UNIT, INPUTS = Step<T>::INPUTS;
    const int size = m.form.group, units = size / UNIT;
    const Inputs<T, ROWS, COUNT> x(m, index);
    const Codes<BITS> first(codes, size, m.form.minimum), second(codes + stride, size, m.form.minimum);
    RowSums<T, ROWS> held, other;
    const T *from = x.numbers;
    for (int unit = 0; unit < units; unit++, from += UNIT) {
        __builtin_prefetch(next);
        if (COUNT == 2) __builtin_prefetch(next + LINE);
        next += COUNT * LINE;
        T weights[UNIT * OUT];
        first.unpack(unit, weights);
#pragma GCC unroll 4
        for (int input = 0; input < UNIT; input += INPUTS)
            held.add(from + input, x.stride, weights + input * OUT, 1);
        if (COUNT == 2) {
            T weights[UNIT * OUT];
            second.unpack(unit, weights);
#pragma GCC unroll 4
            for (int input = 0; input < UNIT; input += INPUTS)
                other.add(from + size + input, x.stride, weights + input * OUT, 1);
        }
    }
    held.each([&](floats sum, int row, int column) { put(found + row * OUT + column, sum); });
    if (COUNT == 2)
        other.each([&](floats sum, int row, int column) { put(found + (ROWS + row) * OUT + column, sum); });
    for (const uint8_t *const until = codes + (COUNT - 1) * stride + m.form.code_bytes + LEAST_AHEAD; next < until; next += LINE)
        __builtin_prefetch(next);
}

// Compute the sums [ROWS, OUT] of one block for a single tile of rows: codes are converted to weights in registers.
template <int BITS, class T, int ROWS>
void multiply_few(const QuantizedMatrix<BITS, T> &m, int64_t block, float *sums) {
    constexpr int AT_ONCE = ROWS * VECTORS <= (LANES == 16 ? 8 : 4) ? 2 : 1;
    alignas(LINE) float found[BATCH * ROWS * OUT];
    const uint8_t *next = m.block(block) + LEAST_AHEAD;
    for (Batch<BITS, T> batch(m, block); batch.left(); batch.next()) {
        int g = 0;
        for (; g + AT_ONCE <= batch.count; g += AT_ONCE)
            multiply_groups<BITS, AT_ONCE, ROWS>(m, batch.index + g, batch.codes(g), batch.stride(), next, found + g * ROWS * OUT);
        if (AT_ONCE > 1 && g < batch.count)
            multiply_groups<BITS, 1, ROWS>(m, batch.index + g, batch.codes(g), batch.stride(), next, found + g * ROWS * OUT);
        batch.add(m, found, ROWS, sums);
    }
}

}  // namespace
}  // namespace baton
