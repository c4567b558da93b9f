// The groups of a block: their inputs, codes and scales.
#pragma once

#include <algorithm>

#include "codes.h"
#include "linear/dense/rows.h"
#include "product.h"
#include "runtime/cpp/numbers.h"

namespace baton {
namespace {

// The inputs of up to ROWS rows in COUNT groups. If the inputs end within the groups, this object copies and pads them
// with zeros.
template <class T, int ROWS, int COUNT = 1>
struct Inputs {
    T padded[ROWS * COUNT * MOST_GROUP];
    const T *numbers;
    int64_t stride;

    template <class M>
    Inputs(const M &m, int64_t group) : numbers(m.x + group * m.form.group), stride(m.x_stride) {
        const int64_t size = COUNT * m.form.group, count = m.inputs - group * m.form.group;
        if (count >= size) return;
        std::fill(padded, padded + m.rows * size, T{});
        for (int64_t row = 0; row < m.rows; row++)
            std::copy(numbers + row * stride, numbers + row * stride + count, padded + row * size);
        numbers = padded;
        stride = size;
    }
};

// Return sum + left · right, rounded once where the target can. The compiler would round once in one tile of rows and
// twice in another, depending on the code around.
inline floats multiply_add(floats sum, floats left, floats right) {
#if defined(__FMA__)
    asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(left), "v"(right));
    return sum;
#elif defined(__aarch64__)
    asm("fmla %0.4s, %1.4s, %2.4s" : "+w"(sum) : "w"(left), "w"(right));
    return sum;
#else
    return sum + left * right;
#endif
}

constexpr int64_t CODES_AHEAD = 8192;  // Weights are prefetched this many bytes ahead of those in use.

// The cache into which packed weights are prefetched. The target with BF16 and without AMX is for Zen 4, which can have
// more fetches in flight to its second cache.
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
constexpr int CODES_CACHE = SECOND_CACHE;
#else
constexpr int CODES_CACHE = FIRST_CACHE;
#endif

// The prefetches of packed weights: line by line, as they lie in memory, scales and factors together with the codes.
// All functions are inlined: GCC 12 removes calls of functions that only prefetch.
struct LinesAhead {
    const uint8_t *next;

    // in_use: the first weights that are used.
    explicit LinesAhead(const uint8_t *in_use) : next(in_use + CODES_AHEAD) {}

    // Begin a group: one line goes into the first cache, which is faster on Zen 4.
    __attribute__((always_inline)) void begin() {
        __builtin_prefetch(next, 0, FIRST_CACHE);
        next += LINE;
    }

    __attribute__((always_inline)) void fetch(int lines) {
#pragma GCC unroll 2
        for (int line = 0; line < lines; line++, next += LINE) __builtin_prefetch(next, 0, CODES_CACHE);
    }

    // End a group whose codes end at `end`: prefetch what is left.
    __attribute__((always_inline)) void finish(const uint8_t *end) {
        for (; next < end + CODES_AHEAD; next += LINE) __builtin_prefetch(next, 0, CODES_CACHE);
    }
};

// The groups of one block of a matrix, in order.
struct GroupIterator {
    const Form form;
    int64_t index = 0;
    int within = 0;  // the group's number within its span
    const uint8_t *codes, *factors;  // The factors of minima are form.span · OUT bytes after the factors.
    floats shared[VECTORS], shared_minima[VECTORS];

    // first: the first group of a span.
    template <class M>
    GroupIterator(const M &m, int64_t block, int64_t first = 0) : form(m.form), index(first) {
        enter(m.block(block) + first / form.span * form.span_bytes);
    }

    bool left() const { return index < form.groups; }

    void next() {
        index++;
        codes += form.code_bytes;
        factors += OUT;
        if (++within < form.span || !left()) return;
        within = 0;
        enter(codes);
    }

    void enter(const uint8_t *span) {
        for (int v = 0; v < VECTORS; v++) {
            shared[v] = numbers(span, v);
            if (form.minimum) shared_minima[v] = numbers(span + OUT * 2, v);
        }
        factors = span + OUT * 2 * (1 + form.minimum);
        codes = span + form.head_bytes;
    }

    floats numbers(const uint8_t *from, int vector) const {
        from += vector * LANES * 2;
        return form.half ? load_halves(from) : load(reinterpret_cast<const bfloat16 *>(from));
    }

    floats scale(int vector) const {
        return form.span == 1 ? shared[vector] : shared[vector] * load_bytes(factors + vector * LANES);
    }

    floats minimum(int vector) const {
        if (form.span == 1) return shared_minima[vector];
        return shared_minima[vector] * load_bytes(factors + form.span * OUT + vector * LANES);
    }
};

// The scales and minima of one group.
struct Scales {
    floats scale[VECTORS], minimum[VECTORS];

    Scales() = default;

    template <class G>
    explicit Scales(const G &group) {
        for (int v = 0; v < VECTORS; v++) scale[v] = group.scale(v);
        for (int v = 0; v < VECTORS && group.form.minimum; v++) minimum[v] = group.minimum(v);
    }

    // Add the sums of the group, scaled, to those of the groups before it.
    floats added(floats before, floats sum, int vector) const { return multiply_add(before, sum, scale[vector]); }

    // Add the scaled sums of the group, and subtract its minima times the sum of the row's inputs.
    floats added(floats before, floats sum, int vector, float sum_of_inputs) const {
        return multiply_add(added(before, sum, vector), minimum[vector], splat(-sum_of_inputs));
    }
};

}  // namespace
}  // namespace baton
