// Codes of packed weights: the integers of a block's outputs, and the numbers that they stand for.
#pragma once

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "linear/dense/rows.h"
#include "runtime/cpp/numbers.h"

namespace baton {
namespace {

typedef int32_t integers __attribute__((vector_size(4 * LANES)));

// Load LANES signed 16-bit integers.
inline integers load_signed(const uint8_t *from) {
    typedef int16_t shorts __attribute__((vector_size(2 * LANES), aligned(1), may_alias));
    const shorts &x = *reinterpret_cast<const shorts *>(from);
#if defined(__AVX2__)
    integers wide;
    asm("vpmovsxwd %1, %0" : "=v"(wide) : "m"(x));  // GCC 12 would generate several instructions.
    return wide;
#else
    return __builtin_convertvector(x, integers);
#endif
}

// The codes of a block's OUT outputs for UNIT inputs. Their lowest 4 bits fill a cache line, which is called a unit, or
// all their 8 bits do.
// 8 bits: signed bytes [OUT, 2 inputs].
// 4 bits: 16-bit words [OUT/2, 2 inputs of a pair]. A word has, from its lowest bits up, [2 pairs of inputs, 2 halves of
// OUT]. The number is the code less 2^(BITS-1); of weights with minima, the code itself.
// 5 and 6 bits: after all units of a group come the upper bits, in as many lines as they need: words of the same
// outputs and inputs, each with the fields of one unit after the other.
template <int BITS>
struct Codes {
    static constexpr int UNIT = BITS == 8 ? 2 : 4;
    static constexpr int UPPER = BITS == 8 ? 0 : BITS - 4;  // Upper bits of a code.
    static constexpr int UNITS = UPPER ? 4 / UPPER : 1;  // Units that share a line of upper bits.

    const uint8_t *lower, *upper;  // The group's first unit, and its upper bits.
    int zero;  // Subtracted from each code.

    Codes(const uint8_t *group, int inputs, bool minimum)
        : lower(group), upper(group + inputs / UNIT * LINE), zero(minimum || BITS == 8 ? 0 : 1 << (BITS - 1)) {}

    // Return a unit's line of upper bits, and the first of the unit's bits in each word.
    const uint8_t *line(int unit) const { return upper + unit / UNITS * LINE; }
    int place(int unit) const { return unit % UNITS * 4 * UPPER; }

    // Return the number of one output and one input of a unit.
    int one(int unit, int output, int input) const {
        const uint8_t *const codes = lower + unit * LINE;
        if constexpr (BITS == 8) return static_cast<int8_t>(codes[output * 2 + input]);
        const int at = (output % (OUT / 2) * 2 + input % 2) * 2, field = input / 2 * 2 + output / (OUT / 2);
        uint16_t word, more = 0;
        std::memcpy(&word, codes + at, sizeof word);
        if constexpr (UPPER > 0) std::memcpy(&more, line(unit) + at, sizeof more);
        const int high = more >> (place(unit) + field * UPPER) & ((1 << UPPER) - 1);
        return ((word >> field * 4 & 15) | high << 4) - zero;
    }

    // Extract the numbers of LANES outputs for two inputs of a unit: `input`, which is even, and input + 1.
    void pairs(int unit, int output, int input, integers *first, integers *second) const {
        const uint8_t *const codes = lower + unit * LINE;
        if constexpr (BITS == 8) {
            const integers both = load_signed(codes + output * 2);
            *first = both << 24 >> 24;
            *second = both >> 8;
        } else {
            const int at = output % (OUT / 2) * 4, field = input / 2 * 2 + output / (OUT / 2);
            words both;
            std::memcpy(&both, codes + at, sizeof both);
            words left = both >> field * 4 & 15, right = both >> (field * 4 + 16) & 15;
            if constexpr (UPPER > 0) {
                constexpr uint32_t MASK = (1 << UPPER) - 1;
                std::memcpy(&both, line(unit) + at, sizeof both);
                left |= (both >> (place(unit) + field * UPPER) & MASK) << 4;
                right |= (both >> (place(unit) + field * UPPER + 16) & MASK) << 4;
            }
            *first = (integers)left - zero;
            *second = (integers)right - zero;
        }
    }

