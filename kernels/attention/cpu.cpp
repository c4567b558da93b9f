// Causal attention over pages, read in place: a block of keys at a time, with a running maximum and sum of each row's
// softmax (Dao et al., 2022, arXiv:2205.14135), so that no matrix of scores is ever whole.
#include <algorithm>
#include <cfloat>
#include <type_traits>

#include "../native/numbers.h"
#include "../native/parallel.h"
#include "../native/tile.h"
#include "../native/transpose.h"

namespace {

using namespace baton;

constexpr int64_t KEYS = 64;  // A block of keys begins at a multiple of it: then a row's sums are the same in any step.

enum Buffer { PLAIN_KEYS, TURNED_KEYS, VALUES, QUERIES, WEIGHTS, SUMS, ROWS };

// Segment s is tokens [offsets[s], offsets[s + 1]) at positions from starts[s] on; its blocks of `tokens` of them are
// [blocks[s], blocks[s + 1]). Strides count elements from page to page and from row to row of the table.
struct Segments {
    int64_t count, tokens, table_stride;
    const int64_t *offsets, *starts, *blocks;
    const int32_t *table;
};

struct Heads {
    int64_t heads, kv_heads, width, page_size, key_stride, value_stride;
    float scale;

    int64_t repeats() const { return heads / kv_heads; }
    int64_t columns() const { return round_up(width); }
};

// A head's keys or values, position by position; a division for each would take as long as what is done with them.
template <class Stored> class Rows {
public:
    Rows(const Heads &h, const Stored *from, int64_t stride, const int32_t *pages, int64_t kv_head, int64_t position)
        : h(h), from(from + kv_head * h.width), stride(stride), page(pages + position / h.page_size),
          offset(position % h.page_size) {}

    const Stored *next() {
        const Stored *const row = from + *page * stride + offset * h.kv_heads * h.width;
        if (++offset == h.page_size) offset = 0, ++page;
        return row;
    }

private:
    const Heads &h;
    const Stored *const from;
    const int64_t stride;
    const int32_t *page;
    int64_t offset;
};

template <class Activation, class Stored> class Attention {
public:
    const Segments s;
    const Heads h;
    const Activation *const query;  // [T, heads, width]
    const Stored *const keys, *const values;  // [pages, page_size, kv_heads, width]
    Activation *const output;  // [T, heads, width]

    // All blocks for a head before the next head's, so that long and short ones are spread over the threads.
    void run() const {
        const int64_t blocks = s.blocks[s.count];
        parallel_for(h.kv_heads * blocks, [&](int64_t begin, int64_t end) {
            const FlushDenormals flush;
            for (int64_t i = begin; i < end; i++) attend(i / blocks, i % blocks);
        });
    }

private:
    // The rows of a block: each of its tokens with each of the heads that read this one's keys.
    void attend(int64_t kv_head, int64_t block) const {
        const int64_t segment = std::upper_bound(s.blocks, s.blocks + s.count, block) - s.blocks - 1;
        const int64_t first = s.offsets[segment] + (block - s.blocks[segment]) * s.tokens;
        const int64_t last = std::min(first + s.tokens, s.offsets[segment + 1]);
        const int64_t position = s.starts[segment] + first - s.offsets[segment];
        const int64_t rows = (last - first) * h.repeats(), columns = h.columns();
        float *const queries = scratch(QUERIES, rows * columns), *const sums = scratch(SUMS, rows * columns);
        float *const highest = scratch(ROWS, 2 * rows), *const totals = highest + rows;
        for (int64_t row = 0; row < rows; row++)
            for (int64_t c = 0; c < h.width; c += LANES)
                put(queries + row * columns + c, load(query + place(first, kv_head, row) + c, h.width - c) * h.scale);
        std::fill(sums, sums + rows * columns, 0.0f);
        std::fill(highest, highest + rows, -FLT_MAX);
        std::fill(totals, totals + rows, 0.0f);
        const int64_t end = position + last - first;
        for (int64_t key = 0; key < end; key += KEYS)
            add(segment, kv_head, key, end, position, rows, queries, sums, highest, totals);
        for (int64_t row = 0; row < rows; row++)
            for (int64_t c = 0; c < h.width; c += LANES)
                put(output + place(first, kv_head, row) + c, load(sums + row * columns + c) / totals[row], h.width - c);
    }

    // Where a block's row lies in query and output.
    int64_t place(int64_t first, int64_t kv_head, int64_t row) const {
        return ((first + row / h.repeats()) * h.heads + kv_head * h.repeats() + row % h.repeats()) * h.width;
    }

    // The block of keys from `begin` on, of those before `last`, for rows whose first token stands at `position`.
    void add(int64_t segment, int64_t kv_head, int64_t begin, int64_t last, int64_t position, int64_t rows,
             const float *queries, float *sums, float *highest, float *totals) const {
        const int64_t columns = h.columns(), end = std::min(begin + KEYS, last);
        float *const plain = scratch(PLAIN_KEYS, KEYS * columns), *const turned = scratch(TURNED_KEYS, KEYS * columns);
        float *const block = scratch(VALUES, KEYS * columns), *const weights = scratch(WEIGHTS, rows * KEYS);
        gather(keys, h.key_stride, segment, kv_head, begin, end, last, plain);
        gather(values, h.value_stride, segment, kv_head, begin, end, last, block);
        transpose(plain, columns, KEYS, h.width, turned, KEYS);
        for_tiles(rows, KEYS, [&](auto tile, int64_t row, int64_t column) {
            tile.add(queries + row * columns, columns, turned + column, KEYS, h.width);
            tile.each([&](floats sum, int r, int c) { put(weights + (row + r) * KEYS + column + c, sum); });
        });
        for (int64_t row = 0; row < rows; row++) {
            const int64_t seen = position + row / h.repeats() + 1 - begin;
            float *const scores = weights + row * KEYS;
            const float kept = weigh(std::clamp<int64_t>(seen, 0, KEYS), scores, highest[row], totals[row]);
            for (int64_t c = row * columns; c < (row + 1) * columns; c += LANES) put(sums + c, load(sums + c) * kept);
        }
        for_tiles(rows, columns, [&](auto tile, int64_t row, int64_t column) {
            float *const at = sums + row * columns + column;
            tile.each([&](floats &sum, int r, int c) { sum = load(at + r * columns + c); });
            tile.add(weights + row * KEYS, KEYS, block + column, columns, end - begin);
            tile.each([&](floats sum, int r, int c) { put(at + r * columns + c, sum); });
        });
    }

    // Keys or values at positions [begin, end) as [KEYS, padded width], zeros behind them. The next block's, before
    // `last`, are asked for meanwhile: pages lie anywhere, so no prefetcher does.
    void gather(const Stored *from, int64_t stride, int64_t segment, int64_t kv_head, int64_t begin, int64_t end,
                int64_t last, float *to) const {
        const int32_t *const pages = s.table + segment * s.table_stride;
        Rows<Stored> rows{h, from, stride, pages, kv_head, begin}, ahead{h, from, stride, pages, kv_head, begin + KEYS};
        for (int64_t p = begin; p < end; p++, to += h.columns()) {
            if (p + KEYS < last) {
                const Stored *const row = ahead.next();
                for (int64_t c = 0; c < h.width; c += 64 / sizeof(Stored)) __builtin_prefetch(row + c);
            }
            const Stored *const row = rows.next();
            for (int64_t c = 0; c < h.width; c += LANES) put(to + c, load(row + c, h.width - c));
        }
        std::fill(to, to + (KEYS - (end - begin)) * h.columns(), 0.0f);
    }

    // Scores to weights, 0 beyond the first `seen`; what the row's sums are to be multiplied by.
    static float weigh(int64_t seen, float *scores, float &highest, float &total) {
        if (seen == 0) {
            std::fill(scores, scores + KEYS, 0.0f);
            return 1;
        }
        const float before = highest;
        std::fill(scores + seen, scores + KEYS, -FLT_MAX);
        floats top = splat(before);
        for (int64_t i = 0; i < KEYS; i += LANES) top = load(scores + i) > top ? load(scores + i) : top;
        for (int lane = 0; lane < LANES; lane++) highest = std::max(highest, top[lane]);
        for (int64_t i = 0; i < seen; i += LANES) put(scores + i, exp(load(scores + i) - highest));
        std::fill(scores + seen, scores + KEYS, 0.0f);
        floats sums{};
        for (int64_t i = 0; i < KEYS; i += LANES) sums += load(scores + i);
        const float kept = exp(splat(before - highest))[0];
        total = total * kept + sum(sums);
        return kept;
    }
};

}  // namespace

// Types are those of numbers.h: `type` of query and output [T, heads, width], `stored` of the pages.
extern "C" void baton_paged_attention(int type, const void *query, int stored, const void *keys, int64_t key_stride,
                                      const void *values, int64_t value_stride, const int32_t *table,
                                      int64_t table_stride, int64_t segments, int64_t tokens, const int64_t *offsets,
                                      const int64_t *starts, const int64_t *blocks, int64_t heads, int64_t kv_heads,
                                      int64_t width, int64_t page_size, float scale, void *output) {
    with_type(type, [&](auto *activation) {
        with_type(stored, [&](auto *page) {
            using Activation = std::remove_pointer_t<decltype(activation)>;
            using Stored = std::remove_pointer_t<decltype(page)>;
            const Attention<Activation, Stored> attention{
                {segments, tokens, table_stride, offsets, starts, blocks, table},
                {heads, kv_heads, width, page_size, key_stride, value_stride, scale},
                static_cast<const Activation *>(query), static_cast<const Stored *>(keys),
                static_cast<const Stored *>(values), static_cast<Activation *>(output)};
            attention.run();
        });
    });
}
