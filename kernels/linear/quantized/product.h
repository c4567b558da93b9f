// A weight of integers together with the rows that it is multiplied with, and the product for one block of outputs.
#pragma once

#include <type_traits>

#include "linear/dense/product.h"
#include "runtime/cpp/numbers.h"

namespace baton {

constexpr int LEAST_GROUP = 16, MOST_GROUP = 64;  // Inputs that share a scale.

// How weights are stored: kernels/linear/quantized/forms.py says what bits, group, span, minimum and half mean.
struct Form {
    int bits, group, span;
    bool minimum, half;
    int64_t groups, spans;  // of a row of inputs
    int64_t code_bytes, head_bytes, span_bytes;  // of a block: a group's codes; a span's scales and factors; a span.

    // code: what Form.code in forms.py returns.
    Form(int code, int64_t inputs)
        : bits(code & 15), group(code >> 8 & 255), span(code >> 16), minimum(code & 16), half(code & 32),
          groups((inputs + group - 1) / group), spans((groups + span - 1) / span),
          code_bytes(BLOCK_OUT * group * bits / 8),
          head_bytes((BLOCK_OUT * 2 + (span > 1 ? span * BLOCK_OUT : 0)) * (minimum ? 2 : 1)),
          span_bytes(head_bytes + span * code_bytes) {}
};

// A matrix of integers of BITS bits. data: [blocks, spans, bytes of a span], as packed() in native.py says.
template <int BITS, class T>
struct QuantizedMatrix {
    using Input = T;
    const uint8_t *data;
    Form form;
    const T *x, *bias;  // bias: [outputs] or null.
    int64_t x_stride, rows, inputs, outputs;
    const float *input_sums;  // [rows, groups]: the sum of each group of inputs; used if the form has minima.

    int64_t blocks() const { return (outputs + BLOCK_OUT - 1) / BLOCK_OUT; }
    const uint8_t *block(int64_t index) const { return data + index * form.spans * form.span_bytes; }
    QuantizedMatrix from_row(int64_t row, int64_t count) const {
        return with(x + row * x_stride, x_stride, count, input_sums ? input_sums + row * form.groups : nullptr);
    }
    QuantizedMatrix with(const T *rows_x, int64_t stride, int64_t count, const float *sums) const {
        return {data, form, rows_x, bias, stride, count, inputs, outputs, sums};
    }
    // Return the matrix with this index, if this one is the first of consecutive matrices of the same size.
    QuantizedMatrix number(int64_t index) const {
        return {block(index * blocks()), form, x, bias, x_stride, rows, inputs, outputs, input_sums};
    }
};

// Return QuantizedMatrix::input_sums of the matrix's rows, in the calling thread's scratch memory; null if the form has
// no minima.
template <int BITS, class T>
const float *input_sums(const QuantizedMatrix<BITS, T> &m);

template <class T>
const float *input_sums(const PackedMatrix<T> &) {
    return nullptr;
}

// Compute the sums [rows, BLOCK_OUT] of one block for at most ROWS_AT_ONCE rows. `following` is ignored: it exists so
// that moe/experts can also call the function of linear/dense/product.h, which prefetches it.
template <int BITS, class T>
void block_sums(const QuantizedMatrix<BITS, T> &m, int64_t block, float *sums, TileRegisters &registers,
                const void *following = nullptr);

// Arguments of a product: QuantizedMatrix has them, with types.
struct Operands {
    const void *x, *bias;
    int64_t x_stride, rows, inputs, outputs;
};

// Call f(integral_constant<int, bits>()) for the bits of a form.
template <class F>
void with_bits(int bits, F f) {
    switch (bits) {
        case 4: return f(std::integral_constant<int, 4>());
        case 5: return f(std::integral_constant<int, 5>());
        case 6: return f(std::integral_constant<int, 6>());
        default: return f(std::integral_constant<int, 8>());
    }
}

// Call f(matrix) with the QuantizedMatrix for inputs of this type and weights of this form, which lie in `blocks`.
template <class F>
void with_matrix(int type, int form, const void *blocks, const Operands &o, F f) {
    with_type(type, [&](auto *t) {
        const Form given(form, o.inputs);
        with_bits(given.bits, [&](auto bits) {
            using T = std::remove_pointer_t<decltype(t)>;
            const auto *const x = static_cast<const T *>(o.x), *const bias = static_cast<const T *>(o.bias);
            const auto *const data = static_cast<const uint8_t *>(blocks);
            f(QuantizedMatrix<bits, T>{data, given, x, bias, o.x_stride, o.rows, o.inputs, o.outputs, nullptr});
        });
    });
}

}  // namespace baton
