// The cache entries of latent attention, as kernels/attention/mla_cache/reference.py defines them.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "runtime/cpp/numbers.h"
#include "runtime/cpp/parallel.h"
#include "runtime/cpu_graph/call.h"

namespace {

using namespace baton;

constexpr int64_t GRAIN = 16384;  // Minimum elements per part of a parallel loop; fewer are not worth waking a thread.

// Return the sum of the squares of x: [count].
template <class T>
float squares(const T *x, int64_t count) {
    floats total{};
    for (int64_t i = 0; i < count; i += LANES) {
        const floats given = load(x + i, count - i);
        total += given * given;
    }
    return sum(total);
}

// to [width] ← weight·x / rms(x) for the first `rank` numbers; the other numbers are copied.
template <class T>
void write(const T *x, const T *weight, float eps, int64_t rank, int64_t width, T *to) {
    const float scale = 1.0f / std::sqrt(squares(x, rank) / static_cast<float>(rank) + eps);
    over(rank, [=](int64_t i, auto v) { put(to + i, get<decltype(v)>(x + i) * scale * get<decltype(v)>(weight + i)); });
    std::copy(x + rank, x + width, to + rank);
}

}  // namespace

// Write the cache entries of tokens to pages. All tensors have dtype `type`; strides are in elements.
// projected: [tokens, width], rows `stride` apart. weight: [rank].
// places: [tokens], flat cache indices: page · page_size + offset.
// pages: [page_size, width] each, page_stride apart.
extern "C" void baton_write_latents(int type, const void *projected, int64_t stride, const void *weight, float eps,
                                    void *pages, int64_t page_stride, const int64_t *places, int64_t tokens,
                                    int64_t page_size, int64_t rank, int64_t width) {
    with_type(type, [=](auto *t) {
        using T = std::remove_pointer_t<decltype(t)>;
        parallel_for(tokens, GRAIN / width + 1, [=](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; i++) {
                const int64_t place = places[i] / page_size * page_stride + places[i] % page_size * width;
                write(static_cast<const T *>(projected) + i * stride, static_cast<const T *>(weight), eps, rank, width,
                      static_cast<T *>(pages) + place);
            }
        });
    });
}

BATON_RECORDABLE(baton_write_latents)
