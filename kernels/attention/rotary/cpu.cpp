// Rotary position embedding, as kernels/attention/rotary/reference.py defines it.
#include <algorithm>
#include <type_traits>

#include "runtime/cpp/numbers.h"
#include "runtime/cpp/parallel.h"
#include "runtime/cpu_graph/call.h"

// Rotate `turned` columns of each head, from `first` on, and copy the other columns. `turned` is even, and
// first + turned at most width.
// x, y: [tokens, heads, width] of dtype `type`. cos, sin: [tokens, turned]. All are contiguous.
extern "C" void baton_rotate(int type, const void *x, const float *cos, const float *sin, void *y, int64_t tokens,
                             int64_t heads, int64_t width, int64_t first, int64_t turned) {
    using namespace baton;
    with_type(type, [=](auto *t) {
        using T = std::remove_pointer_t<decltype(t)>;
        parallel_for(tokens, 16384 / (heads * width + 1) + 1, [=](int64_t begin, int64_t end) {
            const int64_t half = turned / 2;
            for (int64_t i = begin * heads; i < end * heads; i++) {
                const T *const head = static_cast<const T *>(x) + i * width, *low = head + first, *high = low + half;
                T *const rotated = static_cast<T *>(y) + i * width, *to = rotated + first;
                const float *c = cos + i / heads * turned, *s = sin + i / heads * turned;
                over(half, [=](int64_t j, auto v) {
                    using V = decltype(v);
                    const V a = get<V>(low + j), b = get<V>(high + j), turn = get<V>(s + j), keep = get<V>(c + j);
                    put(to + j, a * keep - b * turn);
                    put(to + half + j, b * keep + a * turn);
                });
                std::copy(head, low, rotated);
                std::copy(low + turned, head + width, to + turned);
            }
        });
    });
}

BATON_RECORDABLE(baton_rotate)
