// Rows of inputs, rounded to integers of 8 bits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "linear/quantized/groups.h"
#include "product.h"
#include "runtime/cpp/numbers.h"

namespace baton {
namespace {

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

// Round one row of inputs for weights of a form whose codes are increased by `zero`.
template <class T>
void round_row(const T *x, int64_t inputs, const Form &form, int zero, uint8_t *row) {
    const RoundedRow layout(form, inputs);
    const int size = RoundedRow::group_of(form), groups = size / form.group;
    auto *const scales = reinterpret_cast<float *>(row + layout.to_scales());
    auto *const starts = reinterpret_cast<int32_t *>(row + layout.to_starts());
    auto *const sums = reinterpret_cast<float *>(row + layout.to_sums());
    for (int64_t g = 0; g < layout.scales; g++) {
        int8_t *const codes = reinterpret_cast<int8_t *>(row) + g * size;
        scales[g] = round_group(x + g * size, inputs - g * size, size, codes);
        for (int each = 0; each < groups; each++) {
            int32_t sum = 0;
            for (int i = 0; i < form.group; i++) sum += codes[each * form.group + i];
            starts[g * groups + each] = -zero * sum;
            sums[g * groups + each] = -scales[g] * static_cast<float>(sum);
        }
        if (form.bits != 8) swap_middle(codes, size);
    }
}

}  // namespace
}  // namespace baton
