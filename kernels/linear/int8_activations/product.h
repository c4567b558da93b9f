// A weight of integers together with rows of inputs that are rounded to 8 bits, and the product for one block of
// outputs.
#pragma once

#include <algorithm>

#include "linear/quantized/product.h"
#include "runtime/cpp/parallel.h"

namespace baton {

constexpr int LEAST_ROUNDED = 32;  // Minimum inputs that share a scale.

// The layout of a rounded row of inputs: integers of 8 bits, padded to whole groups, and then the scale of each group.
// Then come the starts of the sums of products of all groups of the weights, and then the negated sums of the rounded
// inputs of these groups.
struct RoundedRow {
    int64_t width, scales, groups;  // How many integers, scales, and groups of the weights.

    RoundedRow(const Form &form, int64_t inputs)
        : scales((inputs + group_of(form) - 1) / group_of(form)), groups(scales * group_of(form) / form.group) {
        width = scales * group_of(form);
    }

    // How many inputs share a scale.
    static int group_of(const Form &form) { return std::max(form.group, LEAST_ROUNDED); }

    int64_t bytes() const { return to_sums() + 4 * groups; }

    // Bytes from the row's beginning to its scales, starts and sums.
    int64_t to_scales() const { return width; }
    int64_t to_starts() const { return width + 4 * scales; }
    int64_t to_sums() const { return to_starts() + 4 * groups; }
};

// A matrix as QuantizedMatrix has it, with rounded rows, of which `inputs` is the number of bytes.
template <int BITS>
struct RoundedMatrix {
    using Input = uint8_t;
    const uint8_t *data;
    Form form;
    RoundedRow layout;
    const uint8_t *x;
    int64_t x_stride, rows, inputs, outputs;

    int64_t blocks() const { return (outputs + BLOCK_OUT - 1) / BLOCK_OUT; }
    const uint8_t *block(int64_t index) const { return data + index * form.spans * form.span_bytes; }
    // The last argument is ignored: it exists for code that also takes a QuantizedMatrix.
    RoundedMatrix with(const uint8_t *rows_x, int64_t stride, int64_t count, const float * = nullptr) const {
        return {data, form, layout, rows_x, stride, count, inputs, outputs};
    }
    RoundedMatrix from_row(int64_t row, int64_t count) const { return with(x + row * x_stride, x_stride, count); }
    // Return the matrix with this index, if this one is the first of consecutive matrices of the same size.
    RoundedMatrix number(int64_t index) const {
        return {block(index * blocks()), form, layout, x, x_stride, rows, inputs, outputs};
    }
};

template <int BITS>
const float *input_sums(const RoundedMatrix<BITS> &) {
    return nullptr;
}

// Round rows x [rows, inputs] for weights of a form, on all threads. to: memory for the rounded rows.
template <class T>
void round_rows(const T *x, int64_t stride, int64_t rows, int64_t inputs, const Form &form, uint8_t *to);

// Return rounded rows x [rows, inputs] with a matrix of this form. The rows are in the calling thread's scratch memory.
template <int BITS, class T>
RoundedMatrix<BITS> with_rounded(const uint8_t *data, const Form &form, const T *x, int64_t stride, int64_t rows,
                                 int64_t inputs, int64_t outputs) {
    constexpr int ROUNDED = 4;  // Number of the scratch buffer.
    const RoundedRow layout(form, inputs);
    auto *const rounded = reinterpret_cast<uint8_t *>(scratch(ROUNDED, rows * layout.bytes() / 4));
    round_rows(x, stride, rows, inputs, form, rounded);
    return {data, form, layout, rounded, layout.bytes(), rows, layout.bytes(), outputs};
}

// Compute the sums [rows, BLOCK_OUT] of one block for at most ROWS_AT_ONCE rows. `following` is ignored: see
// linear/quantized/product.h.
template <int BITS>
void block_sums(const RoundedMatrix<BITS> &m, int64_t block, float *sums, TileRegisters &registers,
                const void *following = nullptr);

}  // namespace baton
