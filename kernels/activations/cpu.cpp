// Activations of feed-forward layers, and gates, as kernels/activations/reference.py defines them.
#include <type_traits>

#include "runtime/cpp/numbers.h"
#include "runtime/cpp/parallel.h"
#include "runtime/cpu_graph/call.h"

namespace baton {
namespace {

constexpr int64_t GRAIN = 16384;  // Minimum elements per part of a parallel loop; fewer are not worth waking a thread.

// Call f(row) for each row, in parallel.
template <class F>
void for_rows(int64_t rows, int64_t width, F f) {
    parallel_for(rows, GRAIN / (width + 1) + 1, [=](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) f(row);
    });
}

}  // namespace
}  // namespace baton

// y = sigmoid(gate)·x. x, y: [rows, gates, width], gate: [rows, gates], contiguous, of dtype `type`.
extern "C" void baton_sigmoid_gate(int type, const void *x, const void *gate, void *y, int64_t rows, int64_t gates,
                                   int64_t width) {
    using namespace baton;
    with_type(type, [=](auto *t) {
        using T = std::remove_pointer_t<decltype(t)>;
        for_rows(rows, gates * width, [=](int64_t row) {
            const T *from = static_cast<const T *>(x) + row * gates * width,
                    *gate_row = static_cast<const T *>(gate) + row * gates;
            T *to = static_cast<T *>(y) + row * gates * width;
            if (width == 1) {
                over(gates, [=](int64_t i, auto v) {
                    put(to + i, sigmoid(get<decltype(v)>(gate_row + i)) * get<decltype(v)>(from + i));
                });
                return;
            }
            for (int64_t g = 0; g < gates; g++, from += width, to += width) {
                const float factor = sigmoid(get<float>(gate_row + g));
                over(width, [=](int64_t i, auto v) { put(to + i, get<decltype(v)>(from + i) * factor); });
            }
        });
    });
}

// y = silu(gate)·up with x = [gate, up]. x: [rows, 2·width], y: [rows, width], both contiguous, of dtype `type`.
extern "C" void baton_silu_multiply(int type, const void *x, void *y, int64_t rows, int64_t width) {
    using namespace baton;
    with_type(type, [=](auto *t) {
        using T = std::remove_pointer_t<decltype(t)>;
        for_rows(rows, width, [=](int64_t row) {
            const T *gate = static_cast<const T *>(x) + 2 * row * width, *up = gate + width;
            T *to = static_cast<T *>(y) + row * width;
            over(width,
                 [=](int64_t i, auto v) { put(to + i, silu(get<decltype(v)>(gate + i)) * get<decltype(v)>(up + i)); });
        });
    });
}

// y = relu(x)². x, y: [rows, width], both contiguous, of dtype `type`.
extern "C" void baton_squared_relu(int type, const void *x, void *y, int64_t rows, int64_t width) {
    using namespace baton;
    with_type(type, [=](auto *t) {
        using T = std::remove_pointer_t<decltype(t)>;
        for_rows(rows, width, [=](int64_t row) {
            const T *from = static_cast<const T *>(x) + row * width;
            T *to = static_cast<T *>(y) + row * width;
            over(width, [=](int64_t i, auto v) {
                using V = decltype(v);
                const V given = get<V>(from + i), positive = given < 0 ? V{} : given;  // keeps NaN: NaN < 0 is false
                put(to + i, positive * positive);
            });
        });
    });
}

BATON_RECORDABLE(baton_sigmoid_gate)
BATON_RECORDABLE(baton_silu_multiply)
BATON_RECORDABLE(baton_squared_relu)
