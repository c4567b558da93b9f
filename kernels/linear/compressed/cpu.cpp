// x · weightᵀ with weights of bfloat16 that are stored in 12 bits each. The sums are the same chains of additions as in
// kernels/linear/dense/cpu.cpp, of the same weights, so the results have the same bits.
#include <algorithm>

#include "linear/dense/rows.h"
#include "runtime/cpp/numbers.h"
#include "runtime/cpp/parallel.h"
#include "runtime/cpu_graph/call.h"
#include "unit.h"

namespace baton {
namespace {

constexpr int64_t AHEAD = 6144;  // Weights are prefetched this many bytes ahead of those in use.
constexpr int64_t PAGE_UNITS = 16;  // One line of every 16th unit is prefetched into the first cache: see PAGE.
static_assert(PAGE_UNITS * UNIT_BYTES <= PAGE);
constexpr int WEIGHTS = 0;  // Number of the scratch buffer.

using Input = Number<bfloat16>;  // The type in which inputs are multiplied.

// Return the offset of a block in the data, in bytes.
inline int64_t offset_of(const uint8_t *data, int64_t block) {
    int64_t offset;
    std::memcpy(&offset, data + block * 8, sizeof offset);
    return offset;
}

// A compressed matrix together with the rows that it is multiplied with.
struct CompressedMatrix {
    const uint8_t *data;  // The offset of each block in bytes, int64 [blocks + 1], then the blocks.
    const Input *x;
    const bfloat16 *bias;  // [outputs] or null.
    int64_t x_stride, rows, inputs, outputs;

    int64_t blocks() const { return (outputs + OUT - 1) / OUT; }
    int64_t units() const { return (inputs + UNIT_INPUTS - 1) / UNIT_INPUTS; }
    CompressedMatrix from_row(int64_t row, int64_t count) const {
        return {data, x + row * x_stride, bias, x_stride, count, inputs, outputs};
    }
    CompressedBlock block(int64_t index) const { return CompressedBlock(data + offset_of(data, index)); }
};

// An iterator over the units of a block.
struct UnitIterator {
    const CompressedBlock block;
    const bytes table;
    const uint8_t *at;
    const int64_t units;
    int64_t unit = 0, whole_units = 0, next_whole;

    UnitIterator(const CompressedMatrix &m, int64_t index)
        : block(m.block(index)), table(repeated(block.table)), at(block.units), units(m.units()),
          next_whole(block.whole_unit(0, units)) {
        for (const uint8_t *line = block.table; line < at; line += LINE) prefetch(line);
    }

    // Call compressed(unit, its bytes) or whole(unit, its weights) for each unit from the current one up to `end`,
    // exclusive. FETCH: whether to prefetch the weights AHEAD of each unit.
    template <bool FETCH, class F, class G>
    __attribute__((always_inline)) void run(int64_t end, F compressed, G whole) {
        const uint8_t *now = at;
        int64_t i = unit;
        while (i < end) {
            for (const int64_t stop = std::min(end, next_whole); i < stop; i++, now += UNIT_BYTES) {
                if (FETCH)
#pragma GCC unroll 3
                    for (int64_t byte = 0; byte < UNIT_BYTES; byte += LINE) prefetch(now + byte);
                if (FETCH && i % PAGE_UNITS == 0) __builtin_prefetch(now + AHEAD);
                compressed(i, now);
            }
            if (i == end) break;
            for (int64_t byte = 0; FETCH && byte < WHOLE_BYTES; byte += LINE) prefetch(now + byte);
            whole(i, reinterpret_cast<const bfloat16 *>(now));
            i++;
            now += WHOLE_BYTES;
            next_whole = block.whole_unit(++whole_units, units);
        }
        at = now;
        unit = i;
    }

    static __attribute__((always_inline)) void prefetch(const uint8_t *line) {
        __builtin_prefetch(line + AHEAD, 0, SECOND_CACHE);
    }

