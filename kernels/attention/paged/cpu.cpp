// Causal attention over pages, which are read in place. Keys are processed in blocks with an online softmax, a running
// maximum and sum for each row (flash attention: Dao et al., 2022, arXiv:2205.14135), so that the matrix of scores is
// never stored.
#include <algorithm>
#include <cfloat>
#include <cstring>
#include <type_traits>

#include "runtime/cpp/numbers.h"
#include "runtime/cpp/parallel.h"
#include "runtime/cpp/products/tile.h"
#include "runtime/cpp/transpose.h"
#include "runtime/cpu_graph/call.h"

namespace {

using namespace baton;

// Keys in a block. Blocks begin at multiples of KEYS, so a token's sums are added in the same order in every step.
constexpr int64_t KEYS = 64;

enum Buffer { TURNED_KEYS, VALUES, QUERIES, SCORES, WEIGHTS, SUMS, ROWS, BLOCKS };

// The packed segments. Segment s is tokens [offsets[s], offsets[s + 1]) at positions from starts[s] on. The segment is
// divided into blocks of `tokens` tokens, numbered [blocks[s], blocks[s + 1]). seen_from: the first position that any token
// attends to. window: how many positions a token attends to, its own included.
// table: a row of page numbers for each segment, with rows table_stride elements apart.
struct Segments {
    int64_t count, tokens, table_stride, seen_from, window;
    const int64_t *offsets, *starts;
    const int32_t *table;
    const int64_t *blocks;

    // Return the first position that the token at `position` attends to.
    int64_t first_seen(int64_t position) const { return std::max(seen_from, position - window + 1); }
};

// Divide segments into blocks: return Segments::blocks, [segments + 1], in scratch memory of the calling thread.
int64_t *cut(int64_t segments, int64_t tokens, const int64_t *offsets) {
    auto *const blocks = reinterpret_cast<int64_t *>(scratch(BLOCKS, 2 * (segments + 1)));
    blocks[0] = 0;
    for (int64_t s = 0; s < segments; s++)
        blocks[s + 1] = blocks[s] + (offsets[s + 1] - offsets[s] + tokens - 1) / tokens;
    return blocks;
}

// The columns of queries and keys are padded to a multiple of COLUMNS.
constexpr int64_t COLUMNS = std::max<int64_t>(LANES, WHOLE_INPUTS);

struct Heads {
    int64_t heads, kv_heads, width, value_width;
    float scale;

