// x · weightᵀ with weights of integers and a scale for each group of inputs, as kernels/linear/quantized/reference.py
// defines it. The integers of a group are converted to floating point, exactly, once for all rows. A group's sums are
// scaled and added to the sums of the previous groups. The results are batch-invariant, for any number of threads.
#include <algorithm>
#include <type_traits>

#include "linear/dense/tiles.h"
#include "linear/dense/rows.h"
#include "product.h"
#include "runtime/cpp/numbers.h"
#include "runtime/cpp/parallel.h"
#include "runtime/cpu_graph/call.h"

namespace baton {
namespace {

constexpr int64_t CODES_AHEAD = 8192;  // Prefetch codes this many bytes ahead of those in use.

// Maximum rows of a tile. Each number of rows is compiled separately, so float32, which is rarely used with integer
// weights, has at most 4.
template <class T>
constexpr int MOST_ROWS = sizeof(T) == 4 ? std::min(MAX_ROWS, 4) : MAX_ROWS;

typedef int32_t integers __attribute__((vector_size(4 * LANES)));

// The codes (integers) of a block's OUT outputs for UNIT inputs. They fill one cache line, which is called a unit.
// 8 bits: bytes [OUT, 2 inputs].
// 4 bits, with 8 added: 16-bit words [OUT/2, 2 inputs of a pair]. A word holds, from its lowest bits up, [2 pairs of
// inputs, 2 halves of OUT].
template <int BITS>
struct Codes {
    static constexpr int UNIT = 16 / BITS;

    // Return the integer of one output and one input of the unit.
    static int one(const uint8_t *unit, int output, int input) {
        if constexpr (BITS == 8) return static_cast<int8_t>(unit[output * 2 + input]);
        uint16_t word;
        std::memcpy(&word, unit + (output % (OUT / 2) * 2 + input % 2) * sizeof word, sizeof word);
        return (word >> (input / 2 * 8 + output / (OUT / 2) * 4) & 15) - 8;
    }

    // Extract the integers of LANES outputs for two inputs of the unit: `input`, which is even, and input + 1.
    static void pairs(const uint8_t *unit, int output, int input, integers *first, integers *second) {
        if constexpr (BITS == 8) {
            halves both;
            std::memcpy(&both, unit + output * 2, sizeof both);
            const integers wide = (integers) __builtin_convertvector(both, words);
            *first = wide << 24 >> 24;
            *second = wide << 16 >> 24;
        } else {
            words both;
            std::memcpy(&both, unit + output % (OUT / 2) * 4, sizeof both);
            const int shift = input / 2 * 8 + output / (OUT / 2) * 4;
            *first = (integers)(both >> shift & 15) - 8;
            *second = (integers)(both >> (shift + 16) & 15) - 8;
        }
    }
};

// Convert the codes of a unit to [UNIT / k, OUT, k], where k is Step::INPUTS. Always inlined, so that the compiler can
// keep the numbers in registers.
template <int BITS>
__attribute__((always_inline)) inline void unpack(const uint8_t *codes, float *to) {
#pragma GCC unroll 2
    for (int input = 0; input < Codes<BITS>::UNIT; input += 2)
#pragma GCC unroll 8
        for (int output = 0; output < OUT; output += LANES) {
            integers first, second;
            Codes<BITS>::pairs(codes, output, input, &first, &second);
            put(to + input * OUT + output, __builtin_convertvector(first, floats));
            put(to + (input + 1) * OUT + output, __builtin_convertvector(second, floats));
        }
}

#if defined(__AVX512BF16__)
template <class T>
using Number = T;  // The type that integers are converted to, for inputs of type T.

template <int BITS>
void unpack(const uint8_t *codes, bfloat16 *to);

template <>
inline void unpack<8>(const uint8_t *codes, bfloat16 *to) {
    const auto numbers = [=](int from) {
        const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i *>(codes + from));
        return _mm512_maskz_cvtepi32_ps(0xffff, _mm512_maskz_cvtepi8_epi32(0xffff, x));
    };
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(numbers(LANES), numbers(0)));
    _mm512_storeu_si512(to + OUT, (__m512i)_mm512_cvtne2ps_pbh(numbers(3 * LANES), numbers(2 * LANES)));
}

// The bfloat16 numbers -8 to 7, twice, because a look-up among 32 uses the lowest 5 bits of an index, and a code has 4.
alignas(LINE) constexpr uint16_t NUMBERS[32] = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
                                                0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
                                                0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
                                                0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};

