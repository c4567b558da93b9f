// A packed weight with rows to multiply by it, and the one function that does so for a block of outputs.
#pragma once

#include <cstdint>

namespace baton {

constexpr int64_t BLOCK_OUT = 32;  // Outputs of a block.
constexpr int64_t ROWS_AT_ONCE = 96;  // Most rows that a block's sums are held for.

template <class T>
struct PackedMatrix {
    using Input = T;
    static constexpr int64_t SIDE = 4 / sizeof(T);  // Inputs side by side.
    const T *x, *weights, *bias;  // weights: [blocks, steps, BLOCK_OUT, SIDE], padded with zeros; bias: [outputs] or null.
    int64_t x_stride, rows, inputs, outputs;

    int64_t blocks() const { return (outputs + BLOCK_OUT - 1) / BLOCK_OUT; }
    int64_t steps() const { return (inputs + SIDE - 1) / SIDE; }
    int64_t whole_steps() const { return inputs / SIDE; }
    const T *block(int64_t index) const { return weights + index * steps() * BLOCK_OUT * SIDE; }
    PackedMatrix from_row(int64_t row, int64_t count) const { return with(x + row * x_stride, x_stride, count); }
    PackedMatrix with(const T *rows_x, int64_t stride, int64_t count) const {
        return {rows_x, weights, bias, stride, count, inputs, outputs};
    }
    // Of matrices of this size, one behind the other.
    PackedMatrix number(int64_t index) const {
        return {x, block(index * blocks()), bias, x_stride, rows, inputs, outputs};
    }
};

// sums [rows, BLOCK_OUT] of one block, for at most ROWS_AT_ONCE rows: each one chain of additions along the inputs.
// following: the block that is wanted next, if that is not the one behind it; its weights are fetched meanwhile.
template <class T>
void block_sums(const PackedMatrix<T> &m, int64_t block, float *sums, const void *following = nullptr);

}  // namespace baton
