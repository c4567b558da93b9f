// A packed weight together with the rows that it is multiplied with, and the product for one block of outputs.
#pragma once

#include <cstdint>

#include "runtime/cpp/products/registers.h"

namespace baton {

constexpr int64_t BLOCK_OUT = 32;  // Outputs of a block.
constexpr int64_t ROWS_AT_ONCE = 96;  // Maximum rows per call of block_sums: their sums fit into 12 KiB.

template <class T>
struct PackedMatrix {
    using Input = T;
    static constexpr int64_t SIDE = 4 / sizeof(T);  // How many consecutive inputs of an output are adjacent in memory.
    const T *x, *weights,
        *bias;  // weights: [blocks, steps, BLOCK_OUT, SIDE], padded with zeros; bias: [outputs] or null.
    int64_t x_stride, rows, inputs, outputs;

    int64_t blocks() const { return (outputs + BLOCK_OUT - 1) / BLOCK_OUT; }
    int64_t steps() const { return (inputs + SIDE - 1) / SIDE; }
    int64_t whole_steps() const { return inputs / SIDE; }
    const T *block(int64_t index) const { return weights + index * steps() * BLOCK_OUT * SIDE; }
    PackedMatrix from_row(int64_t row, int64_t count) const { return with(x + row * x_stride, x_stride, count); }
    // The last argument is ignored: it exists for code that also takes a QuantizedMatrix.
    PackedMatrix with(const T *rows_x, int64_t stride, int64_t count, const float * = nullptr) const {
        return {rows_x, weights, bias, stride, count, inputs, outputs};
    }
    // Return the matrix with this index, if this one is the first of consecutive matrices of the same size.
    PackedMatrix number(int64_t index) const {
        return {x, block(index * blocks()), bias, x_stride, rows, inputs, outputs};
    }
};

// Compute the sums [rows, BLOCK_OUT] of one block for at most ROWS_AT_ONCE rows, each in one chain of additions along
// the inputs. registers: the calling thread's tile registers. following: the weights that are needed next, which may be
// prefetched meanwhile; null: the next block's weights.
template <class T>
void block_sums(const PackedMatrix<T> &m, int64_t block, float *sums, TileRegisters &registers,
                const void *following = nullptr);

}  // namespace baton