template <>
inline void unpack<4>(const uint8_t *codes, bfloat16 *to) {
    const __m512i both = _mm512_loadu_si512(codes), numbers = _mm512_load_si512(NUMBERS);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(both, numbers));
    _mm512_storeu_si512(to + OUT, _mm512_permutexvar_epi16((__m512i)((words)both >> 4), numbers));
    _mm512_storeu_si512(to + 2 * OUT, _mm512_permutexvar_epi16((__m512i)((words)both >> 8), numbers));
    _mm512_storeu_si512(to + 3 * OUT, _mm512_permutexvar_epi16((__m512i)((words)both >> 12), numbers));
}
#else
template <class T>
using Number = float;
#endif

// The inputs of up to ROWS rows in one group. If the inputs end within the group, this object copies and pads them with
// zeros.
template <class T, int ROWS>
struct Inputs {
    T padded[ROWS * GROUP];
    const T *numbers;
    int64_t stride;

    template <class M>
    Inputs(const M &m, int64_t group) : numbers(m.x + group * GROUP), stride(m.x_stride) {
        const int64_t count = m.inputs - group * GROUP;
        if (count >= GROUP) return;
        std::fill(padded, padded + m.rows * GROUP, T{});
        for (int64_t row = 0; row < m.rows; row++)
            std::copy(numbers + row * stride, numbers + row * stride + count, padded + row * GROUP);
        numbers = padded;
        stride = GROUP;
    }
};

inline const bfloat16 *scales_of(const uint8_t *group) { return reinterpret_cast<const bfloat16 *>(group); }
inline const uint8_t *codes_of(const uint8_t *group) { return group + OUT * sizeof(bfloat16); }

// sums [ROWS, OUT] += scales · held, where `held` are the sums of one group.
template <class W, int ROWS>
__attribute__((always_inline)) inline void add_scaled(float *sums, RowSums<W, ROWS> &held, const bfloat16 *scales) {
    floats scale[VECTORS];
    for (int v = 0; v < VECTORS; v++) scale[v] = load(scales + v * LANES);
    held.each([&](floats sum, int row, int column) {
        float *const to = sums + row * OUT + column;
        put(to, load(to) + sum * scale[column / LANES]);
    });
}

// Compute the sums [ROWS, OUT] of one block for a single tile of rows: codes are converted to weights in registers.
template <int BITS, class T, int ROWS>
void multiply_few(const QuantizedMatrix<BITS, T> &m, int64_t block, float *sums) {
    constexpr int UNIT = Codes<BITS>::UNIT, INPUTS = Step<Number<T>>::INPUTS;
    for (int64_t g = 0; g < m.groups(); g++) {
        const Inputs<T, ROWS> x(m, g);
        const uint8_t *codes = codes_of(m.group(block, g));
        RowSums<Number<T>, ROWS> held;
        for (int unit = 0; unit < GROUP / UNIT; unit++, codes += LINE) {
            __builtin_prefetch(codes + CODES_AHEAD);
            Number<T> weights[UNIT * OUT];
            unpack<BITS>(codes, weights);
#pragma GCC unroll 4
            for (int input = 0; input < UNIT; input += INPUTS)
                held.add(x.numbers + unit * UNIT + input, x.stride, weights + input * OUT, 1);
        }
        add_scaled(sums, held, scales_of(m.group(block, g)));
    }
}

// Compute the sums [rows, OUT] of one block for several tiles: the first tile unpacks a group's weights to memory, and
// the other tiles reuse them.
template <int BITS, class T>
void multiply_many(const QuantizedMatrix<BITS, T> &m, int64_t block, float *sums) {
    constexpr int64_t UNIT = Codes<BITS>::UNIT, INPUTS = Step<Number<T>>::INPUTS;
    constexpr int MOST = MOST_ROWS<T>, LEAST = (MOST + 1) / 2;  // LEAST: fewest rows that a tile can have.
    const int64_t tiles = (m.rows + MOST - 1) / MOST;
    alignas(LINE) Number<T> weights[GROUP * OUT];
    for (int64_t g = 0; g < m.groups(); g++) {
        const uint8_t *const group = m.group(block, g);
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t row = m.rows * t / tiles;
            with_rows<Number<T>, LEAST, MOST>(m.rows * (t + 1) / tiles - row, [&](auto held) {
                const Inputs<T, decltype(held)::COUNT> x(m.from_row(row, held.COUNT), g);
                if (t > 0) held.add(x.numbers, x.stride, weights, GROUP / INPUTS);
                for (int64_t i = 0; i < GROUP && t == 0; i += UNIT) {
                    const uint8_t *const codes = codes_of(group) + i / UNIT * LINE;
                    __builtin_prefetch(codes + CODES_AHEAD);
                    unpack<BITS>(codes, weights + i * OUT);
                    held.add(x.numbers + i, x.stride, weights + i * OUT, UNIT / INPUTS);
                }
                add_scaled(sums + row * OUT, held, scales_of(group));
            });
        }
    }
}

