// Normalisation of queries and keys to unit length, as reference.unit_length defines it.
#pragma once

#include <cmath>
#include <cstdint>

#include "runtime/cpp/numbers.h"

namespace baton {

// Return Σ a·b of `count` numbers.
inline float dot(const float *a, const float *b, int64_t count) {
    floats total{};
    float rest = 0.0f;
    over(count, [&](int64_t i, auto v) {
        using V = decltype(v);
        if constexpr (sizeof(V) == sizeof(floats))
            total += get<V>(a + i) * get<V>(b + i);
        else
            rest += a[i] * b[i];
    });
    return sum(total) + rest;
}

// Replace x by scale·x / |x|.
inline void normalize(float *x, int64_t count, float scale) {
    constexpr float LEAST = 1e-6f;  // Added to the sum of squares, so that a vector of zeros does not become NaN.
    scale /= std::sqrt(dot(x, x, count) + LEAST);
    over(count, [&](int64_t i, auto v) { put(x + i, get<decltype(v)>(x + i) * scale); });
}

}  // namespace baton
