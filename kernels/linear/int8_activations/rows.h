// Rows of inputs, rounded to integers of 8 bits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "linear/quantized/groups.h"
#include "linear/quantized/product.h"
#include "runtime/cpp/numbers.h"

namespace baton {
namespace {

constexpr int LEAST_ROUNDED = 32;  // Inputs that share a scale, at least.

// How many inputs share a scale, of inputs for weights of a form.
inline int rounded_group(const Form &form) { return std::max(form.group, LEAST_ROUNDED); }

// Rows as kernels/linear/int8_activations/reference.py rounds them.
struct RoundedRows {
    int8_t *codes;  // [rows, width]
    float *scales;  // [rows, groups of the rounded inputs]
    int32_t *starts;  // [rows, groups of the weights]: what a sum of products begins with, because weights are increased
    float *sums;  // [rows, groups of the weights]: the negated sum of the rounded inputs
    int64_t width, scale_count, group_count;

    RoundedRows from(int64_t row) const {
        return {codes + row * width, scales + row * scale_count, starts + row * group_count, sums + row * group_count,
                width, scale_count, group_count};
    }

    // Return rows in memory of `floats(count)`.
    template <class F>
    static RoundedRows in(F memory, const Form &form, int64_t rows, int64_t inputs) {
        const int64_t size = rounded_group(form), scales = (inputs + size - 1) / size, width = scales * size;
        const int64_t groups = width / form.group;
        float *const at = memory(rows * (width / 4 + scales + 2 * groups));
        float *const scale = at + rows * width / 4, *const sum = scale + rows * scales;
        return {reinterpret_cast<int8_t *>(at), scale, reinterpret_cast<int32_t *>(sum + rows * groups), sum,
                width, scales, groups};
    }
};

// Return the largest magnitude of some vectors; NaN if one of the numbers is NaN.
template <int COUNT>
inline float largest_of(const floats (&x)[COUNT], int count) {
    integers largest = {};
    for (int v = 0; v < count; v++) {
        const integers size = (integers)x[v] & 0x7fffffff;  // The bits of a NaN are greater than those of any number.
        largest = size > largest ? size : largest;
    }
    int32_t most = 0;
    for (int lane = 0; lane < LANES; lane++) most = std::max(most, largest[lane]);
    float found;
    std::memcpy(&found, &most, sizeof found);
    return found;
}

// Round `count` inputs of a group of `size`: codes [size], padded with zeros. Return the scale.
template <class T>
float round_group(const T *x, int64_t count, int size, int8_t *codes) {
    typedef int8_t bytes __attribute__((vector_size(LANES)));
    constexpr float LEAST = 1e-30f;  // Its reciprocal is finite.
    floats numbers[MOST_GROUP / LANES];
    for (int v = 0; v < size / LANES; v++)
        numbers[v] = v * LANES < count ? load(x + v * LANES, count - v * LANES) : floats{};
    const float largest = largest_of(numbers, size / LANES);
    const float factor = largest < LEAST ? 0.0f : 127.0f / largest;
    const floats shifter = splat(12582912.0f);  // 1.5 · 2^23: adding it rounds to an integer in the lowest bits.
    for (int v = 0; v < size / LANES; v++) {
        const floats shifted = multiply_add(shifter, numbers[v], splat(factor));
        const bytes rounded = __builtin_convertvector((integers)shifted - 0x4b400000, bytes);
        std::memcpy(codes + v * LANES, &rounded, sizeof rounded);
    }
    return largest < LEAST ? 0.0f : largest / 127.0f;
}

// Swap the second and third byte of each word.
inline void swap_middle(int8_t *codes, int count) {
    for (int i = 0; i < count; i += 4) {
        uint32_t word;
        std::memcpy(&word, codes + i, sizeof word);
        word = (word & 0xff0000ff) | (word & 0xff00) << 8 | (word >> 8 & 0xff00);
        std::memcpy(codes + i, &word, sizeof word);
    }
}

// Round rows [begin, end) of x [rows, inputs] for weights of a form whose codes are increased by `zero`.
template <class T>
void round_rows(const T *x, int64_t stride, int64_t inputs, const Form &form, int zero, bool middle_swapped,
                int64_t begin, int64_t end, const RoundedRows &to) {
    const int size = rounded_group(form), groups = size / form.group;
    for (int64_t row = begin; row < end; row++) {
        const RoundedRows at = to.from(row);
        for (int64_t g = 0; g < at.scale_count; g++) {
            int8_t *const codes = at.codes + g * size;
            at.scales[g] = round_group(x + row * stride + g * size, inputs - g * size, size, codes);
            for (int each = 0; each < groups; each++) {
                int32_t sum = 0;
                for (int i = 0; i < form.group; i++) sum += codes[each * form.group + i];
                at.starts[g * groups + each] = -zero * sum;
                at.sums[g * groups + each] = -at.scales[g] * static_cast<float>(sum);
            }
            if (middle_swapped) swap_middle(codes, size);
        }
    }
}

}  // namespace
}  // namespace baton