    // Convert the next units, up to `end`, exclusive, to bfloat16 [steps, OUT, 2].
    void convert(int64_t end, bfloat16 *to) {
        const bytes codes = table;
        run<false>(
            end, [&](int64_t, const uint8_t *packed) { to = Unit(packed, codes).write(to); },
            [&](int64_t, const bfloat16 *weights) { to = std::copy(weights, weights + UNIT_INPUTS * OUT, to); });
    }
};

#if defined(__AMX_BF16__)
// Compute the sums [rows, OUT] of one block for at most ROWS_AT_ONCE rows. All its weights are converted first, because
// dense/tiles.h, which multiplies them, adds in an order of its own.
void block_sums(const CompressedMatrix &m, int64_t block, float *sums, TileRegisters &registers) {
    auto *const weights = reinterpret_cast<bfloat16 *>(scratch(WEIGHTS, m.units() * UNIT_INPUTS * OUT / 2));
    UnitIterator units(m, block);
    units.convert(units.units, weights);
    block_sums(PackedMatrix<bfloat16>{m.x, weights, nullptr, m.x_stride, m.rows, m.inputs, OUT}, 0, sums, registers);
}
#else
// Add x · weights to the sums of a tile for the next units, up to `end`, exclusive. Weights are converted in registers.
// FETCH: see UnitIterator::run. kept: memory to which the weights are also written, in the type that they are
// multiplied in; null: they are not written.
template <bool FETCH, int ROWS, class P = NoPrefetch, class K = std::nullptr_t>
__attribute__((always_inline)) inline void add_units(RowSums<ROWS> &tile, const CompressedMatrix &m, int64_t row,
                                                     UnitIterator &units, int64_t end, P prefetch = P(),
                                                     K kept = nullptr) {
    const bytes table = units.table;
    const Input *x = m.x + row * m.x_stride + units.unit * UNIT_INPUTS;
    constexpr bool KEPT = !std::is_null_pointer_v<K>;
    units.run<FETCH>(
        end,
        [&](int64_t, const uint8_t *packed) __attribute__((always_inline)) {
            prefetch.step(UNIT_INPUTS);
            const Unit now(packed, table);
#pragma GCC unroll 2
            for (int i = 0; i < UNIT_STEPS; i++) {
                const Step<bfloat16> step(now.pairs[i]);
                if constexpr (KEPT) step.write(kept + i * STEP_WEIGHTS);
                tile.add(x + 2 * i, m.x_stride, step);
            }
            x += UNIT_INPUTS;
            if constexpr (KEPT) kept += UNIT_INPUTS * OUT;
        },
        [&](int64_t unit, const bfloat16 *weights) __attribute__((always_inline)) {
            if constexpr (KEPT)
                for (int i = 0; i < UNIT_STEPS; i++)
                    Step<bfloat16>(weights + i * STEP_WEIGHTS).write(kept + i * STEP_WEIGHTS);
            tile.add_inputs(x, m.x_stride, weights, std::min<int64_t>(UNIT_INPUTS, m.inputs - unit * UNIT_INPUTS));
            x += UNIT_INPUTS;
            if constexpr (KEPT) kept += UNIT_INPUTS * OUT;
        });
}

// Compute the sums [ROWS, OUT] of one block for a single tile of rows.
template <int ROWS>
void multiply_few(const CompressedMatrix &m, int64_t block, float *sums) {
    RowSums<ROWS> tile;
    UnitIterator units(m, block);
    add_units<true>(tile, m, 0, units, units.units);
    tile.each([=](floats sum, int row, int column) { put(sums + row * OUT + column, sum); });
}

// Compute the sums [rows, OUT] of one block for several tiles: the first one converts a stretch of the weights, and the
// others are multiplied with it while it is in the first cache.
void multiply_tiles(const CompressedMatrix &m, int64_t block, float *sums) {
    alignas(LINE) Input weights[STRETCH * OUT];
    std::fill(sums, sums + m.rows * OUT, 0.0f);
    for (UnitIterator units(m, block); units.unit < units.units;) {
        const int64_t from = units.unit * UNIT_INPUTS, end = std::min(units.unit + STRETCH / UNIT_INPUTS, units.units);
        const uint8_t *const next = units.at + STRETCH / UNIT_INPUTS * UNIT_BYTES;  // if none of the units is whole
        for_row_tiles(
            m.rows, sums, next, UNIT_BYTES / UNIT_INPUTS,
            [&](auto &tile, int64_t row, Prefetch prefetch) {
                add_units<false>(tile, m, row, units, end, prefetch, weights);
            },
            [&](auto &tile, int64_t row, Prefetch prefetch) {
                const Input *const x = m.x + row * m.x_stride + from;
                tile.add_inputs(x, m.x_stride, weights, std::min(STRETCH, m.inputs - from), prefetch);
            });
    }
}

// Compute the sums [rows, OUT] of one block for at most ROWS_AT_ONCE rows.
void block_sums(const CompressedMatrix &m, int64_t block, float *sums, TileRegisters &) {
    if (m.rows > MAX_ROWS) return multiply_tiles(m, block, sums);
    with_rows(m.rows, [&](auto tile) { multiply_few<tile.COUNT>(m, block, sums); });
}
#endif

void linear(const CompressedMatrix &m, bfloat16 *y, int64_t y_stride) {
    const int64_t grain = 65536 / (OUT * m.inputs * (1 + m.rows / 16)) + 1;
    parallel_for_with<TileRegisters>(m.blocks(), grain, [&](TileRegisters &registers, int64_t begin, int64_t end) {
        float sums[ROWS_AT_ONCE * OUT];
        // Rows stay in the second cache while all blocks are multiplied with them.
        for (int64_t row = 0; row < m.rows; row += ROWS_AT_ONCE) {
            const CompressedMatrix part = m.from_row(row, std::min(ROWS_AT_ONCE, m.rows - row));
            for (int64_t block = begin; block < end; block++) {
                prefetch_results(part.rows, block, y + row * y_stride, y_stride);
                block_sums(part, block, sums, registers);
                finish(sums, m.bias, part.rows, block, m.outputs, y + row * y_stride, y_stride);
            }
        }
    });
}

// Decompress rows `tokens` of a matrix into y [rows, inputs].
void look_up(const CompressedMatrix &m, const int64_t *tokens, bfloat16 *y) {
    parallel_for(m.rows, 16, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) {
            const int output = static_cast<int>(tokens[row] % OUT), at = place(output);
            bfloat16 *const to = y + row * m.inputs;
            UnitIterator units(m, tokens[row] / OUT);
            units.run<true>(
                units.units,
                [&](int64_t unit, const uint8_t *packed) {
                    for (int input = 0; input < UNIT_INPUTS; input++) {
                        const int byte = at + input % 2, code = packed[byte] >> input / 2 * 4 & 15;
                        const int lower = packed[(input / 2 + 1) * STEP_WEIGHTS + byte];
                        to[unit * UNIT_INPUTS + input].bits =
                            static_cast<uint16_t>(units.block.table[code] << 8 | lower);
                    }
                },
                [&](int64_t unit, const bfloat16 *weights) {
                    const int64_t first = unit * UNIT_INPUTS, count = std::min<int64_t>(UNIT_INPUTS, m.inputs - first);
                    for (int64_t input = 0; input < count; input++)
                        to[first + input] = weights[input / 2 * STEP_WEIGHTS + output * 2 + input % 2];
                });
        }
    });
}

