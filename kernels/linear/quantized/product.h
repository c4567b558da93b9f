// A weight of integers together with the rows that it is multiplied with, and the product for one block of outputs.
#pragma once

#include "linear/dense/product.h"

namespace baton {

constexpr int GROUP = 64;  // Inputs that share a scale.

// A matrix of integers. codes: [blocks, groups, BYTES]; each group holds BLOCK_OUT scales, then the codes.
template <int BITS, class T>
struct QuantizedMatrix {
    using Input = T;
    static constexpr int64_t CODE_BYTES = BLOCK_OUT * GROUP * BITS / 8;
    static constexpr int64_t BYTES = BLOCK_OUT * 2 + CODE_BYTES;
    const uint8_t *codes;
    const T *x, *bias;  // bias: [outputs] or null.
    int64_t x_stride, rows, inputs, outputs;

    int64_t blocks() const { return (outputs + BLOCK_OUT - 1) / BLOCK_OUT; }
    const uint8_t *block(int64_t index) const { return group(index, 0); }
    int64_t groups() const { return (inputs + GROUP - 1) / GROUP; }
    const uint8_t *group(int64_t block, int64_t index) const { return codes + (block * groups() + index) * BYTES; }
    QuantizedMatrix from_row(int64_t row, int64_t count) const { return with(x + row * x_stride, x_stride, count); }
    QuantizedMatrix with(const T *rows_x, int64_t stride, int64_t count) const {
        return {codes, rows_x, bias, stride, count, inputs, outputs};
    }
    // Return the matrix with this index, if this one is the first of consecutive matrices of the same size.
    QuantizedMatrix number(int64_t index) const {
        return {group(index * blocks(), 0), x, bias, x_stride, rows, inputs, outputs};
    }
};

// Compute the sums [rows, BLOCK_OUT] of one block for at most ROWS_AT_ONCE rows. `following` is ignored: it exists so
// that moe/experts can also call the function of linear/dense/product.h, which prefetches it.
template <int BITS, class T>
void block_sums(const QuantizedMatrix<BITS, T> &m, int64_t block, float *sums, TileRegisters &registers,
                const void *following = nullptr);

}  // namespace baton
