// The delta rule with one decay per head, as in gated delta nets: the chunked form of Yang, Kautz and Hatamizadeh
// (2024, arXiv:2412.06464, section 3.3) without its intermediate W.
// γ is the running sum of the log decays g in a chunk, and S [size, width] the state before the chunk. A chunk is
// computed in three steps:
//   Solve (I + A)·U = β·(V − e^γ·K·S) row by row, with A[i, j] = β_i·(K·Kᵀ)[i, j]·e^(γ_i − γ_j) below the diagonal.
//   O = e^γ·Q·S + (Q·Kᵀ ⊙ e^(γ_i − γ_j))·U
//   S ← e^γ_end·S + Kᵀ·e^(γ_end − γ)·U
#pragma once

#include "net.h"

namespace {

// One thread's buffers for a chunk of `length` tokens; `padded` is `length` rounded up to whole vectors.
struct Chunk {
    int64_t length, padded;
    // Buffers that the heads of a key head share:
    float *keys;  // [2·length, wide]: keys, then queries
    float *turned;  // [size, padded]: keys, transposed
    float *scores;  // [2·length, padded]: products of keys, and then of queries, with the keys
    // Buffers that each head overwrites:
    float *sums, *carried, *remaining, *beta;  // [padded] each: γ, e^γ, e^(γ_end − γ), β
    float *system, *mixed;  // [length, padded] each: −A, and Q·Kᵀ ⊙ e^(γ_i − γ_j)
    float *values;  // [length, columns]: V, then U
    float *products;  // [2·length, columns]: products of keys, and then of queries, with the state
};

template <class T> class ByHead : public Net<T, ByHead<T>> {
    using Base = Net<T, ByHead<T>>;
    using Base::constants, Base::inputs, Base::longest, Base::plan, Base::shape;
    friend Base;

    enum Buffer { STATES, KEYS, KEYS_TURNED, SCORES, GATES, SYSTEM, VALUES, PRODUCTS };

public:
    using Base::Base;

private:
    static floats gated(floats z) { return silu(z); }

    // Return scratch memory for a chunk. Buffers are as large as the longest chunk needs, so that they are allocated
    // once.
    Chunk buffers(int64_t length) const {
        const int64_t padded = round_up(length);
        Chunk c{};
        c.length = length, c.padded = padded;
        c.keys = scratch(KEYS, 2 * longest * shape.wide());
        c.turned = scratch(KEYS_TURNED, longest * shape.size);
        c.scores = scratch(SCORES, 2 * longest * longest);
        c.sums = scratch(GATES, 4 * longest);
        c.carried = c.sums + padded, c.remaining = c.carried + padded, c.beta = c.remaining + padded;
        c.system = scratch(SYSTEM, 2 * longest * longest);
        c.mixed = c.system + length * padded;
        c.values = scratch(VALUES, longest * shape.columns());
        c.products = scratch(PRODUCTS, 2 * longest * shape.columns());
        return c;
    }

    // Compute a chunk's keys, queries and their scores, which the heads of a key head share.
    Chunk prepare(int64_t segment, int64_t chunk, int64_t key_head) const {
        const Chunk c = buffers(plan.length(chunk));
        const int64_t length = c.length, wide = shape.wide();
        this->keys_and_queries(segment, chunk, key_head, c.keys);
        std::fill(c.turned, c.turned + shape.size * c.padded, 0.0f);
        transpose(c.keys, wide, length, shape.size, c.turned, c.padded);
        multiply<float>(2 * length, c.padded, shape.size, {c.keys, wide}, {c.turned, c.padded}, {},
                        {c.scores, c.padded});
        return c;
    }

    // Compute a chunk of one head: write its outputs, and advance its state h [size, columns].
    void advance(int64_t segment, int64_t chunk, int64_t head, const Chunk &c, float *h) const {
        const int64_t length = c.length, padded = c.padded, columns = shape.columns();
        float *const U = c.values, *const recalled = c.products, *const outputs = recalled + length * columns;
        gates(chunk, head, c);
        decays(c);
        this->values(segment, chunk, head, U);
        // Compute as many columns at a time as fit into the L1 cache together with the keys and queries.
        for (int64_t column = 0; column < columns; column += TILE_VECS * LANES)
            multiply<float>(2 * length, std::min<int64_t>(TILE_VECS * LANES, columns - column), shape.size,
                            {c.keys, shape.wide()}, {h + column, columns}, {}, {recalled + column, columns});
        for (int64_t i = 0; i < length; ++i)
            for (int64_t at = i * columns; at < (i + 1) * columns; at += LANES)
                put(U + at, c.beta[i] * (load(U + at) - c.carried[i] * load(recalled + at)));
        solve(c, columns);
        for (int64_t row = 0; row < length; row += TILE_ROWS)
            multiply<float>(std::min<int64_t>(TILE_ROWS, length - row), columns, std::min(row + TILE_ROWS, length),
                            {c.mixed + row * padded, padded}, {U, columns}, {c.carried + row, 1},
                            {outputs + row * columns, columns});
        for (int64_t i = 0; i < length; ++i) {
            const float *const o = outputs + i * columns;
            this->output(plan.starts[chunk] + i, head, o, dot(o, o, columns));  // Columns from `width` on are 0.
        }
        for (int64_t i = 0; i < length; ++i)
            for (int64_t at = i * columns; at < (i + 1) * columns; at += LANES)
                put(U + at, load(U + at) * c.remaining[i]);
        multiply<float>(shape.size, columns, length, {c.turned, padded}, {U, columns}, {c.carried + length - 1, 0},
                        {h, columns});
    }

    // Compute γ, e^γ, e^(γ_end − γ) and β.
    void gates(int64_t chunk, int64_t head, const Chunk &c) const {
        for (int64_t i = 0; i < c.length; ++i) {
            const int64_t token = plan.starts[chunk] + i;
            c.beta[i] = to_float(inputs.betas.row(token)[head]);
            c.sums[i] = to_float(inputs.forget.row(token)[head]) + constants.dt_bias[head];
        }
        std::fill(c.beta + c.length, c.beta + c.padded, 0.0f);
        std::fill(c.sums + c.length, c.sums + c.padded, 0.0f);
        for (int64_t i = 0; i < c.padded; i += LANES) {
            put(c.beta + i, 1.0f / (1.0f + exp(-load(c.beta + i))));
            put(c.sums + i, softplus(load(c.sums + i)) * constants.A[head]);
        }
        for (int64_t i = 1; i < c.length; ++i) c.sums[i] += c.sums[i - 1];
        for (int64_t i = 0; i < c.padded; i += LANES) {
            put(c.carried + i, exp(load(c.sums + i)));
            put(c.remaining + i, exp(c.sums[c.length - 1] - load(c.sums + i)));
        }
    }

    // Compute −A up to the diagonal, and the queries' scores multiplied with their decays. After the diagonal, the
    // entries of these scores that a tile's product reads are set to 0.
    void decays(const Chunk &c) const {
        const int64_t padded = c.padded;
        for (int64_t l = 0; l < c.length; ++l) {
            const float *const of_keys = c.scores + l * padded, *const of_queries = of_keys + c.length * padded;
            float *const row = c.mixed + l * padded;
            for (int64_t s = 0; s <= l; s += LANES) {
                const floats decay = exp(c.sums[l] - load(c.sums + s));
                put(c.system + l * padded + s, load(of_keys + s) * decay * -c.beta[l]);
                put(row + s, load(of_queries + s) * decay);
            }
            std::fill(row + l + 1, row + std::min(padded, l + TILE_ROWS), 0.0f);
        }
    }

    // Replace U by (I + A)⁻¹·U, TILE_ROWS rows at a time: first what all previous rows contribute, as one product, then
    // what the rows of the tile contribute to each other.
    void solve(const Chunk &c, int64_t columns) const {
        const float one = 1.0f;
        for (int64_t row = 0; row < c.length; row += TILE_ROWS) {
            const int64_t end = std::min(row + TILE_ROWS, c.length);
            multiply<float>(end - row, columns, row, {c.system + row * c.padded, c.padded}, {c.values, columns},
                            {&one, 0}, {c.values + row * columns, columns});
            for (int64_t i = row + 1; i < end; ++i)
                for (int64_t j = row; j < i; ++j) {
                    const float by = c.system[i * c.padded + j];
                    for (int64_t at = 0; at < columns; at += LANES) {
                        float *const to = c.values + i * columns + at;
                        put(to, load(to) + by * load(c.values + j * columns + at));
                    }
                }
        }
    }
};

}  // namespace
