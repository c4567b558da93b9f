// Projections of each head with packed weights, as kernels/linear/per_head/reference.py defines them. Outputs are added
// up as in kernels/linear/dense/cpu.cpp, so the results are batch-invariant.
#include <algorithm>
#include <type_traits>

#include "linear/dense/rows.h"
#include "runtime/cpp/numbers.h"
#include "runtime/cpp/parallel.h"
#include "runtime/cpu_graph/call.h"

namespace baton {
namespace {

template <class T>
struct Heads {
    PackedMatrix<T> first;  // The first head's, with all rows; the other heads' weights follow.
    int64_t count, head_stride, passed;

    int64_t width() const { return first.outputs + passed; }
    int64_t grain() const { return 65536 / (OUT * first.inputs * (1 + first.rows / 16)) + 1; }

    // Compute y: [rows, count, width()].
    void run(T *y) const {
        const int64_t blocks = first.blocks();
        parallel_for_with<TileRegisters>(count * blocks, grain(),
                                         [&](TileRegisters &registers, int64_t begin, int64_t end) {
                                             for (int64_t task = begin; task < end; task++) {
                                                 const int64_t head = task / blocks, block = task % blocks;
                                                 project(head, block, y + head * width(), registers);
                                                 if (block == 0) pass(head, y + head * width() + first.outputs);
                                             }
                                         });
    }

    void project(int64_t head, int64_t block, T *y, TileRegisters &registers) const {
        float sums[ROWS_AT_ONCE * OUT];
        const int64_t stride = count * width();
        for (int64_t row = 0; row < first.rows; row += ROWS_AT_ONCE) {
            const T *const x = first.x + head * head_stride + row * first.x_stride;
            const PackedMatrix<T> part =
                first.number(head).with(x, first.x_stride, std::min(ROWS_AT_ONCE, first.rows - row));
            block_sums(part, block, sums, registers);
            finish<T>(sums, nullptr, part.rows, block, first.outputs, y + row * stride, stride);
        }
    }

    void pass(int64_t head, T *y) const {
        const T *x = first.x + head * head_stride + first.inputs;
        for (int64_t row = 0; row < first.rows; row++, x += first.x_stride, y += count * width())
            std::copy(x, x + passed, y);
    }
};

}  // namespace
}  // namespace baton

// Compute reference.head_linear. All tensors have dtype `type`; strides are in elements.
// x: [rows, heads, at least inputs + passed], rows `stride` and heads head_stride apart.
// weights: [heads, ...], each head's weight packed as for baton_linear.
// y: [rows, heads, outputs + passed], contiguous.
extern "C" void baton_head_linear(int type, const void *x, int64_t stride, int64_t head_stride, const void *weights,
                                  void *y, int64_t rows, int64_t heads, int64_t inputs, int64_t outputs,
                                  int64_t passed) {
    baton::with_type(type, [=](auto *t) {
        using T = std::remove_pointer_t<decltype(t)>;
        const baton::Heads<T> all{
            {static_cast<const T *>(x), static_cast<const T *>(weights), nullptr, stride, rows, inputs, outputs},
            heads,
            head_stride,
            passed};
        all.run(static_cast<T *>(y));
    });
}

BATON_RECORDABLE(baton_head_linear)
