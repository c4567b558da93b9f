// Operations of a head for multi-token prediction, as reference.py defines them. Sizes are in bytes.
#include <cstdint>
#include <cstring>

#include "drafts/feed.h"
#include "runtime/cpu_graph/call.h"

// Write the hidden state before each fed token to `before`, and store the tokens' own hidden states.
// hidden, before: [fed tokens, size]. states: [slots, size], the slots `stride` bytes apart. slots: [rows].
// begins, offsets, rings, ring: see Feed, with hidden states as inputs.
extern "C" void baton_exchange_hidden(const void *hidden, void *states, int64_t stride, const int64_t *slots,
                                      const int64_t *begins, const int64_t *offsets, const int64_t *rings, void *ring,
                                      int64_t ring_stride, int64_t rows, int64_t size, void *before) {
    const baton::Feed<char> feed{begins, offsets, rings, static_cast<char *>(ring), ring_stride, size};
    const char *from = static_cast<const char *>(hidden);
    char *to = static_cast<char *>(before);
    for (int64_t row = 0; row < rows; row++) {
        char *state = static_cast<char *>(states) + slots[row] * stride;
        const int64_t fed = feed.fed(row), first = feed.offset(row), replayed = feed.replayed(row);
        // Accepted drafts are not in the slot's state yet: the hidden state of the last one is in the ring.
        if (replayed > 0) std::memcpy(state, feed.kept(row, replayed - 1), size);
        if (fed == 0) continue;
        std::memcpy(to + first * size, state, size);
        std::memcpy(state, from + first * size, size);
        for (int64_t draft = 0; draft + 1 < fed; draft++) {
            const int64_t token = first + 1 + draft;
            std::memcpy(to + token * size, from + (token - 1) * size, size);
            std::memcpy(feed.kept(row, draft), from + token * size, size);
        }
    }
}

// Put the rows of `left` and `right` [rows, size] side by side: to [rows, 2·size].
extern "C" void baton_join(const void *left, const void *right, int64_t rows, int64_t size, void *to) {
    for (int64_t row = 0; row < rows; row++) {
        char *target = static_cast<char *>(to) + 2 * row * size;
        std::memcpy(target, static_cast<const char *>(left) + row * size, size);
        std::memcpy(target + size, static_cast<const char *>(right) + row * size, size);
    }
}

BATON_RECORDABLE(baton_exchange_hidden)
BATON_RECORDABLE(baton_join)
