// Codes of packed weights as bytes, four inputs of an output in a word, and products of them.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

#include "linear/quantized/codes.h"
#include "runtime/cpp/numbers.h"

namespace baton {
namespace {

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__ARM_FEATURE_DOTPROD)
constexpr bool MULTIPLIES_BYTES = true;
#else
constexpr bool MULTIPLIES_BYTES = false;
#endif

constexpr int QUAD = 4;  // Inputs of a word.

// The bytes of a block's outputs for a quad of inputs.
struct Bytes {
    words of[VECTORS];

    Bytes() = default;
    __attribute__((always_inline)) explicit Bytes(const uint8_t *from) {
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) of[v] = load_words(from + v * sizeof(words));
    }

    __attribute__((always_inline)) void store(uint8_t *to) const {
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) std::memcpy(to + v * sizeof(words), of + v, sizeof(words));
    }

    static words load_words(const uint8_t *from) {
        words x;
        std::memcpy(&x, from, sizeof x);
        return x;
    }
};

// Codes of 8 bits are signed. The instructions of x86 multiply unsigned bytes by signed ones, so there the codes are
// increased by 128.
#if defined(__ARM_FEATURE_DOTPROD)
constexpr int INCREASE = 0;
#else
constexpr int INCREASE = 128;
#endif

// Return by how much the bytes of a form exceed the codes that they stand for.
inline int zero_of(int bits, bool has_minima) { return bits == 8 ? INCREASE : has_minima ? 0 : 1 << (bits - 1); }

// A permutation: for each lane, the index of a number in two vectors.
struct Places {
    alignas(LINE) int32_t at[LANES];

    template <class F>
    constexpr explicit Places(F place) : at() {
        for (int lane = 0; lane < LANES; lane++) at[lane] = place(lane);
    }
};

// Return the numbers of two vectors that a permutation selects.
inline floats taken(floats first, floats second, const Places &places) {
#if defined(__AVX512F__)
    return (floats)_mm512_permutex2var_ps((__m512)first, _mm512_load_si512(places.at), (__m512)second);
#elif defined(__AVX2__)
    const __m256i at = _mm256_load_si256(reinterpret_cast<const __m256i *>(places.at));
    const __m256 left = _mm256_permutevar8x32_ps((__m256)first, at), right = _mm256_permutevar8x32_ps((__m256)second, at);
    return (floats)_mm256_blendv_ps(left, right, (__m256)_mm256_slli_epi32(at, 28));
#else
    floats numbers;
    for (int lane = 0; lane < LANES; lane++)
        numbers[lane] = places.at[lane] < LANES ? first[places.at[lane]] : second[places.at[lane] - LANES];
    return numbers;
#endif
}

// Codes of fewer than 8 bits: a word has inputs 0, 2, 1 and 3 of a unit, in this order, as they are packed.
template <int BITS>
struct Quads {
    // Extract the bytes of a block's outputs for the inputs of one unit.
    __attribute__((always_inline)) static Bytes unpack(const Codes<BITS> &codes, int unit) {
        constexpr int UPPER = BITS - 4, HALF = OUT / 2;
        constexpr uint32_t MASK = ((1u << UPPER) - 1) * 0x00100010;
        Bytes bytes;
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) {
            const int byte = v * LANES % HALF * 4, half = v * LANES / HALF;
            words found = Bytes::load_words(codes.lower + unit * LINE + byte) >> 4 * half & 0x0f0f0f0f;
            if constexpr (UPPER > 0) {
                const words line = Bytes::load_words(codes.line(unit) + byte) >> codes.place(unit);
                found |= line << (4 - half * UPPER) & MASK;
                found |= line << (12 - (2 + half) * UPPER) & (MASK << 8);
            }
            bytes.of[v] = found;
        }
        return bytes;
    }

    // Bring numbers of a block's outputs from the order of the outputs into that of `unpack`.
    static void reorder(floats (&)[VECTORS]) {}
    // Bring sums from the order of `unpack` back into that of the outputs.
    static void restore(floats (&)[VECTORS]) {}
};

// Codes of 8 bits: a word has the inputs of two units, in their order. In each pair of vectors, all even outputs come
// before all odd ones.
template <>
struct Quads<8> {
    __attribute__((always_inline)) static Bytes unpack(const Codes<8> &codes, int quad) {
        constexpr uint32_t INCREASED = INCREASE * 0x01010101u;
        Bytes bytes;
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v += 2) {
            const uint8_t *const from = codes.lower + quad * 2 * LINE + v * LANES * 2;
            const words first = Bytes::load_words(from), second = Bytes::load_words(from + LINE);
            bytes.of[v] = ((first & 0xffff) | second << 16) ^ INCREASED;
            bytes.of[v + 1] = (first >> 16 | (second & 0xffff0000)) ^ INCREASED;
        }
        return bytes;
    }

    // Replace each pair of vectors by two permutations of the pair.
    static void rearrange(floats (&numbers)[VECTORS], const Places &first, const Places &second) {
        for (int v = 0; v < VECTORS; v += 2) {
            const floats left = numbers[v], right = numbers[v + 1];
            numbers[v] = taken(left, right, first);
            numbers[v + 1] = taken(left, right, second);
        }
    }

    static void reorder(floats (&numbers)[VECTORS]) {
        constexpr Places EVEN([](int lane) { return 2 * lane; }), ODD([](int lane) { return 2 * lane + 1; });
        rearrange(numbers, EVEN, ODD);
    }

    static void restore(floats (&sums)[VECTORS]) {
        constexpr Places FIRST([](int lane) { return lane % 2 * LANES + lane / 2; });
        constexpr Places SECOND([](int lane) { return lane % 2 * LANES + (LANES + lane) / 2; });
        rearrange(sums, FIRST, SECOND);
    }
};

// Return sums + the products of the four bytes of each word and the four signed bytes of `inputs`. The sums are exact.
inline integers add_products(integers sums, words quads, int32_t inputs) {
#if defined(__AVX512VNNI__)
    return (integers)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)quads, _mm512_set1_epi32(inputs));
#elif defined(__AVXVNNI__)
    return (integers)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)quads, _mm256_set1_epi32(inputs));
#elif defined(__ARM_FEATURE_DOTPROD)
    return (integers)vdotq_s32((int32x4_t)sums, (int8x16_t)quads, vreinterpretq_s8_s32(vdupq_n_s32(inputs)));
#else
    const integers bytes = integers{} + inputs;
    return sums + (integers)(quads & 255) * (bytes << 24 >> 24) + (integers)(quads >> 8 & 255) * (bytes << 16 >> 24) +
           (integers)(quads >> 16 & 255) * (bytes << 8 >> 24) + (integers)(quads >> 24) * (bytes >> 24);
#endif
}

}  // namespace
}  // namespace baton
