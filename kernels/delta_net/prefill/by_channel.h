// The delta rule with one decay per channel of the keys, as in Kimi Delta Attention, computed in blocks of 16 tokens.
// S [size, width] is the state before a block, and P[i] the product of the decays of the block's tokens up to i. U is
// what the block adds for each key.
// Solve (I + A)·U = β·(V − (P ⊙ K)·S). Below the diagonal, A[i, j] = β_i·Σ_d K[i]·K[j]·(decays of tokens j + 1 to i).
// All decays are products of numbers up to 1, so nothing overflows. K[j] is multiplied with the decays of the later
// tokens one by one; at the end of the block the result is the key with which U[j] is added to the state.
#pragma once

#include "delta_net/rule/decay.h"
#include "net.h"

namespace {

// One head's keys, queries and decays [tokens, wide], values [tokens, columns] (later U), and β [tokens].
struct Tokens {
    float *keys, *queries, *decays, *values, *beta;

    // Return the pointers, advanced past the first `token` tokens.
    Tokens from(int64_t token, int64_t wide, int64_t columns) const {
        const int64_t at = token * wide;
        return {keys + at, queries + at, decays + at, values + token * columns, beta + token};
    }
};

template <class T> class ByChannel : public Net<T, ByChannel<T>> {
    using Base = Net<T, ByChannel<T>>;
    using Base::constants, Base::inputs, Base::plan, Base::shape;
    friend Base;

    static constexpr int64_t BLOCK = 16;
    enum Buffer { STATES, TOKENS, CARRIED, LEFT, TURNED, SCORES, PRODUCTS };

public:
    using Base::Base;

private:
    static floats gated(floats z) { return sigmoid(z); }

    // Compute a chunk's keys and queries, and reserve memory for its decays, values and β.
    Tokens prepare(int64_t segment, int64_t chunk, int64_t key_head) const {
        const int64_t length = plan.length(chunk), wide = shape.wide(), columns = shape.columns();
        float *const keys = scratch(TOKENS, length * (3 * wide + columns + 1)), *const queries = keys + length * wide;
        float *const decays = queries + length * wide, *const values = decays + length * wide;
        this->keys_and_queries(segment, chunk, key_head, keys);
        return {keys, queries, decays, values, values + length * columns};
    }

    // Compute a chunk of one head: write its outputs, and advance its state h [size, columns].
    void advance(int64_t segment, int64_t chunk, int64_t head, const Tokens &t, float *h) const {
        const int64_t length = plan.length(chunk), wide = shape.wide(), key = head * shape.size;
        this->values(segment, chunk, head, t.values);
        for (int64_t i = 0; i < length; ++i) {
            const int64_t token = plan.starts[chunk] + i;
            decay(inputs.forget.row(token) + key, constants.dt_bias + key, constants.A[head], t.decays + i * wide);
            t.beta[i] = constants.beta_scale * sigmoid(to_float(inputs.betas.row(token)[head]));
        }
        for (int64_t at = 0; at < length; at += BLOCK)
            advance_block(plan.starts[chunk] + at, std::min(BLOCK, length - at), head,
                          t.from(at, wide, shape.columns()), h);
    }

    // Write a token's decays to `to`: [size].
    void decay(const T *f, const float *dt_bias, float A, float *to) const {
        for (int64_t i = 0; i < shape.size; i += LANES) {
            const int64_t count = shape.size - i;
            const floats x = load(f + i, count) + load(dt_bias + i, count);
            put(to + i, exp(log_decays(x, A, constants.lower_bound)));
        }
    }

    // Compute a block of one head, tokens [token, token + length): write its outputs, and advance its state h.
    void advance_block(int64_t token, int64_t length, int64_t head, const Tokens &t, float *h) const {
        const int64_t wide = shape.wide(), columns = shape.columns();
        float *const carried = scratch(CARRIED, (2 * BLOCK + 1) * wide), *const all = carried + 2 * BLOCK * wide;
        float *const left = scratch(LEFT, BLOCK * wide), *const turned = scratch(TURNED, shape.size * BLOCK);
        float *const A = scratch(SCORES, 2 * BLOCK * BLOCK), *const mixed = A + BLOCK * BLOCK;
        float *const recalled = scratch(PRODUCTS, 2 * BLOCK * columns), *const outputs = recalled + length * columns;
        const float one = 1;
        carry(t, length, carried, all);
        relate(t, length, left, A, mixed);
        multiply<float>(2 * length, columns, shape.size, {carried, wide}, {h, columns}, {}, {recalled, columns});
        solve(t, length, A, recalled);
        multiply<float>(length, columns, length, {mixed, BLOCK}, {t.values, columns}, {&one, 0}, {outputs, columns});
        for (int64_t i = 0; i < length; ++i) {
            const float *const o = outputs + i * columns;
            this->output(token + i, head, o, dot(o, o, shape.width));
        }
        transpose(left, wide, length, shape.size, turned, BLOCK);
        multiply<float>(shape.size, columns, length, {turned, BLOCK}, {t.values, columns}, {all, 1}, {h, columns});
    }

    // Multiply keys and queries with P, the decays from the block's beginning: write P ⊙ K and then P ⊙ Q to `to`
    // [2·length, wide], and the decays over the whole block to `all` [wide].
    void carry(const Tokens &t, int64_t length, float *to, float *all) const {
        const int64_t wide = shape.wide();
        for (int64_t c = 0; c < wide; c += LANES) {
            floats decay = splat(1);
            for (int64_t i = 0, at = c; i < length; ++i, at += wide) {
                decay *= load(t.decays + at);
                put(to + at, load(t.keys + at) * decay);
                put(to + length * wide + at, load(t.queries + at) * decay);
            }
            put(all + c, decay);
        }
    }

    // Relate each key to the tokens after it.
    // left [length, wide]: each key multiplied with the decays of all tokens after it.
    // A [length, BLOCK]: the products of later keys (rows) with earlier ones (columns) and the decays between
    //     them, not yet multiplied with β; only written below the diagonal.
    // mixed [length, BLOCK]: the products of queries (rows) with keys up to their own token and the decays between
    // them; 0 elsewhere.
    void relate(const Tokens &t, int64_t length, float *left, float *A, float *mixed) const {
        const int64_t wide = shape.wide();
        std::fill(mixed, mixed + BLOCK * BLOCK, 0.0f);
        std::copy(t.keys, t.keys + length * wide, left);
        for (int64_t j = 0; j < length; ++j) {
            float *const key = left + j * wide;
            mixed[j * BLOCK + j] = dot(t.queries + j * wide, key, wide);
            for (int64_t i = j + 1; i < length; ++i) {
                floats with_key{}, with_query{};
                for (int64_t c = 0, at = i * wide; c < wide; c += LANES, at += LANES) {
                    const floats decayed = load(key + c) * load(t.decays + at);
                    put(key + c, decayed);
                    with_key += decayed * load(t.keys + at);
                    with_query += decayed * load(t.queries + at);
                }
                A[i * BLOCK + j] = sum(with_key);
                mixed[i * BLOCK + j] = sum(with_query);
            }
        }
    }

    // Replace the values by U, row by row: β times (the value, minus what the state before the block has stored for the
    // token's key, minus what the block's previous tokens add for that key).
    void solve(const Tokens &t, int64_t length, const float *A, const float *recalled) const {
        const int64_t columns = shape.columns();
        for (int64_t c = 0; c < columns; c += LANES)
            for (int64_t i = 0; i < length; ++i) {
                floats wanted = load(t.values + i * columns + c) - load(recalled + i * columns + c);
                for (int64_t j = 0; j < i; ++j) wanted -= A[i * BLOCK + j] * load(t.values + j * columns + c);
                put(t.values + i * columns + c, t.beta[i] * wanted);
            }
    }
};

}  // namespace
