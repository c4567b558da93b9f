// Sum of routed experts and the shared expert, as kernels/moe/shared_expert/reference.py defines it.
#include <type_traits>

#include "runtime/cpp/numbers.h"
#include "runtime/cpp/parallel.h"
#include "runtime/cpu_graph/call.h"

// y = routed + sigmoid(gate)·shared. routed, shared, y: [rows, width], contiguous. gate: [rows], or null for factor 1.
// All have dtype `type`.
extern "C" void baton_add_shared(int type, const void *routed, const void *shared, const void *gate, void *y,
                                 int64_t rows, int64_t width) {
    using namespace baton;
    with_type(type, [=](auto *t) {
        using T = std::remove_pointer_t<decltype(t)>;
        parallel_for(rows, 16384 / (width + 1) + 1, [=](int64_t begin, int64_t end) {
            for (int64_t row = begin; row < end; row++) {
                const T *const left = static_cast<const T *>(routed) + row * width;
                const T *const right = static_cast<const T *>(shared) + row * width;
                T *const to = static_cast<T *>(y) + row * width;
                const float share =
                    gate ? 1.0f / (1.0f + std::exp(-to_float(static_cast<const T *>(gate)[row]))) : 1.0f;
                over(width, [=](int64_t i, auto v) {
                    put(to + i, get<decltype(v)>(left + i) + get<decltype(v)>(right + i) * share);
                });
            }
        });
    });
}

BATON_RECORDABLE(baton_add_shared)
