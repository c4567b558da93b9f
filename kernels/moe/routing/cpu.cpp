// Choice of experts, as kernels/moe/routing/reference.py defines it. A logit is added up in one chain along the inputs,
// so the results are batch-invariant.
#include <algorithm>
#include <type_traits>

#include "linear/dense/rows.h"
#include "runtime/cpp/numbers.h"
#include "runtime/cpp/parallel.h"
#include "runtime/cpu_graph/call.h"

namespace baton {
namespace {

constexpr float NONE = -INFINITY;
constexpr float LEAST = 1e-20f;

struct Rule {
    int64_t top_k, groups, groups_kept;
    int sigmoid, renormalise;
    float scale;
};

// Compute the logits [rows, OUT] of one block of experts, rows `stride` apart. block: the block's weights [steps, OUT,
// INPUTS]. If weights are packed in pairs and the number of inputs is odd, the last input is multiplied separately,
// padded with 0.
template <class W, class X>
void multiply(const X *x, int64_t x_stride, const W *block, int64_t inputs, int64_t rows, float *logits,
              int64_t stride) {
    constexpr int64_t SIDE = Step<W>::INPUTS;
    const int64_t whole = inputs / SIDE;
    for (int64_t row = 0; row < rows; row += MAX_ROWS)
        with_rows(std::min<int64_t>(MAX_ROWS, rows - row), [&](auto tile) {
            tile.add(x + row * x_stride, x_stride, block, whole);
            if (whole * SIDE < inputs) {
                X last[MAX_ROWS * SIDE] = {};
                for (int r = 0; r < tile.COUNT; r++) last[r * SIDE] = x[(row + r) * x_stride + inputs - 1];
                tile.add(last, SIDE, block + whole * OUT * SIDE, 1);
            }
            tile.each([=](floats sum, int r, int column) { put(logits + (row + r) * stride + column, sum); });
        });
}

floats sigmoid(floats x) { return 1.0f / (1.0f + exp(-x)); }

// Return the index of the greatest number, the lowest on a tie. values: [count], padded with NONE to a multiple of
// LANES.
int64_t best_of(const float *values, int64_t count) {
    floats most = load(values);
    for (int64_t i = LANES; i < count; i += LANES) {
        const floats next = load(values + i);
        most = next > most ? next : most;
    }
    const float highest_value = highest(most);
    return std::find(values, values + count, highest_value) - values;
}

// Set `wanted` to NONE for experts outside the best groups. memory: room for two numbers per group, each of the two
// arrays padded to a multiple of LANES.
void keep_groups(float *wanted, int64_t experts, const Rule &rule, float *memory) {
    const int64_t each = experts / rule.groups;
    float *const worth = memory, *const kept = memory + round_up(rule.groups);
    std::fill(worth, worth + round_up(rule.groups), NONE);
    for (int64_t group = 0; group < rule.groups; group++) {
        float first = NONE, second = NONE;
        for (int64_t i = group * each; i < (group + 1) * each; i++) {
            second = std::max(second, std::min(first, wanted[i]));
            first = std::max(first, wanted[i]);
        }
        worth[group] = each > 1 ? first + second : first;
        kept[group] = 0.0f;
    }
    for (int64_t k = 0; k < rule.groups_kept; k++) {
        const int64_t best = best_of(worth, rule.groups);
        worth[best] = NONE;
        kept[best] = 1.0f;
    }
    for (int64_t group = 0; group < rule.groups; group++)
        if (kept[group] == 0.0f) std::fill(wanted + group * each, wanted + (group + 1) * each, NONE);
}

// Compute the weights of the chosen experts. On entry `weights` holds the chosen experts' logits (with sigmoid:
// scores), the best first. all: the logits of all experts, padded with NONE to a multiple of LANES.
void weigh(const float *all, int64_t experts, const Rule &rule, float *weights) {
    const float most = weights[0];
    float sum = LEAST;
    for (int64_t k = 0; k < rule.top_k; k++) {
        if (!rule.sigmoid) weights[k] = exp(splat(weights[k] - most))[0];
        sum += weights[k];
    }
    if (!rule.renormalise) {
        floats parts = {};
        for (int64_t i = 0; i < experts && !rule.sigmoid; i += LANES) {
            const floats logit = load(all + i);
            parts += logit == NONE ? floats{} : exp(logit - most);
        }
        sum = rule.sigmoid ? 1.0f : baton::sum(parts);
    }
    for (int64_t k = 0; k < rule.top_k; k++) weights[k] = weights[k] / sum * rule.scale;
}

// Choose a row's experts. logits: [experts], with room up to a multiple of OUT; overwritten with the scores. wanted:
// memory of the same size for the ranking, followed by memory for keep_groups.
void choose(float *logits, const float *bias, int64_t experts, const Rule &rule, float *wanted, int32_t *chosen,
            float *weights) {
    const int64_t padded = round_up(experts);
    for (int64_t i = 0; i < experts; i += LANES) {
        const int64_t count = std::min<int64_t>(LANES, experts - i);
        const floats logit = load(logits + i), score = rule.sigmoid ? sigmoid(logit) : logit;
        put(logits + i, score);
        const floats value = bias ? score + load(bias + i, count) : score;
        put(wanted + i, value == value ? value : splat(NONE));  // A NaN must never be chosen.
    }
    std::fill(wanted + experts, wanted + padded, NONE);
    std::fill(logits + experts, logits + padded, NONE);
    if (rule.groups_kept < rule.groups) keep_groups(wanted, experts, rule, wanted + padded);
    for (int64_t k = 0; k < rule.top_k; k++) {
        const int64_t best = best_of(wanted, experts);
        chosen[k] = static_cast<int32_t>(best);
        weights[k] = logits[best];
        wanted[best] = NONE;
    }
    weigh(logits, experts, rule, weights);
}

template <class W, class X>
void route(const X *x, int64_t x_stride, const W *router, const float *bias, float *logits, int32_t *chosen,
           float *weights, int64_t rows, int64_t inputs, int64_t experts, const Rule &rule) {
    constexpr int64_t ROWS = 48;  // Rows per part of the parallel loop.
    const int64_t blocks = (experts + OUT - 1) / OUT, stride = blocks * OUT, parts = (rows + ROWS - 1) / ROWS;
    const int64_t size = (inputs + Step<W>::INPUTS - 1) / Step<W>::INPUTS * Step<W>::INPUTS * OUT;
    const int64_t work = OUT * inputs * (1 + std::min(rows, ROWS) / 16);
    parallel_for(parts * blocks, 65536 / work + 1, [&](int64_t begin, int64_t end) {
        for (int64_t task = begin; task < end; task++) {
            const int64_t row = task / blocks * ROWS, block = task % blocks;
            multiply(x + row * x_stride, x_stride, router + block * size, inputs, std::min(ROWS, rows - row),
                     logits + row * stride + block * OUT, stride);
        }
    });
    parallel_for(rows, 32768 / (experts * (1 + rule.top_k)) + 1, [&](int64_t begin, int64_t end) {
        float *const wanted = scratch(0, stride + 2 * round_up(rule.groups));
        for (int64_t row = begin; row < end; row++)
            choose(logits + row * stride, bias, experts, rule, wanted, chosen + row * rule.top_k,
                   weights + row * rule.top_k);
    });
}

}  // namespace
}  // namespace baton