    int64_t repeats() const { return heads / kv_heads; }
    int64_t columns() const { return (width + COLUMNS - 1) / COLUMNS * COLUMNS; }
    int64_t value_columns() const { return round_up(value_width); }
};

// Pages [pages, page_size, kv_heads, width] with strides in elements, between pages, positions and heads. The last
// dimension is contiguous.
template <class Stored> struct Pages {
    const Stored *at;
    int64_t size, page_stride, stride, head_stride;

    const Stored *row(int64_t page, int64_t offset, int64_t head) const {
        return at + page * page_stride + offset * stride + head * head_stride;
    }
};

// The addresses of a head's keys and values in a block, by position. Addresses after the last one repeat the first, so
// that whole vectors of keys can be read.
template <class Stored> struct Block {
    int64_t count = 0;
    const Stored *keys[KEYS], *values[KEYS];

    // Set the addresses of `number` positions from `position` on. pages: the pages of the segment.
    void set(const Pages<Stored> &all_keys, const Pages<Stored> &all_values, const int32_t *pages, int64_t kv_head,
             int64_t position, int64_t number) {
        count = number;
        for (int64_t i = 0; i < count;) {
            const int64_t page = pages[(position + i) / all_keys.size], offset = (position + i) % all_keys.size;
            const Stored *key = all_keys.row(page, offset, kv_head), *value = all_values.row(page, offset, kv_head);
            for (const int64_t end = std::min(count, i + all_keys.size - offset); i < end; i++) {
                keys[i] = key, values[i] = value;
                key += all_keys.stride, value += all_values.stride;
            }
        }
        if (count == 0) return;
        std::fill(keys + count, keys + round_up(count), keys[0]);
        std::fill(values + count, values + round_up(count), values[0]);
    }
};

// Attention over pages of type Stored. Number: the type of the operands of products. It is bfloat16 if the CPU has
// instructions that multiply pairs of bfloat16, else float32. With bfloat16 the softmax weights are rounded to
// bfloat16, as on a GPU, and divided by the sum of the rounded weights.
template <class Stored, class Number> class Attention {
public:
    const Segments s;
    const Heads h;
    const int type;  // Dtype of query and output.
    const void *const query;  // [T, heads, width]
    const Pages<Stored> keys, values;
    void *const output;  // [T, heads, value_width]

    // Loop over blocks, and within a block over heads, whose keys are adjacent in memory. Many parts spread long and short
    // segments over the threads.
    void run() const {
        const int64_t tasks = s.blocks[s.count] * h.kv_heads;
        const auto body = [&](TileRegisters &registers, int64_t begin, int64_t end) {
            registers.set_height(TILE_HEIGHT);
            for (int64_t i = begin; i < end; i++) attend(i % h.kv_heads, i / h.kv_heads);
        };
        parallel_for_with<TileRegisters>(tasks, 1, body, 4 * PARTS);
    }

private:
    // Compute the attention of a block of tokens for one key head. Each token has one row for each query head that
    // shares the key head.
    void attend(int64_t kv_head, int64_t block) const {
        const int64_t segment = std::upper_bound(s.blocks, s.blocks + s.count, block) - s.blocks - 1;
        const int64_t first = s.offsets[segment] + (block - s.blocks[segment]) * s.tokens;
        const int64_t last = std::min(first + s.tokens, s.offsets[segment + 1]);
        const int64_t position = s.starts[segment] + first - s.offsets[segment];
        const int64_t rows = (last - first) * h.repeats(), columns = h.columns(), summed = h.value_columns();
        Number *const queries = numbers(QUERIES, padded_rows(rows) * columns);
        float *const sums = scratch(SUMS, rows * summed);
        float *const highest = scratch(ROWS, 3 * rows), *const totals = highest + rows;
        with_type(type, [&](auto *activation) {
            const auto *const from = static_cast<const std::remove_pointer_t<decltype(activation)> *>(query);
            for (int64_t row = 0; row < rows; row++) {
                const auto *const given = from + place(first, kv_head, row) * h.width;
                for (int64_t c = 0; c < columns; c += LANES)
                    put(queries + row * columns + c,
                        load(given + c, std::max<int64_t>(h.width - c, 0)) * (IN_PAIRS ? 1 : h.scale));
            }
        });
        std::fill(sums, sums + rows * summed, 0.0f);
        std::fill(highest, highest + rows, -FLT_MAX);
        std::fill(totals, totals + rows, 0.0f);
        const int64_t end = position + last - first, begin = s.first_seen(position) / KEYS * KEYS;
        const auto find = [&](Block<Stored> &found, int64_t key) {
            const int64_t count = std::clamp<int64_t>(end - key, 0, KEYS);
            found.set(keys, values, s.table + segment * s.table_stride, kv_head, key, count);
        };
        Block<Stored> blocks[2];
        find(blocks[0], begin);
        for (int64_t key = begin, now = 0; key < end; key += KEYS, now = 1 - now) {
            find(blocks[1 - now], key + KEYS);
            add(blocks[now], blocks[1 - now], key, position, rows, queries, sums, highest, totals);
        }
        with_type(type, [&](auto *activation) {
            auto *const to = static_cast<decltype(activation)>(output);
            for (int64_t row = 0; row < rows; row++) {
                auto *const attended = to + place(first, kv_head, row) * h.value_width;
                for (int64_t c = 0; c < h.value_width; c += LANES)
                    put(attended + c, load(sums + row * summed + c) / totals[row], h.value_width - c);
            }
        });
    }

    // Return where a row's vector is in query and output, as an index of [T · heads, width]. `row` counts from the
    // first row of token `first`, with which the block begins.
    int64_t place(int64_t first, int64_t kv_head, int64_t row) const {
        return (first + row / h.repeats()) * h.heads + kv_head * h.repeats() + row % h.repeats();
    }

    // Add a block of keys and values, whose first position is `begin`, to the rows' sums, maxima and totals. Prefetch
    // the next block.
    // position: the position of the rows' first token.
    void add(const Block<Stored> &block, const Block<Stored> &next, int64_t begin, int64_t position, int64_t rows,
             const Number *queries, float *sums, float *highest, float *totals) const {
        const int64_t columns = h.columns(), summed = h.value_columns(), count = block.count;
        Number *const turned = numbers(TURNED_KEYS, KEYS * columns);
        Number *const weights = numbers(WEIGHTS, padded_rows(rows) * KEYS);
        float *const scores = scratch(SCORES, rows * KEYS), *const rescale = totals + rows;
        turn_keys(block, next, turned);
        multiply<Number, Number>(rows, round_up(count), whole(h.width), {queries, columns},
                                 {turned, KEYS * PAIRED<Number>}, {}, {scores, KEYS});
        for (int64_t row = 0; row < rows; row++) {
            const int64_t own = position + row / h.repeats();
            const int64_t unseen = std::clamp<int64_t>(s.first_seen(own) - begin, 0, KEYS);
            const int64_t seen = std::clamp<int64_t>(own + 1 - begin, 0, KEYS);
            const float kept = weigh(unseen, seen, scores + row * KEYS, weights + row * KEYS, highest[row], totals[row]);
            if (IN_PAIRS)
                rescale[row] = kept;
            else
                for (int64_t c = row * summed; c < (row + 1) * summed; c += LANES) put(sums + c, load(sums + c) * kept);
        }
        if constexpr (IN_PAIRS) {
            const bfloat16 *const pairs = pair_values(block, next);
            multiply<Stored, Number>(rows, summed, whole(count), {weights, KEYS}, {pairs, 2 * summed}, {rescale, 1},
                                     {sums, summed});
        } else {
            add_floats(block, next, rows, weights, sums);
        }
    }

    // sums += weights · values of a block, in float32. Prefetch those of the next block. Few rows read the values
    // directly from the pages, and many rows read a float32 copy: a copy pays only if several tiles read it. The sums are
    // the same either way.
    void add_floats(const Block<Stored> &block, const Block<Stored> &next, int64_t rows, const Number *weights,
                    float *sums) const {
        const int64_t summed = h.value_columns(), count = block.count;
        const auto prefetch = [&](int64_t key) {
            for (int64_t c = 0; key < next.count && c < h.value_width; c += 64 / sizeof(Stored))
                __builtin_prefetch(next.values[key] + c, 0, SECOND_CACHE);
        };
        if (rows <= 2 * TILE_ROWS && summed == h.value_width) {
            for (int64_t key = 0, run; key < count; key += run) {
                for (run = 1; key + run < count && block.values[key + run] == block.values[key] + run * values.stride;)
                    run++;
                for (int64_t k = key; k < key + run; k++) prefetch(k);
                add_values(block.values[key], values.stride, run, rows, weights + key, sums);
            }
        } else {
            float *const copy = scratch(VALUES, KEYS * summed);
            for (int64_t key = 0; key < count; key++) {
                prefetch(key);
                for (int64_t c = 0; c < h.value_width; c += LANES)
                    put(copy + key * summed + c, load(block.values[key] + c, h.value_width - c));
            }
            add_values(copy, summed, count, rows, weights, sums);
        }
    }

    static constexpr bool IN_PAIRS = PAIRED<Number> == 2;

    static Number *numbers(Buffer buffer, int64_t count) {
        return reinterpret_cast<Number *>(scratch(buffer, (count + PAIRED<Number> - 1) / PAIRED<Number>));
    }

    // Return how many rows to allocate for the left side of a product: whole tiles.
    static int64_t padded_rows(int64_t rows) { return (rows + TILE_HEIGHT - 1) / TILE_HEIGHT * TILE_HEIGHT; }

    static int64_t whole(int64_t count) { return (count + PAIRED<Number> - 1) / PAIRED<Number> * PAIRED<Number>; }

    // sums += weights · values for `count` keys, whose values begin at `from`.
    template <class T>
    void add_values(const T *from, int64_t stride, int64_t count, int64_t rows, const Number *weights,
                    float *sums) const {
        const float one = 1;
        const int64_t columns = h.value_columns();
        multiply<T, Number>(rows, columns, count, {weights, KEYS}, {from, stride}, {&one, 0}, {sums, columns});
    }

    // Return the values as [count / 2, columns, 2], interleaved for pairs of keys. Keys are padded with zeros to a
    // multiple of WHOLE_INPUTS. Prefetch the values of the next block.
    const bfloat16 *pair_values(const Block<Stored> &block, const Block<Stored> &next) const {
        const int64_t summed = h.value_columns();
        bfloat16 *const pairs = reinterpret_cast<bfloat16 *>(scratch(VALUES, KEYS * summed / 2));
        for (int64_t key = 0; key < (block.count + WHOLE_INPUTS - 1) / WHOLE_INPUTS * WHOLE_INPUTS; key += 2) {
            const Stored *const first = key < block.count ? block.values[key] : nullptr;
            const Stored *const second = key + 1 < block.count ? block.values[key + 1] : nullptr;
            pair(first, second, key < next.count ? next.values + key : block.values, pairs + key * summed);
        }
        return pairs;
    }

    // Interleave the values of two keys; null stands for zeros. Prefetch the `next` two.
    void pair(const Stored *first, const Stored *second, const Stored *const *next, bfloat16 *to) const {
        typedef uint16_t twice __attribute__((vector_size(4 * LANES)));  // 2·LANES numbers
        constexpr std::make_integer_sequence<int, 2 * LANES> lanes{};
        int64_t c = 0;
        for (; first && second && c + 2 * LANES <= h.value_width; c += 2 * LANES) {
            twice a, b;
            std::memcpy(&a, first + c, sizeof a);
            std::memcpy(&b, second + c, sizeof b);
            __builtin_prefetch(next[0] + c, 0, SECOND_CACHE);
            __builtin_prefetch(next[1] + c, 0, SECOND_CACHE);
            const twice low = interleave<0, 2 * LANES>(a, b, lanes), high = interleave<LANES, 2 * LANES>(a, b, lanes);
            std::memcpy(to + 2 * c, &low, sizeof low);
            std::memcpy(to + 2 * (c + LANES), &high, sizeof high);
        }
        for (; c < h.value_width; c += LANES) {
            const words low = first ? (words)load(first + c, h.value_width - c) >> 16 : words{};
            const words high = second ? (words)load(second + c, h.value_width - c) : words{};
            const words both = low | high;
            std::memcpy(to + 2 * c, &both, sizeof both);
        }
    }

    // Transpose a block's keys to [width, KEYS], or in pairs to [columns / 2, KEYS, 2], where columns is the width padded
    // with zeros. Columns of keys from the block's count on are undefined.
    // Prefetch the next block's keys, a line for each line that is read. pair_values and add_floats do the same for its
    // values. Pages are scattered in memory, so the hardware does not prefetch them, and if many lines were prefetched
    // at once, the CPU would wait.
    void turn_keys(const Block<Stored> &block, const Block<Stored> &next, Number *to) const {
        for (int64_t i = 0; i < block.count; i += LANES)
            turn_rows(block.keys + i, (i < next.count ? next : block).keys + i, to + i * PAIRED<Number>);
    }

    // Transpose LANES keys: their numbers become columns of `to`, whose rows are KEYS apart. Prefetch the `next` ones.
    void turn_rows(const Stored *const *rows, const Stored *const *next, Number *to) const {
        constexpr int64_t PACKED = sizeof(float) / sizeof(Stored), STEP = LANES * PACKED;
        for (int64_t c = 0; c < h.width; c += STEP) {
            const int64_t count = std::min(STEP, h.width - c);
            Stored rest[LANES][STEP];  // The numbers after the last whole vector, padded with zeros.
            const Stored *from[LANES];
            for (int i = 0; i < LANES; i++) {
                from[i] = rows[i] + c;
                __builtin_prefetch(next[i] + c, 0, SECOND_CACHE);
                if (count == STEP) continue;
                std::memset(rest[i], 0, sizeof rest[i]);
                std::memcpy(rest[i], from[i], count * sizeof(Stored));
                from[i] = rest[i];
            }
            words turned[LANES];
            turn(from, turned);
            if constexpr (IN_PAIRS) {
                const int64_t padded = std::min(STEP, h.columns() - c);
#pragma GCC unroll 16
                for (int i = 0; i < LANES; i++)
                    if (2 * i < padded) std::memcpy(to + (c + 2 * i) * KEYS, &turned[i], sizeof turned[i]);
                continue;
            }
#pragma GCC unroll 32
            for (int i = 0; i < STEP; i++) {
                if (i >= count) continue;
                const words both = turned[i / PACKED];
                put(to + (c + i) * KEYS, (floats)(PACKED == 1 ? both : i % 2 ? both & 0xffff0000 : both << 16));
            }
        }
    }

    // Compute a row's softmax weights from its scores. The row sees the keys [unseen, seen); others have the weight 0.
    // Update the row's maximum and total, and return the factor that rescales the row's previous sums to the new
    // maximum.
    float weigh(int64_t unseen, int64_t seen, float *scores, Number *weights, float &highest, float &total) const {
        if (seen <= unseen) {
            std::fill(weights, weights + KEYS, Number{});
            return 1;
        }
        const float before = highest, scale = IN_PAIRS ? h.scale : 1;
        std::fill(scores, scores + unseen, -FLT_MAX);
        std::fill(scores + seen, scores + KEYS, -FLT_MAX);
        floats top = splat(before);
        for (int64_t i = 0; i < KEYS; i += LANES) {
            const floats scaled = load(scores + i) * scale;
            top = scaled > top ? scaled : top;
        }
        highest = baton::highest(top);
        for (int64_t i = 0; i < seen; i += LANES) put(weights + i, exp(load(scores + i) * scale - highest));
        std::fill(weights, weights + unseen, Number{});
        std::fill(weights + seen, weights + KEYS, Number{});
        floats sums{};
        for (int64_t i = 0; i < KEYS; i += LANES) sums += load(weights + i);
        const float kept = exp(splat(before - highest))[0];
        total = total * kept + sum(sums);
        return kept;
    }
};

}  // namespace