// A plain matrix [outputs, inputs] that is to be compressed, block by block.
struct PlainMatrix {
    const bfloat16 *weights;
    int64_t stride, inputs, outputs;  // stride: from a row to the next, in numbers

    int64_t blocks() const { return (outputs + OUT - 1) / OUT; }
    int64_t units() const { return (inputs + UNIT_INPUTS - 1) / UNIT_INPUTS; }
    const bfloat16 *row(int64_t block, int64_t output) const { return weights + (block * OUT + output) * stride; }
    int64_t rows(int64_t block) const { return std::min<int64_t>(OUT, outputs - block * OUT); }
};

// The codes of the upper bytes in a block, and which units are kept whole.
struct BlockCodes {
    static constexpr uint8_t NONE = 16;  // The code of a byte that is not in the table.
    uint8_t table[TABLE], codes[256];
    uint8_t *whole;  // [units], 1 for whole ones; in the thread's scratch memory
    int64_t count = 0;  // of whole units

    BlockCodes(const PlainMatrix &m, int64_t block)
        : whole(reinterpret_cast<uint8_t *>(scratch(WEIGHTS, (m.units() + 3) / 4))) {
        choose(m, block);
        const int64_t units = m.units(), within = m.inputs / UNIT_INPUTS;
        std::fill(whole, whole + units, uint8_t{0});
        if (within < units) whole[within] = 1;
        for (int64_t row = 0; row < m.rows(block); row++) {
            const bfloat16 *x = m.row(block, row);
            for (int64_t unit = 0; unit < within; unit++, x += UNIT_INPUTS)
                whole[unit] |= (code(x[0]) | code(x[1]) | code(x[2]) | code(x[3])) >> 4;
        }
        for (int64_t unit = 0; unit < units; unit++) count += whole[unit];
    }

    uint8_t code(bfloat16 x) const { return codes[x.bits >> 8]; }

    // Set the table to the most frequent upper bytes.
    void choose(const PlainMatrix &m, int64_t block) {
        int64_t counts[4][256] = {};
        for (int64_t row = 0; row < m.rows(block); row++) {
            const bfloat16 *const x = m.row(block, row);
            for (int64_t i = 0; i < m.inputs; i++) counts[i % 4][x[i].bits >> 8]++;
        }
        std::fill(codes, codes + 256, NONE);
        for (int i = 0; i < 256; i++) counts[0][i] += counts[1][i] + counts[2][i] + counts[3][i];
        for (uint8_t i = 0; i < TABLE; i++) {
            int64_t *const most = std::max_element(counts[0], counts[0] + 256);
            table[i] = static_cast<uint8_t>(most - counts[0]);
            codes[table[i]] = i;
            *most = -1;
        }
    }
};

