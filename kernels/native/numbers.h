// Types of numbers in memory, and what computes with them in float32.
#pragma once

#include <cstdint>
#include <cstring>

namespace baton {

struct bfloat16 {
    uint16_t bits;
};

inline float to_float(float x) { return x; }

inline float to_float(bfloat16 x) {
    const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float y;
    std::memcpy(&y, &bits, sizeof y);
    return y;
}

inline void store(float &to, float x) { to = x; }

// To the nearest, ties to even; a NaN stays one.
inline void store(bfloat16 &to, float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const uint32_t rounded = bits + 0x7fff + (bits >> 16 & 1);
    to.bits = static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded >> 16);
}

// Types as kernels/native/types.py numbers them.
enum Type : int { FLOAT32 = 0, BFLOAT16 = 1 };

// Calls f with a null pointer of the type.
template <class F> void with_type(int type, F f) {
    if (type == BFLOAT16)
        f(static_cast<bfloat16 *>(nullptr));
    else
        f(static_cast<float *>(nullptr));
}

} // namespace baton