#if defined(__AMX_BF16__)
// sums [rows, OUT] += scales · x · weights of one group, for tiles `tile` and, if COUNT is 2, tile + 1 of the rows.
template <int COUNT>
void add_group(const Inputs<bfloat16, ROWS_AT_ONCE> &x, const RowTiles &rows, int64_t tile, const bfloat16 *weights,
               const bfloat16 *scales, float *sums) {
    const TileSums<COUNT, 2> held;
    alignas(LINE) float found[COUNT * TILE_HEIGHT * OUT];
    const int64_t first = rows.first(tile), across = rows.first(tile + COUNT - 1) - first, bytes = 2 * x.stride;
    const TileOperand left{reinterpret_cast<const char *>(x.numbers + first * x.stride), bytes, 64, across * bytes};
    held.clear();
    held.add(left, operand(weights), GROUP / TILE_INPUTS);
    held.store(found, OUT, rows.height * OUT);
    const floats scale[VECTORS] = {load(scales), load(scales + LANES)};
    for (int64_t t = tile; t < tile + COUNT; t++)
        // The last tile's rows that the tile before it has too are left out.
        for (int64_t row = t * rows.height; row < rows.first(t) + rows.height; row++) {
            const float *const from = found + ((t - tile) * rows.height + row - rows.first(t)) * OUT;
            for (int v = 0; v < VECTORS; v++) {
                float *const to = sums + row * OUT + v * LANES;
                put(to, load(to) + load(from + v * LANES) * scale[v]);
            }
        }
}

// block_sums: a group's integers are converted to weights once for all rows. Two groups' weights alternate, so that one
// group's can be multiplied while the next one's are stored.
template <int BITS>
void sums_in_tiles(const QuantizedMatrix<BITS, bfloat16> &m, int64_t block, float *sums, TileRegisters &registers) {
    constexpr int64_t UNIT = Codes<BITS>::UNIT;
    const RowTiles rows(m.rows);
    registers.set_height(rows.height);
    alignas(LINE) bfloat16 weights[2][GROUP * OUT];
    for (int64_t g = 0; g < m.groups(); g++) {
        bfloat16 *const numbers = weights[g % 2];
        const uint8_t *codes = codes_of(m.group(block, g));
        for (int64_t i = 0; i < GROUP; i += UNIT, codes += LINE) {
            __builtin_prefetch(codes + CODES_AHEAD);
            unpack<BITS>(codes, numbers + i * OUT);
        }
        const Inputs<bfloat16, ROWS_AT_ONCE> x(m, g);
        const bfloat16 *const scales = scales_of(m.group(block, g));
        for (int64_t tile = 0; tile < rows.count; tile += 2)
            if (tile + 1 < rows.count)
                add_group<2>(x, rows, tile, numbers, scales, sums);
            else
                add_group<1>(x, rows, tile, numbers, scales, sums);
    }
}
#endif

}  // namespace

template <int BITS, class T>
void block_sums(const QuantizedMatrix<BITS, T> &m, int64_t block, float *sums,
                [[maybe_unused]] TileRegisters &registers, const void *) {
    std::fill(sums, sums + m.rows * OUT, 0.0f);
#if defined(__AMX_BF16__)
    if constexpr (std::is_same_v<T, bfloat16>) return sums_in_tiles(m, block, sums, registers);
#endif
    if (m.rows > MOST_ROWS<T>) return multiply_many(m, block, sums);
    with_rows<Number<T>, 1, MOST_ROWS<T>>(m.rows,
                                          [&](auto held) { multiply_few<BITS, T, held.COUNT>(m, block, sums); });
}