// Compute reference.paged_attention. Dtypes are numbered as in numbers.h; strides are in elements.
// query: [T, heads, width] and output: [T, heads, value_width], of dtype `type`.
// keys, values: pages of dtype `stored`. key_stride: between pages of keys. value_...: between pages, positions, heads.
// table: page numbers, one row for each segment, with rows table_stride apart.
// tokens: how many tokens of a segment are computed together. seen_from: the first position that tokens attend to.
// window: how many positions a token attends to, its own included; 0: all.
// offsets: [segments + 1]; starts: [segments].
extern "C" void baton_paged_attention(int type, const void *query, int stored, const void *keys, int64_t key_stride,
                                      const void *values, int64_t value_page_stride, int64_t value_stride,
                                      int64_t value_head_stride, const int32_t *table, int64_t table_stride,
                                      int64_t segments, int64_t tokens, int64_t seen_from, int64_t window,
                                      const int64_t *offsets, const int64_t *starts, int64_t heads, int64_t kv_heads,
                                      int64_t width, int64_t value_width, int64_t page_size, float scale,
                                      void *output) {
    with_type(stored, [&](auto *page) {
        using Stored = std::remove_pointer_t<decltype(page)>;
        const auto run = [=](auto number) {
            const Attention<Stored, decltype(number)> attention{
                {segments, tokens, table_stride, seen_from, window ? window : INT64_MAX, offsets, starts, table,
                 cut(segments, tokens, offsets)},
                {heads, kv_heads, width, value_width, scale},
                type,
                query,
                {static_cast<const Stored *>(keys), page_size, key_stride, kv_heads * width, width},
                {static_cast<const Stored *>(values), page_size, value_page_stride, value_stride, value_head_stride},
                output};
            attention.run();
        };
#if defined(__AVX512BF16__)
        if constexpr (std::is_same_v<Stored, bfloat16>)
            if (type == stored) return run(bfloat16{});
#endif
        run(0.0f);
    });
}

// Copy rows [tokens, bytes] to the pages, which are `stride` bytes apart.
// places: [tokens], flat KV indices: page · page_size + offset.
extern "C" void baton_write_pages(const char *rows, char *pages, int64_t stride, const int64_t *places, int64_t tokens,
                                  int64_t page_size, int64_t bytes) {
    const auto place = [=](int64_t t) { return pages + places[t] / page_size * stride + places[t] % page_size * bytes; };
    constexpr int64_t AHEAD = 4;
    for (int64_t t = 0; t < tokens; t++) {
        if (t + AHEAD < tokens)
            for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(place(t + AHEAD) + byte, 1, FIRST_CACHE);
        std::memcpy(place(t), rows + t * bytes, bytes);
    }
}

BATON_RECORDABLE(baton_paged_attention)
BATON_RECORDABLE(baton_write_pages)
