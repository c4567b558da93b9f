// Codes of packed weights as bytes, four inputs of an output in a word, and products of them.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSSE3__)
#include <tmmintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

#include "linear/quantized/codes.h"
#include "runtime/cpp/numbers.h"

namespace baton {
namespace {

constexpr int QUAD = 4;  // Inputs of a word.

// Codes of 8 bits are signed. The instructions of x86 multiply unsigned bytes by signed ones, so there the codes are
// increased by 128.
#if defined(__ARM_FEATURE_DOTPROD)
constexpr int INCREASE = 0;
#else
constexpr int INCREASE = 128;
#endif

// Return the number that is added to codes of a form to make its bytes.
inline int zero_of(int bits, bool has_minima) { return bits == 8 ? INCREASE : has_minima ? 0 : 1 << (bits - 1); }

// Codes of fewer than 8 bits: a word has inputs 0, 2, 1 and 3 of a unit, in this order, as they are packed.
template <int BITS>
struct Quads {
    static constexpr bool MIDDLE_SWAPPED = true;

    // Extract the bytes of a block's outputs for the inputs of one unit.
    __attribute__((always_inline)) static void unpack(const Codes<BITS> &codes, int unit, words (&quads)[VECTORS]) {
        constexpr int UPPER = BITS - 4, HALF = OUT / 2;
        constexpr uint32_t MASK = ((1u << UPPER) - 1) * 0x00100010;
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) {
            const int byte = v * LANES % HALF * 4, half = v * LANES / HALF;
            words lower, line;
            std::memcpy(&lower, codes.lower + unit * LINE + byte, sizeof lower);
            quads[v] = lower >> 4 * half & 0x0f0f0f0f;
            if constexpr (UPPER > 0) {
                std::memcpy(&line, codes.line(unit) + byte, sizeof line);
                line >>= codes.place(unit);
                quads[v] |= line << (4 - half * UPPER) & MASK;
                quads[v] |= line << (12 - (2 + half) * UPPER) & (MASK << 8);
            }
        }
    }

    // Bring the numbers of a block's outputs into the order in which `unpack` has the outputs.
    static void reorder(floats (&)[VECTORS]) {}
    // Bring sums into the order of the outputs.
    static void restore(floats (&)[VECTORS]) {}
};

// Codes of 8 bits: the inputs of two units, in their order. The outputs with even numbers come before those with odd
// ones, in each pair of vectors.
template <>
struct Quads<8> {
    static constexpr bool MIDDLE_SWAPPED = false;

    __attribute__((always_inline)) static void unpack(const Codes<8> &codes, int quad, words (&quads)[VECTORS]) {
        constexpr uint32_t INCREASED = INCREASE * 0x01010101u;
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v += 2) {
            const uint8_t *const from = codes.lower + quad * 2 * LINE + v * LANES * 2;
            words first, second;
            std::memcpy(&first, from, sizeof first);
            std::memcpy(&second, from + LINE, sizeof second);
            quads[v] = ((first & 0xffff) | second << 16) ^ INCREASED;
            quads[v + 1] = (first >> 16 | (second & 0xffff0000)) ^ INCREASED;
        }
    }

    static void reorder(floats (&numbers)[VECTORS]) {
        for (int v = 0; v < VECTORS; v += 2) {
            const floats first = numbers[v], second = numbers[v + 1];
            for (int lane = 0; lane < LANES; lane++) {
                const int even = 2 * lane % LANES;
                numbers[v][lane] = lane < LANES / 2 ? first[even] : second[even];
                numbers[v + 1][lane] = lane < LANES / 2 ? first[even + 1] : second[even + 1];
            }
        }
    }

    static void restore(floats (&sums)[VECTORS]) {
        for (int v = 0; v < VECTORS; v += 2) {
            const floats even = sums[v], odd = sums[v + 1];
            for (int lane = 0; lane < LANES; lane++) {
                sums[v][lane] = lane % 2 ? odd[lane / 2] : even[lane / 2];
                sums[v + 1][lane] = lane % 2 ? odd[(LANES + lane) / 2] : even[(LANES + lane) / 2];
            }
        }
    }
};

// Return sums + the products of the four bytes of each word and the four signed bytes of `inputs`. The sums are exact.
template <int BITS>
inline integers add_products(integers sums, words quads, int32_t inputs) {
#if defined(__AVX512VNNI__)
    return (integers)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)quads, _mm512_set1_epi32(inputs));
#elif defined(__ARM_FEATURE_DOTPROD)
    return (integers)vdotq_s32((int32x4_t)sums, (int8x16_t)quads, vreinterpretq_s8_s32(vdupq_n_s32(inputs)));
#else
    const integers bytes = (words{} + static_cast<uint32_t>(inputs));
    return sums + (integers)(quads & 255) * (bytes << 24 >> 24) + (integers)(quads >> 8 & 255) * (bytes << 16 >> 24) +
           (integers)(quads >> 16 & 255) * (bytes << 8 >> 24) + (integers)(quads >> 24) * (bytes >> 24);
#endif
}

}  // namespace
}  // namespace baton
