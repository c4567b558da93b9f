// Weights of bfloat16 in 12 bits each: how they are stored, and how they are converted back.
//
// A unit is a block's OUT outputs for UNIT_INPUTS inputs. It holds 128 weights in 192 bytes:
//   codes [64]: each has the codes of two weights' upper bytes, for the first step in the lower half;
//   lower bytes [2 steps, 64].
// A code is the place of an upper byte (the sign, and the exponent without its last bit) in the block's table of 16.
// The instructions that interleave lower and upper bytes work within 16 bytes. The bytes of a step are in the order in
// which these instructions return the pairs of LANES consecutive outputs: see place().
// A unit is kept whole, as bfloat16 [2 steps, OUT, 2], if an upper byte is not in the table, or if the inputs end
// within the unit.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSSE3__)
#include <tmmintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "linear/dense/rows.h"

namespace baton {
namespace {

constexpr int UNIT_INPUTS = 4, UNIT_STEPS = 2, STEP_WEIGHTS = 2 * OUT, TABLE = 16;
constexpr int64_t UNIT_BYTES = 3 * STEP_WEIGHTS, WHOLE_BYTES = 4 * STEP_WEIGHTS;

// Return which byte of a step belongs to the first weight of an output's pair. The second weight has the next byte.
constexpr int place(int output) { return output % 16 / 4 * 16 + output / 16 * 8 + output % 4 * 2; }

typedef uint8_t bytes __attribute__((vector_size(4 * LANES)));

// Return table[index] for each index, which are below 16. The table is repeated every 16 bytes.
inline bytes look_up(bytes table, bytes indices) {
#if defined(__AVX512BW__)
    return (bytes)_mm512_shuffle_epi8((__m512i)table, (__m512i)indices);
#elif defined(__AVX2__)
    return (bytes)_mm256_shuffle_epi8((__m256i)table, (__m256i)indices);
#elif defined(__SSSE3__)
    return (bytes)_mm_shuffle_epi8((__m128i)table, (__m128i)indices);
#else
    return (bytes)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)indices);
#endif
}

// Join lower and upper bytes to 16-bit numbers: those in the lower half of each 16 bytes.
inline words join_low(bytes lower, bytes upper) {
#if defined(__AVX512BW__)
    return (words)_mm512_unpacklo_epi8((__m512i)lower, (__m512i)upper);
#elif defined(__AVX2__)
    return (words)_mm256_unpacklo_epi8((__m256i)lower, (__m256i)upper);
#elif defined(__SSSE3__)
    return (words)_mm_unpacklo_epi8((__m128i)lower, (__m128i)upper);
#else
    return (words)vzip1q_u8((uint8x16_t)lower, (uint8x16_t)upper);
#endif
}

// Join lower and upper bytes to 16-bit numbers: those in the upper half of each 16 bytes.
inline words join_high(bytes lower, bytes upper) {
#if defined(__AVX512BW__)
    return (words)_mm512_unpackhi_epi8((__m512i)lower, (__m512i)upper);
#elif defined(__AVX2__)
    return (words)_mm256_unpackhi_epi8((__m256i)lower, (__m256i)upper);
#elif defined(__SSSE3__)
    return (words)_mm_unpackhi_epi8((__m128i)lower, (__m128i)upper);
#else
    return (words)vzip2q_u8((uint8x16_t)lower, (uint8x16_t)upper);
#endif
}

inline bytes load_vector(const uint8_t *from) {
    bytes x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

inline bytes repeated(const uint8_t *table) {
    uint8_t all[4 * LANES];
    for (int i = 0; i < 4 * LANES; i += TABLE) std::memcpy(all + i, table, TABLE);
    return load_vector(all);
}

// The weights of a unit, as pairs [step, output].
struct Unit {
    words pairs[UNIT_STEPS][VECTORS];

    __attribute__((always_inline)) Unit(const uint8_t *packed, bytes table) {
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS / 2; v++) {
            const words codes = (words)load_vector(packed + v * 4 * LANES);
            set(0, v, packed, look_up(table, (bytes)(codes & 0x0f0f0f0f)));
            set(1, v, packed, look_up(table, (bytes)(codes >> 4 & 0x0f0f0f0f)));
        }
    }

    __attribute__((always_inline)) void set(int step, int vector, const uint8_t *packed, bytes upper) {
        const bytes lower = load_vector(packed + (step + 1) * STEP_WEIGHTS + vector * 4 * LANES);
        pairs[step][vector] = join_low(lower, upper);
        pairs[step][VECTORS / 2 + vector] = join_high(lower, upper);
    }

    // Write the weights, bfloat16 [steps, OUT, 2], and return their end.
    __attribute__((always_inline)) bfloat16 *write(bfloat16 *to) const {
#pragma GCC unroll 16
        for (int v = 0; v < UNIT_STEPS * VECTORS; v++)
            std::memcpy(to + v * 2 * LANES, &pairs[v / VECTORS][v % VECTORS], 4 * LANES);
        return to + UNIT_INPUTS * OUT;
    }
};

// One block of a compressed matrix: its table, the count and the indices of the units that are kept whole, and all
// units.
struct CompressedBlock {
    const uint8_t *table;
    int64_t whole_units;
    const uint8_t *numbers;  // int32 each
    const uint8_t *units;

    // Return the size of what comes before the units, in bytes.
    static int64_t head_bytes(int64_t whole_units) {
        return (TABLE + 4 + 4 * whole_units + LINE - 1) / LINE * LINE;
    }

    explicit CompressedBlock(const uint8_t *block) : table(block), numbers(block + TABLE + 4) {
        int32_t count;
        std::memcpy(&count, block + TABLE, sizeof count);
        whole_units = count;
        units = block + head_bytes(count);
    }

    // Return which unit of the block is its index-th whole one; `end` if it has no more.
    int64_t whole_unit(int64_t index, int64_t end) const {
        if (index == whole_units) return end;
        int32_t number;
        std::memcpy(&number, numbers + 4 * index, sizeof number);
        return number;
    }
};

}  // namespace
}  // namespace baton
