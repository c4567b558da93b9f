// The tokens that decoding rows compute, where rows also feed drafts.
#pragma once

#include <cstdint>
#include <cstring>

namespace baton {

constexpr int MOST_DRAFTS = 16;  // Maximum drafts of a row in a step.
constexpr int MOST_TOKENS = 2 * MOST_DRAFTS + 1;  // Maximum tokens of a row: replayed ones, its next one and drafts.

// A row computes three kinds of tokens, in this order: drafts that were accepted, whose inputs are in its ring; its next
// token, after which its state is stored; and new drafts, which continue on a copy of the state and whose inputs go into
// the ring. Without drafts each row computes its next token only.
// T: the type of the inputs. begins, offsets: [rows + 1], null without drafts. rings: [rows].
// ring: [rings, drafts, columns], the rings `stride` elements apart.
template <class T>
struct Feed {
    const int64_t *begins, *offsets, *rings;
    T *ring;
    int64_t stride, columns;

    // The index of a row's first token among the tokens of all rows.
    int64_t begin(int64_t row) const { return begins ? begins[row] : row; }
    // The index of the first token that a row does not replay, among those of all rows.
    int64_t offset(int64_t row) const { return offsets ? offsets[row] : row; }
    int64_t tokens(int64_t row) const { return begins ? begins[row + 1] - begins[row] : 1; }
    int64_t fed(int64_t row) const { return offsets ? offsets[row + 1] - offsets[row] : 1; }
    int64_t replayed(int64_t row) const { return tokens(row) - fed(row); }
    // How many tokens the stored state will have consumed.
    int64_t stored(int64_t row) const { return replayed(row) + (fed(row) > 0); }
    T *kept(int64_t row, int64_t draft) const { return ring + rings[row] * stride + draft * columns; }

    // Copy the drafts' inputs to the rings. at(index): the inputs of a token, from `from` on of `count` numbers.
    template <class F>
    void keep(int64_t rows, int64_t from, int64_t count, F at) const {
        if (!offsets) return;
        for (int64_t row = 0; row < rows; row++)
            for (int64_t draft = 0; draft + 1 < fed(row); draft++)
                std::memcpy(kept(row, draft) + from, at(offset(row) + 1 + draft), count * sizeof(T));
    }
};

}  // namespace baton