// Compute reference.route.
// x: [rows, inputs] of dtype `type`, rows `stride` elements apart.
// router: [experts, inputs] of router_type, which is float32 or x's dtype, packed as for baton_linear.
// bias: [experts] or null.
// logits: [rows, experts rounded up to 32], for intermediate results.
// chosen, weights: [rows, top_k].
extern "C" void baton_route(int type, const void *x, int64_t stride, int router_type, const void *router,
                            const float *bias, float *logits, int32_t *chosen, float *weights, int64_t rows,
                            int64_t inputs, int64_t experts, int64_t top_k, int sigmoid, int renormalise,
                            int64_t groups, int64_t groups_kept, float scale) {
    using namespace baton;
    const Rule rule{top_k, groups, groups_kept, sigmoid, renormalise, scale};
    with_type(type, [=](auto *t) {
        using T = std::remove_pointer_t<decltype(t)>;
        const auto *const rows_x = static_cast<const T *>(x);
        if (router_type == type)
            route(rows_x, stride, static_cast<const T *>(router), bias, logits, chosen, weights, rows, inputs, experts,
                  rule);
        else
            route(rows_x, stride, static_cast<const float *>(router), bias, logits, chosen, weights, rows, inputs,
                  experts, rule);
    });
}

BATON_RECORDABLE(baton_route)
