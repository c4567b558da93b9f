// The Mamba-2 mixer between its input and output projections, over packed segments, as reference.py defines it, in the
// chunked form of Dao and Gu (2024, arXiv:2405.21060, section 6).
// A head's state h stays in the cache while the chunks of a segment are computed. The state is transposed to [size,
// width], so that all products of a chunk have the head's width as their columns: y = exp(a)·C·h + M·x, h ←
// exp(a_end)·h + Bᵀ·x.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "conv1d/packed.h"
#include "runtime/cpp/numbers.h"
#include "runtime/cpp/parallel.h"
#include "runtime/cpp/products/tile.h"
#include "runtime/cpp/transpose.h"
#include "runtime/cpu_graph/call.h"

namespace {

using namespace baton;

struct Shape {
    int64_t heads, width, groups, norm_groups, size, kernel;

    int64_t inner() const { return heads * width; }
    int64_t channels() const { return inner() + 2 * groups * size; }
    int64_t columns() const { return round_up(width); }
};

// A mixer's constants, prepared at load, all float32.
struct Constants {
    const float *taps;  // [kernel, channels]
    const float *conv_bias;  // [channels] or null
    const float *A, *D, *dt_bias;  // [heads]
    const float *norm;  // [inner] or null
    float dt_min, dt_max, eps;
    bool norm_first;  // The norm comes before the gate.
};

struct Pools {
    float *conv;  // [slots, kernel - 1, channels]
    int state_type;
    void *state;  // [slots, heads, width, size]
    int64_t conv_stride, state_stride;
};

// Scratch buffers that are in use at the same time. The first five belong to the calling thread, and all threads read
// and write them.
enum Buffer { SHARED_DT, SHARED_C, SHARED_B, SHARED_SCORES, SHARED_GATED, ROWS_OF_B, HEAD, MIXED, OPERANDS };

// Intermediate results that several threads read: what the heads of a group share, and the inputs of the norm.
struct Shared {
    float *dt;  // [heads, T]
    float *C;  // [groups, T, padded size]
    float *B;  // [groups, chunk, size, padded tokens]: transposed
    float *left_C, *left_B;  // [groups, chunk, left_size]: C and B as operands
    float *scores;  // [groups, chunk, tokens, padded tokens]: C·Bᵀ
    float *gated;  // [T, inner]; before the gate if norm_first
};

template <class Activation> class Prefill {
public:
    Prefill(const Shape &shape, const Constants &constants, const Plan &plan, const Pools &pools,
            const Activation *projected, int64_t stride, Activation *y)
        : shape(shape), constants(constants), plan(plan), pools(pools), projected(projected), stride(stride), y(y),
          longest(plan.longest()), convolve{plan,           shape.kernel,        shape.channels(),
                                            constants.taps, constants.conv_bias, projected + shape.inner(),
                                            stride,         pools.conv,          pools.conv_stride} {}

    void run() {
        reserve_shared();
        each(plan.chunks, [&](int64_t chunk) { prepare(chunk); });
        // The outer index is the head, the inner one the segment, so that long segments are spread over the threads.
        each(shape.heads * plan.segments, [&](int64_t i) { scan(i / plan.segments, i % plan.segments); });
        each(plan.tokens(), [&](int64_t token) { normalize(token); });
        convolve.save();
    }

private:
    const Shape shape;
    const Constants constants;
    const Plan plan;
    const Pools pools;
    const Activation *const projected;  // [T, inner (gate) + channels + heads (dt)]
    const int64_t stride;
    Activation *const y;  // [T, inner]
    const int64_t longest;
    const Convolution<Activation> convolve;
    Shared shared{};
    using Product = Products<Activation>;

    // Call f(i) for i < n, in parallel.
    template <class F> static void each(int64_t n, F f) {
        parallel_for_with<TileRegisters>(n, 1, [&](TileRegisters &registers, int64_t begin, int64_t end) {
            registers.set_height(TILE_HEIGHT);
            for (int64_t i = begin; i < end; ++i) f(i);
        });
    }

    void reserve_shared() {
        const int64_t tokens = plan.tokens();
        shared.dt = scratch(SHARED_DT, shape.heads * (tokens + LANES));
        const int64_t rows_of_C = shape.groups * tokens * round_up(shape.size), chunks = shape.groups * plan.chunks;
        const int64_t numbers_of_B = shape.groups * padded(plan.chunks) * shape.size;
        shared.C = scratch(SHARED_C, rows_of_C + chunks * Product::left_size(longest, shape.size));
        shared.left_C = shared.C + rows_of_C;
        shared.B = scratch(SHARED_B, numbers_of_B + chunks * Product::left_size(shape.size, longest));
        shared.left_B = shared.B + numbers_of_B;
        shared.scores = scratch(SHARED_SCORES, shape.groups * tokens * longest);
        shared.gated = scratch(SHARED_GATED, tokens * shape.inner());
    }

    // Return where a chunk's tokens begin if the tokens of each chunk are padded to whole vectors.
    int64_t padded(int64_t chunk) const { return plan.starts[chunk] + chunk * (LANES - 1); }
    float *dt_of(int64_t head) const { return shared.dt + head * (plan.tokens() + LANES); }
    float *C_of(int64_t group, int64_t chunk) const {
        return shared.C + (group * plan.tokens() + plan.starts[chunk]) * round_up(shape.size);
    }
    float *B_of(int64_t group, int64_t chunk) const {
        return shared.B + (group * padded(plan.chunks) + padded(chunk)) * shape.size;
    }
    float *scores_of(int64_t group, int64_t chunk) const {
        return shared.scores + (group * plan.tokens() + plan.starts[chunk]) * longest;
    }
    float *left_C_of(int64_t group, int64_t chunk) const {
        return shared.left_C + (group * plan.chunks + chunk) * Product::left_size(longest, shape.size);
    }
    float *left_B_of(int64_t group, int64_t chunk) const {
        return shared.left_B + (group * plan.chunks + chunk) * Product::left_size(shape.size, longest);
    }
    // Return this thread's memory for a right operand, up to [max(size, longest), max(longest, columns)], and for a left
    // one, [longest, longest].
    float *right_operand() const { return scratch(OPERANDS, right_size() + Product::left_size(longest, longest)); }
    float *left_operand() const { return right_operand() + right_size(); }
    int64_t right_size() const {
        const int64_t inputs = std::max(shape.size, longest);
        return Product::right_size(inputs, std::max(longest, shape.columns()));
    }
    int64_t segment_of(int64_t chunk) const {
        return std::upper_bound(plan.first, plan.first + plan.segments, chunk) - plan.first - 1;
    }

    // Compute dt, B, C and the scores of a chunk.
    void prepare(int64_t chunk) {
        const int64_t length = plan.length(chunk), padded = round_up(length), size = shape.size, wide = round_up(size);
        float *const B = scratch(ROWS_OF_B, padded * wide);
        const int64_t segment = segment_of(chunk);
        time_steps(chunk);
        for (int64_t group = 0; group < shape.groups; ++group) {
            const int64_t channel = shape.inner() + group * size;
            float *const C = C_of(group, chunk), *const B_turned = B_of(group, chunk);
            float *const scores = scores_of(group, chunk);
            convolve(segment, chunk, channel, size, B);
            convolve(segment, chunk, channel + shape.groups * size, size, C);
            std::fill(B + length * wide, B + padded * wide, 0.0f);
            transpose(B, wide, padded, size, B_turned, padded);
            Product::make_left(size, length, {B_turned, padded}, left_B_of(group, chunk));
            const auto left = Product::make_left(length, size, {C, wide}, left_C_of(group, chunk));
            const auto right = Product::make_right(size, padded, {B_turned, padded}, right_operand());
            Product::multiply(length, padded, size, left, right, {}, {scores, padded});
        }
    }

    // Compute softplus(dt + bias), clamped, and store it by head.
    void time_steps(int64_t chunk) {
        const Activation *const from = projected + shape.inner() + shape.channels();
        for (int64_t t = plan.starts[chunk]; t < plan.starts[chunk + 1]; ++t)
            for (int64_t head = 0; head < shape.heads; head += LANES) {
                const int64_t count = std::min<int64_t>(LANES, shape.heads - head);
                floats dt = softplus(load(from + t * stride + head, count) + load(constants.dt_bias + head, count));
                dt = dt < constants.dt_min ? splat(constants.dt_min) : dt;
                dt = dt > constants.dt_max ? splat(constants.dt_max) : dt;
                for (int64_t i = 0; i < count; ++i) dt_of(head + i)[t] = dt[i];
            }
    }

    // Compute all chunks of a segment for one head.
    void scan(int64_t head, int64_t segment) {
        const int64_t columns = shape.columns();
        float *const h = scratch(HEAD, (shape.size + longest) * columns + 2 * longest);
        float *const x = h + shape.size * columns, *const a = x + longest * columns, *const weights = a + longest;
        std::fill(h, h + shape.size * columns, 0.0f);
        with_state(plan.slots[segment], head,
                   [&](auto *state) { transpose(state, shape.size, shape.width, shape.size, h, columns); });
        for (int64_t chunk = plan.first[segment]; chunk < plan.first[segment + 1]; ++chunk) {
            const int64_t length = plan.length(chunk);
            const float *const dt = dt_of(head) + plan.starts[chunk];
            float total = 0;
            for (int64_t i = 0; i < length; ++i) a[i] = total += dt[i] * constants.A[head];
            std::fill(a + length, a + round_up(length), total);
            convolve(segment, chunk, head * shape.width, shape.width, x);
            output(chunk, head, h, x, a);
            for (int64_t i = 0; i < length; i += LANES) put(weights + i, exp(total - load(a + i)) * load(dt + i));
            advance(chunk, head, h, x, weights, exp(splat(total))[0]);
            for (int64_t i = plan.saves[chunk]; i < plan.saves[chunk + 1]; ++i) save(h, plan.saved[i], head);
        }
        save(h, plan.slots[segment], head);
    }

    // Call f with a pointer to a head's state [width, size] in the pool, in the pool's type.
    template <class F> void with_state(int64_t slot, int64_t head, F f) const {
        const int64_t at = slot * pools.state_stride + head * shape.width * shape.size;
        with_type(pools.state_type, [&](auto *type) { f(static_cast<decltype(type)>(pools.state) + at); });
    }

    // Write a head's state to a slot, transposed back.
    void save(const float *h, int64_t slot, int64_t head) const {
        with_state(slot, head,
                   [&](auto *state) { transpose(h, shape.columns(), shape.size, shape.width, state, shape.size); });
    }

    // gated = (exp(a)·C·h + M·x + D·x)·silu(gate), where M[l, s] = scores[l, s]·exp(a_l − a_s)·dt_s for s ≤ l, and a is
    // the running sum of dt·A. If the norm comes before the gate, leave out the factor silu(gate).
    void output(int64_t chunk, int64_t head, const float *h, const float *x, const float *a) const {
        const int64_t length = plan.length(chunk), padded = round_up(length), columns = shape.columns();
        const int64_t wide = round_up(shape.size), group = head / (shape.heads / shape.groups);
        const float *const C = C_of(group, chunk);
        float *const M = scratch(MIXED, longest * (longest + 1 + columns));
        float *const carried = M + padded * padded, *const y = carried + padded;
        mix(length, scores_of(group, chunk), a, dt_of(head) + plan.starts[chunk], M);
        for (int64_t i = 0; i < length; i += LANES) put(carried + i, exp(load(a + i)));
        const auto left_C = Product::left(shape.size, {C, wide}, left_C_of(group, chunk));
        const auto right_h = Product::make_right(shape.size, columns, {h, columns}, right_operand());
        Product::multiply(length, columns, shape.size, left_C, right_h, {}, {y, columns});
        const auto left_M = Product::make_left(length, length, {M, padded}, left_operand());
        const auto right_x = Product::make_right(length, columns, {x, columns}, right_operand());
        Product::multiply_lower(length, columns, left_M, right_x, {carried, 1}, {y, columns});
        for (int64_t i = 0; i < length; ++i) gate(plan.starts[chunk] + i, head, y + i * columns, x + i * columns);
    }

    // Compute the matrix M that output() describes, with zeros after the diagonal.
    void mix(int64_t length, const float *scores, const float *a, const float *dt, float *M) const {
        const int64_t padded = round_up(length);
        for (int64_t l = 0; l < length; ++l) {
            float *const row = M + l * padded;
            for (int64_t s = 0; s <= l; s += LANES)
                put(row + s, load(scores + l * padded + s) * exp(a[l] - load(a + s)) * load(dt + s));
            std::fill(row + l + 1, row + padded, 0.0f);
        }
    }

    // Write gated = (y + D·x)·silu(gate) of a token, or y + D·x if the norm comes before the gate.
    void gate(int64_t token, int64_t head, const float *y, const float *x) const {
        const Activation *const z = projected + token * stride + head * shape.width;
        float *const to = shared.gated + token * shape.inner() + head * shape.width;
        for (int64_t c = 0; c < shape.width; c += LANES) {
            const int64_t count = shape.width - c;
            const floats value = load(y + c) + constants.D[head] * load(x + c);
            put(to + c, constants.norm_first ? value : value * silu(load(z + c, count)), count);
        }
    }

    // h ← decay·h + Bᵀ·(weights·x). x is multiplied with the weights in place.
    void advance(int64_t chunk, int64_t head, float *h, float *x, const float *weights, float decay) const {
        const int64_t length = plan.length(chunk), columns = shape.columns();
        const int64_t group = head / (shape.heads / shape.groups);
        const float *const B = B_of(group, chunk);
        for (int64_t i = 0; i < length; ++i)
            for (int64_t c = i * columns; c < (i + 1) * columns; c += LANES) put(x + c, load(x + c) * weights[i]);
        const int64_t padded = round_up(length);
        const auto left_B = Product::left(length, {B, padded}, left_B_of(group, chunk));
        const auto right = Product::make_right(length, columns, {x, columns}, right_operand());
        Product::multiply(shape.size, columns, length, left_B, right, {&decay, 0}, {h, columns});
    }

    // y = norm·gated / rms(gated) for each group of channels, then times silu(gate) if the norm comes before the gate.
    void normalize(int64_t token) const {
        if (!constants.norm) return copy(token);
        const Activation *const z = projected + token * stride;
        const int64_t count = shape.inner() / shape.norm_groups;
        for (int64_t begin = 0; begin < shape.inner(); begin += count) {
            const float *const from = shared.gated + token * shape.inner() + begin;
            Activation *const to = y + token * shape.inner() + begin;
            floats squares{};
            for (int64_t c = 0; c < count; c += LANES) {
                const floats x = load(from + c, count - c);
                squares += x * x;
            }
            const float scale = 1 / std::sqrt(sum(squares) / count + constants.eps);
            for (int64_t c = 0; c < count; c += LANES) {
                const floats normed = load(from + c, count - c) * scale * load(constants.norm + begin + c, count - c);
                put(to + c, constants.norm_first ? normed * silu(load(z + begin + c, count - c)) : normed, count - c);
            }
        }
    }

    // Write `gated` to y unchanged: there is no norm.
    void copy(int64_t token) const {
        const int64_t inner = shape.inner(), at = token * inner;
        for (int64_t c = 0; c < inner; c += LANES) put(y + at + c, load(shared.gated + at + c, inner - c), inner - c);
    }
};

}  // namespace