    // Convert the codes of a unit to [UNIT / k, OUT, k], where k is Step::INPUTS. Always inlined, so that the compiler
    // can keep the numbers in registers.
#if defined(__AVX512F__)
    __attribute__((always_inline)) void unpack(int unit, float *to) const;
#else
    __attribute__((always_inline)) void unpack(int unit, float *to) const { unpack_pairs(unit, to); }
#endif

    __attribute__((always_inline)) void unpack_pairs(int unit, float *to) const {
#pragma GCC unroll 2
        for (int input = 0; input < UNIT; input += 2)
#pragma GCC unroll 8
            for (int output = 0; output < OUT; output += LANES) {
                integers first, second;
                pairs(unit, output, input, &first, &second);
                put(to + input * OUT + output, __builtin_convertvector(first, floats));
                put(to + (input + 1) * OUT + output, __builtin_convertvector(second, floats));
            }
    }

#if defined(__AVX512BF16__)
    __attribute__((always_inline)) void unpack(int unit, bfloat16 *to) const;
#endif
};

#if defined(__AVX512F__)
// The float32 numbers of codes of 4 bits.
struct Floats {
    alignas(LINE) float numbers[16];

    constexpr explicit Floats(int zero) : numbers() {
        for (int i = 0; i < 16; i++) numbers[i] = static_cast<float>(i - zero);
    }
};

inline constexpr Floats CENTRED_FLOATS{8}, POSITIVE_FLOATS{0};

template <int BITS>
__attribute__((always_inline)) inline void Codes<BITS>::unpack(int unit, float *to) const {
    if constexpr (BITS == 8) {
        unpack_pairs(unit, to);
    } else {
        const __m512i both = _mm512_loadu_si512(lower + unit * LINE);
        __m512i upper_bits = _mm512_setzero_si512();
        if constexpr (UPPER > 0)  // Rotated so that the first field begins at bit 4 of both 16-bit halves.
            upper_bits = _mm512_maskz_rorv_epi32(0xffff, _mm512_loadu_si512(line(unit)),
                                                 _mm512_set1_epi32((place(unit) + 28) % 32));
        // A code in the lowest bits of this float32 counts units of 1.
        const __m512i magic = _mm512_set1_epi32(0x4b000000);
        const floats origin = splat(static_cast<float>(0x800000 + zero));
        const floats numbers = load(zero ? CENTRED_FLOATS.numbers : POSITIVE_FLOATS.numbers);
#pragma GCC unroll 4
        for (int field = 0; field < 4; field++)
#pragma GCC unroll 2
            for (int input = 0; input < 2; input++) {
                __m512i index = (__m512i)((words)both >> (4 * field + 16 * input));
                floats found;
                if constexpr (UPPER == 0) {  // A look-up uses the lowest 4 bits of an index.
                    found = (floats)_mm512_maskz_permutexvar_ps(0xffff, index, (__m512)numbers);
                } else {
                    const __m512i more = (__m512i)((words)upper_bits >> (UPPER * field + 16 * input));
                    index = _mm512_ternarylogic_epi32(_mm512_set1_epi32(15), index, more, 0xca);  // 15 ? index : more
                    constexpr int MASK = (1 << BITS) - 1;
                    index = _mm512_ternarylogic_epi32(index, _mm512_set1_epi32(MASK), magic, 0xea);  // & MASK | magic
                    found = (floats)index - origin;
                }
                put(to + (field / 2 * 2 + input) * OUT + field % 2 * LANES, found);
            }
    }
}
#endif

#if defined(__AVX512BF16__)
// The bfloat16 numbers of all codes of up to 6 bits. For fewer bits they are repeated: a look-up among 32 numbers uses
// the lowest 5 bits of an index, and a code may have 4.
struct Numbers {
    alignas(LINE) uint16_t bits[64];

    constexpr Numbers(int code_bits, bool minimum) : bits() {
        for (int i = 0; i < 64; i++)
            bits[i] = of(i % (1 << code_bits) - (minimum ? 0 : 1 << (code_bits - 1)));
    }