template void block_sums(const QuantizedMatrix<8, float> &, int64_t, float *, TileRegisters &, const void *);
template void block_sums(const QuantizedMatrix<8, bfloat16> &, int64_t, float *, TileRegisters &, const void *);
template void block_sums(const QuantizedMatrix<4, float> &, int64_t, float *, TileRegisters &, const void *);
template void block_sums(const QuantizedMatrix<4, bfloat16> &, int64_t, float *, TileRegisters &, const void *);

namespace {

template <int BITS, class T>
void linear(const QuantizedMatrix<BITS, T> &m, T *y, int64_t y_stride) {
    const int64_t blocks = (m.outputs + OUT - 1) / OUT, grain = 65536 / (OUT * m.inputs * (1 + m.rows / 16)) + 1;
    parallel_for_with<TileRegisters>(blocks, grain, [&](TileRegisters &registers, int64_t begin, int64_t end) {
        const FlushDenormals flush;
        float sums[ROWS_AT_ONCE * OUT];
        // Rows are in the cache while a part's blocks are multiplied with them.
        for (int64_t row = 0; row < m.rows; row += ROWS_AT_ONCE)
            for (int64_t block = begin; block < end; block++) {
                const auto part = m.from_row(row, std::min(ROWS_AT_ONCE, m.rows - row));
                block_sums(part, block, sums, registers);
                finish(sums, m.bias, part.rows, block, m.outputs, y + row * y_stride, y_stride);
            }
    });
}

template <int BITS, class T>
void look_up(const QuantizedMatrix<BITS, T> &m, const int64_t *tokens, T *y) {
    constexpr int UNIT = Codes<BITS>::UNIT;
    parallel_for(m.rows, 16, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) {
            const int output = static_cast<int>(tokens[row] % OUT);
            for (int64_t i = 0; i < m.inputs; i++) {
                const uint8_t *const group = m.group(tokens[row] / OUT, i / GROUP);
                const uint8_t *const unit = codes_of(group) + i % GROUP / UNIT * LINE;
                const int code = Codes<BITS>::one(unit, output, static_cast<int>(i % UNIT));
                put(y + row * m.inputs + i, to_float(scales_of(group)[output]) * static_cast<float>(code));
            }
        }
    });
}

template <class F>
void with_bits(int bits, F f) {
    if (bits == 4) return f(std::integral_constant<int, 4>());
    f(std::integral_constant<int, 8>());
}

}  // namespace
}  // namespace baton

// y = x · weightᵀ + bias.
// blocks: the weight, [ceil(outputs/32), ceil(inputs/64)] groups, each of bfloat16 scales [32] and codes, padded with
// zeros; see packed() in native.py.
// x: [rows, inputs] and y: [rows, outputs], rows x_stride and y_stride elements apart, and bias: [outputs] or null, all
// of dtype `type`.
extern "C" void baton_quantized_linear(int type, int bits, const void *x, int64_t x_stride, const void *blocks,
                                       const void *bias, void *y, int64_t y_stride, int64_t rows, int64_t inputs,
                                       int64_t outputs) {
    using namespace baton;
    with_type(type, [=](auto *t) {
        with_bits(bits, [=](auto number) {
            using T = std::remove_pointer_t<decltype(t)>;
            const auto *const codes = static_cast<const uint8_t *>(blocks);
            const auto *const row = static_cast<const T *>(x), *const added = static_cast<const T *>(bias);
            const QuantizedMatrix<decltype(number)::value, T> m{codes, row, added, x_stride, rows, inputs, outputs};
            linear(m, static_cast<T *>(y), y_stride);
        });
    });
}

// Copy rows `tokens` of a matrix [.., inputs], which is packed as for baton_quantized_linear, to y [rows, inputs].
extern "C" void baton_quantized_look_up(int type, int bits, const void *blocks, const int64_t *tokens, void *y,
                                        int64_t rows, int64_t inputs) {
    using namespace baton;
    with_type(type, [=](auto *t) {
        with_bits(bits, [=](auto number) {
            using T = std::remove_pointer_t<decltype(t)>;
            const auto *const codes = static_cast<const uint8_t *>(blocks);
            const QuantizedMatrix<decltype(number)::value, T> m{codes, nullptr, nullptr, 0, rows, inputs, 0};
            look_up(m, tokens, static_cast<T *>(y));
        });
    });
}

BATON_RECORDABLE(baton_quantized_linear)
BATON_RECORDABLE(baton_quantized_look_up)