// Compute reference.mixer_prefill. Dtypes are numbered as in numbers.h; strides are between rows or slots, in elements.
// projected: [T, inner + channels + heads], rows `stride` apart, and y: [T, inner], of dtype `type`.
// state_type: dtype of the states.
// conv_bias and norm may be null. norm_first: the norm comes before the gate.
// slots, first, starts, saves, saved: see Plan in conv1d/packed.h.
extern "C" void baton_mixer_prefill(int type, const void *projected, int64_t stride, const float *taps,
                                    const float *conv_bias, const float *A, const float *D, const float *dt_bias,
                                    const float *norm, float dt_min, float dt_max, float eps, int norm_first,
                                    float *conv_pool, int64_t conv_stride, int state_type, void *state_pool,
                                    int64_t state_stride, int64_t segments, int64_t chunks, const int64_t *slots,
                                    const int64_t *first, const int64_t *starts, const int64_t *saves,
                                    const int64_t *saved, void *y, int64_t heads, int64_t width, int64_t groups,
                                    int64_t norm_groups, int64_t size, int64_t kernel) {
    with_type(type, [&](auto *activation) {
        using Activation = std::remove_pointer_t<decltype(activation)>;
        Prefill<Activation>({heads, width, groups, norm_groups, size, kernel},
                            {taps, conv_bias, A, D, dt_bias, norm, dt_min, dt_max, eps, norm && norm_first},
                            {segments, chunks, slots, first, starts, saves, saved},
                            {conv_pool, state_type, state_pool, conv_stride, state_stride},
                            static_cast<const Activation *>(projected), stride, static_cast<Activation *>(y))
            .run();
    });
}

BATON_RECORDABLE(baton_mixer_prefill)