    // Return the bits of an integer between -128 and 128 as bfloat16.
    static constexpr uint16_t of(int number) {
        if (number == 0) return 0;
        int size = number < 0 ? -number : number, exponent = 127 + 7;
        for (; size < 128; size *= 2) exponent--;
        return static_cast<uint16_t>((number < 0 ? 0x8000 : 0) | exponent << 7 | (size - 128));
    }
};

template <int BITS>
inline constexpr Numbers CENTRED{BITS, false};
template <int BITS>
inline constexpr Numbers POSITIVE{BITS, true};

template <int BITS>
__attribute__((always_inline)) inline void Codes<BITS>::unpack(int unit, bfloat16 *to) const {
    const uint8_t *const codes = lower + unit * LINE;
    if constexpr (BITS == 8) {
        const auto numbers = [=](int from) {
            const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i *>(codes + from));
            return _mm512_maskz_cvtepi32_ps(0xffff, _mm512_maskz_cvtepi8_epi32(0xffff, x));
        };
        _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(numbers(LANES), numbers(0)));
        _mm512_storeu_si512(to + OUT, (__m512i)_mm512_cvtne2ps_pbh(numbers(3 * LANES), numbers(2 * LANES)));
    } else {
        const uint16_t *const numbers = zero ? CENTRED<BITS>.bits : POSITIVE<BITS>.bits;
        const words both = (words)_mm512_loadu_si512(codes);
        words upper_bits = {};
        // Rotated so that the first field begins at bit 4 of both 16-bit halves; what else stands there is not used.
        if constexpr (UPPER > 0)
            upper_bits = (words)_mm512_maskz_rorv_epi32(0xffff, _mm512_loadu_si512(line(unit)),
                                                        _mm512_set1_epi32((place(unit) + 28) % 32));
#pragma GCC unroll 4
        for (int field = 0; field < 4; field++) {
            words index = both >> 4 * field;
            if constexpr (UPPER > 0) index = (index & 0x000f000f) | (upper_bits & 0xfff0fff0);
            const __m512i first = _mm512_load_si512(numbers);
            __m512i found;
            if constexpr (BITS == 6)
                found = _mm512_permutex2var_epi16(first, (__m512i)index, _mm512_load_si512(numbers + 32));
            else
                found = _mm512_permutexvar_epi16((__m512i)index, first);
            _mm512_storeu_si512(to + field * OUT, found);
            if constexpr (UPPER > 0) upper_bits = (words)_mm512_maskz_ror_epi32(0xffff, (__m512i)upper_bits, UPPER);
        }
    }
}
#endif

// Load LANES numbers of IEEE half precision. Denormal ones are not flushed to zero.
inline floats load_halves(const uint8_t *from) {
    halves x;
    std::memcpy(&x, from, sizeof x);
#if defined(__F16C__) && defined(__AVX2__)
    floats y;
    asm("vcvtph2ps %1, %0" : "=v"(y) : "v"(x));
    return y;
#else
    const words bits = __builtin_convertvector(x, words), size = (bits & 0x7fff) << 13, least = words{} + 0x38800000;
    const words normal = size < 0x0f800000u ? size + 0x38000000 : size | 0x7f800000;  // The others: infinity, NaN.
    const words denormal = (words)((floats)(size + least) - (floats)least);
    return (floats)((size < 0x800000u ? denormal : normal) | (bits & 0x8000) << 16);
#endif
}

// Load LANES signed bytes as numbers.
inline floats load_bytes(const uint8_t *from) {
    typedef int8_t bytes __attribute__((vector_size(LANES), aligned(1), may_alias));
    const bytes &x = *reinterpret_cast<const bytes *>(from);
#if defined(__AVX2__)
    integers wide;
    asm("vpmovsxbd %1, %0" : "=v"(wide) : "m"(x));  // GCC 12 would generate several instructions.
    return __builtin_convertvector(wide, floats);
#else
    return __builtin_convertvector(__builtin_convertvector(x, integers), floats);
#endif
}

}  // namespace
}  // namespace baton