// Compress a block of a matrix, and write it to `to`.
void compress(const PlainMatrix &m, int64_t block, uint8_t *to) {
    const BlockCodes found(m, block);
    const auto count = static_cast<int32_t>(found.count);
    std::memset(to, 0, CompressedBlock::head_bytes(count));
    std::memcpy(to, found.table, TABLE);
    std::memcpy(to + TABLE, &count, sizeof count);
    uint8_t *number = to + TABLE + 4;
    to += CompressedBlock::head_bytes(count);
    for (int32_t unit = 0; unit < m.units(); unit++) {
        const int64_t first = int64_t{unit} * UNIT_INPUTS, size = found.whole[unit] ? WHOLE_BYTES : UNIT_BYTES;
        std::memset(to, 0, size);
        if (found.whole[unit]) {
            std::memcpy(number, &unit, sizeof unit);
            number += sizeof unit;
        }
        for (int output = 0; output < m.rows(block); output++) {
            const bfloat16 *const x = m.row(block, output) + first;
            if (found.whole[unit]) {
                for (int64_t input = 0; input < std::min<int64_t>(UNIT_INPUTS, m.inputs - first); input++)
                    std::memcpy(to + 2 * (input / 2 * STEP_WEIGHTS + output * 2 + input % 2), x + input, 2);
            } else {
                uint8_t *const at = to + place(output);
                for (int side = 0; side < 2; side++) {
                    at[side] = static_cast<uint8_t>(found.code(x[side]) | found.code(x[side + 2]) << 4);
                    at[STEP_WEIGHTS + side] = static_cast<uint8_t>(x[side].bits);
                    at[2 * STEP_WEIGHTS + side] = static_cast<uint8_t>(x[side + 2].bits);
                }
            }
        }
        to += size;
    }
}

}  // namespace
}  // namespace baton

// y = x · weightᵀ + bias, all of bfloat16; strides are in elements.
// x: [rows, inputs] and y: [rows, outputs], rows x_stride and y_stride apart. bias: [outputs] or null.
// data: what baton_compress writes.
extern "C" void baton_compressed_linear(const void *x, int64_t x_stride, const void *data, const void *bias, void *y,
                                        int64_t y_stride, int64_t rows, int64_t inputs, int64_t outputs) {
    using namespace baton;
    const auto *const weights = static_cast<const uint8_t *>(data);
    const auto *const added = static_cast<const bfloat16 *>(bias);
    const PackedMatrix<bfloat16> all{
        static_cast<const bfloat16 *>(x), nullptr, nullptr, x_stride, rows, inputs, outputs};
    with_converted(all, [&](int64_t row, int64_t count, const Rows<bfloat16> &part) {
        const CompressedMatrix m{weights, part.first, added, part.stride, count, inputs, outputs};
        linear(m, static_cast<bfloat16 *>(y) + row * y_stride, y_stride);
    });
}

// Decompress rows `tokens` of a matrix [.., inputs] into y [rows, inputs]. data: as for baton_compressed_linear.
extern "C" void baton_compressed_look_up(const void *data, const int64_t *tokens, void *y, int64_t rows,
                                         int64_t inputs) {
    using namespace baton;
    const CompressedMatrix m{static_cast<const uint8_t *>(data), nullptr, nullptr, 0, rows, inputs, 0};
    look_up(m, tokens, static_cast<bfloat16 *>(y));
}

// Compress a matrix [outputs, inputs] of bfloat16, whose rows are `stride` numbers apart, in two calls: the first one,
// without data, counts the units that are kept whole in each block of 32 outputs. whole: [blocks].
// data: begins with the offset of each block in bytes, int64 [blocks + 1]. The second call reads these offsets and
// writes the blocks there.
extern "C" void baton_compress(const void *weights, int64_t stride, int64_t *whole, void *data, int64_t inputs,
                               int64_t outputs) {
    using namespace baton;
    const PlainMatrix m{static_cast<const bfloat16 *>(weights), stride, inputs, outputs};
    auto *const to = static_cast<uint8_t *>(data);
    parallel_for(m.blocks(), [&](int64_t begin, int64_t end) {
        for (int64_t block = begin; block < end; block++)
            if (to)
                compress(m, block, to + offset_of(to, block));
            else
                whole[block] = BlockCodes(m, block).count;
    });
}

// Write 1 if products are faster with compressed weights on this target, else 0. AVX2 converts too slowly
// for four rows, and products in AMX's tiles have not been measured with them.
extern "C" void baton_compression_pays(int64_t *answer) {
#if defined(__AVX512BW__) && !defined(__AMX_BF16__)
    *answer = 1;
#else
    *answer = 0;
#endif
}

BATON_RECORDABLE(baton_compress)
BATON_RECORDABLE(baton_compression_pays)
BATON_RECORDABLE(baton_compressed_linear)
BATON_RECORDABLE(baton_compressed_look_up)
