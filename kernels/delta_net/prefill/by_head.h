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
    float *left, *right;  // memory for one operand of each side
    float *left_keys, *left_turned;  // keys and queries, and `turned`, as operands
};

template <class T> class ByHead : public Net<T, ByHead<T>> {
    using Base = Net<T, ByHead<T>>;
    using Base::constants, Base::inputs, Base::longest, Base::plan, Base::shape;
    friend Base;

    enum Buffer { STATES, KEYS, KEYS_TURNED, SCORES, GATES, SYSTEM, VALUES, PRODUCTS, OPERANDS };
    using Product = Products<T>;

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
        const int64_t inputs = std::max(shape.size, longest), most = std::max(longest, shape.columns());
        const int64_t right = Product::right_size(inputs, most), left = Product::left_size(longest, longest);
        const int64_t keys = Product::left_size(2 * longest, shape.size);
        c.right = scratch(OPERANDS, right + left + keys + Product::left_size(shape.size, longest));
        c.left = c.right + right, c.left_keys = c.left + left, c.left_turned = c.left_keys + keys;
        return c;
    }

    // Compute a chunk's keys, queries and their scores, which the heads of a key head share.
    Chunk prepare(int64_t segment, int64_t chunk, int64_t key_head) const {
        const Chunk c = buffers(plan.length(chunk));
        const int64_t length = c.length, wide = shape.wide();
        this->keys_and_queries(segment, chunk, key_head, c.keys);
        std::fill(c.turned, c.turned + shape.size * c.padded, 0.0f);
        transpose(c.keys, wide, length, shape.size, c.turned, c.padded);
        Product::make_left(shape.size, length, {c.turned, c.padded}, c.left_turned);
        const auto keys = Product::make_left(2 * length, shape.size, {c.keys, wide}, c.left_keys);
        const auto turned = Product::make_right(shape.size, c.padded, {c.turned, c.padded}, c.right);
        Product::multiply(2 * length, c.padded, shape.size, keys, turned, {}, {c.scores, c.padded});
        return c;
    }

    // Compute a chunk of one head: write its outputs, and advance its state h [size, columns].
    void advance(int64_t segment, int64_t chunk, int64_t head, const Chunk &c, float *h) const {
        const int64_t length = c.length, padded = c.padded, columns = shape.columns();
        float *const U = c.values, *const recalled = c.products, *const outputs = recalled + length * columns;
        gates(chunk, head, c);
        decays(c);
        this->values(segment, chunk, head, U);
        const auto keys = Product::left(shape.size, {c.keys, shape.wide()}, c.left_keys);
        const auto state = Product::make_right(shape.size, columns, {h, columns}, c.right);
        Product::multiply(2 * length, columns, shape.size, keys, state, {}, {recalled, columns});
        for (int64_t i = 0; i < length; ++i)
            for (int64_t at = i * columns; at < (i + 1) * columns; at += LANES)
                put(U + at, c.beta[i] * (load(U + at) - c.carried[i] * load(recalled + at)));
        const auto solved = solve(c, columns);
        const auto mixed = Product::make_left(length, length, {c.mixed, padded}, c.left);
        Product::multiply_lower(length, columns, mixed, solved, {c.carried, 1}, {outputs, columns});
        for (int64_t i = 0; i < length; ++i) {
            const float *const o = outputs + i * columns;
            this->output(plan.starts[chunk] + i, head, o, dot(o, o, columns));  // Columns from `width` on are 0.
        }
        for (int64_t i = 0; i < length; ++i)
            for (int64_t at = i * columns; at < (i + 1) * columns; at += LANES)
                put(U + at, load(U + at) * c.remaining[i]);
        const auto turned = Product::left(length, {c.turned, padded}, c.left_turned);
        const auto remaining = Product::make_right(length, columns, {U, columns}, c.right);
        Product::multiply(shape.size, columns, length, turned, remaining, {c.carried + length - 1, 0}, {h, columns});
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
            put(c.beta + i, constants.beta_scale / (1.0f + exp(-load(c.beta + i))));
            put(c.sums + i, softplus(load(c.sums + i)) * constants.A[head]);
        }
        for (int64_t i = 1; i < c.length; ++i) c.sums[i] += c.sums[i - 1];
        for (int64_t i = 0; i < c.padded; i += LANES) {
            put(c.carried + i, exp(load(c.sums + i)));
            put(c.remaining + i, exp(c.sums[c.length - 1] - load(c.sums + i)));
        }
    }

    // Compute −A and the queries' scores multiplied with their decays, with zeros after the diagonal.
    void decays(const Chunk &c) const {
        const int64_t padded = c.padded;
        for (int64_t l = 0; l < c.length; ++l) {
            const float *const of_keys = c.scores + l * padded, *const of_queries = of_keys + c.length * padded;
            float *const system = c.system + l * padded, *const mixed = c.mixed + l * padded;
            for (int64_t s = 0; s <= l; s += LANES) {
                const floats decay = exp(c.sums[l] - load(c.sums + s));
                put(system + s, load(of_keys + s) * decay * -c.beta[l]);
                put(mixed + s, load(of_queries + s) * decay);
            }
            std::fill(system + l + 1, system + padded, 0.0f);
            std::fill(mixed + l + 1, mixed + padded, 0.0f);
        }
    }

    // Replace U by (I + A)⁻¹·U, a block of rows at a time: first what all previous rows contribute, as one product, then
    // what the rows of the block contribute to each other. Return U as the right side of a product.
    typename Product::Right solve(const Chunk &c, int64_t columns) const {
        const Matrix<float> U{c.values, columns};
        const auto system = Product::make_left(c.length, c.length, {c.system, c.padded}, c.left);
        const auto solved = Product::empty_right(c.length, columns, {U.at, U.stride}, c.right);
        for (int64_t row = 0; row < c.length; row += Product::BLOCK) {
            const int64_t end = std::min(row + Product::BLOCK, c.length);
            Product::add_lower(row, end, columns, system, solved, U);
            for (int64_t at = 0; at < columns; at += LANES)
                if (end == row + Product::BLOCK)
                    solve_block(c.system + row * c.padded + row, c.padded, c.values + row * columns + at, columns);
                else
                    solve_rows(c.system + row * c.padded + row, c.padded, c.values + row * columns + at, columns,
                               end - row);
            Product::put_right(row, end, columns, {U.at, U.stride}, solved);
        }
        return solved;
    }

    // Add to each of a block's rows its multiples of the rows before it, for LANES columns.
    static void solve_block(const float *system, int64_t padded, float *values, int64_t columns) {
        constexpr int ROWS = Product::BLOCK;
        floats rows[ROWS];
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; i++) {
            rows[i] = load(values + i * columns);
#pragma GCC unroll 16
            for (int j = 0; j < i; j++) rows[i] += system[i * padded + j] * rows[j];
            put(values + i * columns, rows[i]);
        }
    }

    static void solve_rows(const float *system, int64_t padded, float *values, int64_t columns, int64_t count) {
        for (int64_t i = 1; i < count; i++) {
            floats row = load(values + i * columns);
            for (int64_t j = 0; j < i; j++) row += system[i * padded + j] * load(values + j * columns);
            put(values + i * columns, row);
        }
    }
};

}  // namespace
