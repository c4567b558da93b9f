// The draw of tokens from logits, as reference.py defines it. The caller computes the exponentials with torch, because
// torch's exponentials define the weights. Weights are integers, so a draw does not depend on the order of additions.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>

#include "runtime/cpp/numbers.h"
#include "runtime/cpp/parallel.h"
#include "runtime/cpu_graph/call.h"

namespace {

using namespace baton;

constexpr int64_t BLOCK = 128;  // Tokens per block. A stored maximum or sum lets a search skip a block.
constexpr float WEIGHT_OF_ONE = 1099511627776.0f;  // 2^40
// Bits of a digit in the radix select of Row::reach.
constexpr int BITS = 11, BUCKETS = 1 << BITS;
typedef int64_t whole __attribute__((vector_size(8 * LANES)));

enum Buffer { MAXIMA, IDS, AMOUNTS, SUMS };

int64_t blocks(int64_t count) { return (count + BLOCK - 1) / BLOCK; }

// Return the greatest of some numbers; a NaN if one of them is.
float greatest(const float *x, int64_t count) {
    floats most = splat(x[0]), odd{};
    float rest = x[0], fault = 0.0f;
    over(count, [&](int64_t i, auto v) {
        const auto now = get<decltype(v)>(x + i);
        if constexpr (sizeof(v) == sizeof(floats)) {
            most = now > most ? now : most;
            odd = now != now ? now : odd;
        } else {
            rest = std::max(rest, now);
            fault = now != now ? now : fault;
        }
    });
    for (int lane = 0; lane < LANES; ++lane) {
        rest = std::max(rest, most[lane]);
        fault = odd[lane] != odd[lane] ? odd[lane] : fault;
    }
    return fault != fault ? fault : rest;
}

// Find the greatest number of each block.
void find_maxima(const float *x, int64_t count, float *maxima) {
    for (int64_t block = 0; block < blocks(count); ++block)
        maxima[block] = greatest(x + block * BLOCK, std::min(BLOCK, count - block * BLOCK));
}

// Return the index of the greatest number, the lowest on a tie; the first NaN's index if there is one.
int64_t find_greatest(const float *x, int64_t count) {
    float *const maxima = scratch(MAXIMA, blocks(count));
    find_maxima(x, count, maxima);
    const auto better = [](float a, float b) { return b == b && (a > b || a != a); };
    int64_t best = 0;
    for (int64_t block = 1; block < blocks(count); ++block)
        if (better(maxima[block], maxima[best])) best = block;
    int64_t found = best * BLOCK;
    for (int64_t i = found + 1; i < std::min(found + BLOCK, count); ++i)
        if (better(x[i], x[found])) found = i;
    return found;
}

// A random number in [0, 1) from SplitMix64, as reference.uniform computes it.
double uniform(int64_t seed, int64_t position) {
    constexpr uint64_t GAMMA = 0x9E3779B97F4A7C15;
    const auto mix = [](uint64_t x) {
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
        return x ^ (x >> 31);
    };
    const uint64_t bits = mix(mix(static_cast<uint64_t>(seed) + GAMMA) + (static_cast<uint64_t>(position) + 1) * GAMMA);
    return static_cast<double>(bits >> 11) * 0x1p-53;
}

// The weight of an exponential in [0, 1], in units of 2^-40.
int64_t weight(float x) { return static_cast<int64_t>(x * WEIGHT_OF_ONE); }

// A number that is ordered like the logit; the same for 0 and -0. Not for NaN.
uint32_t key(float logit) {
    const float x = logit + 0.0f;
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The last token that top_k and top_p keep, in the order of (logit descending, id ascending).
struct Cut {
    float logit;
    int64_t id;

    bool keeps(float x, int64_t i) const { return x > logit || (x == logit && i <= id); }
};

// One row of logits. exps: e^((logit - greatest) / temperature).
struct Row {
    const float *logits, *exps;
    int64_t vocab;

    // Return the sum of all weights.
    int64_t mass() const {
        whole sum{};
        int64_t rest = 0;
        over(vocab, [&](int64_t i, auto v) {
            if constexpr (sizeof(v) == sizeof(floats))
                sum += __builtin_convertvector(load(exps + i) * WEIGHT_OF_ONE, whole);
            else
                rest += weight(exps[i]);
        });
        for (int lane = 0; lane < LANES; ++lane) rest += sum[lane];
        return rest;
    }

    // Write the ids with from[id] >= bound to `ids`, in ascending order, and return their number. Branch-free: each id
    // is written, and kept only if the count advances.
    int64_t collect(const float *from, float bound, int32_t *ids) const {
        int64_t count = 0;
        for (int64_t i = 0; i < vocab; ++i) {
            ids[count] = static_cast<int32_t>(i);
            count += from[i] >= bound;
        }
        return count;
    }

    // Return a bound that at least `wanted` logits reach: the blocks' maximum of rank `wanted`.
    float bound_of(int64_t wanted) const {
        if (wanted > blocks(vocab)) return -INFINITY;
        float *const maxima = scratch(MAXIMA, blocks(vocab));
        find_maxima(logits, vocab, maxima);
        std::nth_element(maxima, maxima + wanted - 1, maxima + blocks(vocab), [](float a, float b) { return a > b; });
        return maxima[wanted - 1];
    }

    // Add up amount(id) in the order of rank, and return the id at which the sum reaches `bound`, as a Cut. The sum
    // over all ids must reach it. This is a radix select: for each digit of the keys, from the highest down, sum the
    // amounts per value of the digit, and continue with the ids of the value in which the bound is reached. `ids` is
    // overwritten.
    template <class F> Cut reach(int32_t *ids, int64_t count, int64_t bound, F amount) const {
        int64_t *const amounts = reinterpret_cast<int64_t *>(scratch(AMOUNTS, 2 * BUCKETS));
        for (int shift = 32 - BITS; shift > -BITS; shift -= BITS) {
            const auto digit = [&](int32_t id) {
                return key(logits[id]) >> std::max(shift, 0) & (shift < 0 ? BUCKETS / 2 - 1 : BUCKETS - 1);
            };
            std::fill(amounts, amounts + BUCKETS, 0);
            for (int64_t i = 0; i < count; ++i) amounts[digit(ids[i])] += amount(ids[i]);
            uint32_t at = BUCKETS - 1;
            for (; amounts[at] < bound && at > 0; --at) bound -= amounts[at];
            int64_t left = 0;
            for (int64_t i = 0; i < count; ++i)
                if (digit(ids[i]) == at) ids[left++] = ids[i];
            count = left;
        }
        int64_t last = 0;
        for (; last + 1 < count && amount(ids[last]) < bound; ++last) bound -= amount(ids[last]);
        return {logits[ids[last]], ids[last]};
    }

    // Return the cut of top_k (0: all tokens) and top_p. mass: the sum of all weights, if top_k does not limit.
    Cut cut(int64_t top_k, float top_p, int64_t mass) const {
        int32_t *const ids = reinterpret_cast<int32_t *>(scratch(IDS, 2 * (vocab + 1))), *const kept = ids + vocab + 1;
        const auto of = [this](int32_t id) { return weight(exps[id]); };
        const bool limited = top_k > 0 && top_k < vocab;
        Cut cut{-INFINITY, vocab};
        int64_t count = 0;
        if (limited) {
            count = collect(logits, bound_of(top_k), ids);
            std::copy(ids, ids + count, kept);
            cut = reach(kept, count, top_k, [](int32_t) { return int64_t{1}; });
            count = std::remove_if(ids, ids + count, [&](int32_t id) { return !cut.keeps(logits[id], id); }) - ids;
            mass = 0;
            for (int64_t i = 0; i < count; ++i) mass += of(ids[i]);
        }
        if (top_p >= 1.0f) return cut;
        const double part = static_cast<double>(top_p) * static_cast<double>(mass);
        const int64_t bound = std::max<int64_t>(1, std::min(static_cast<int64_t>(part), mass));
        // Tokens that are lighter than (mass - bound) / vocab weigh less than mass - bound together, so the bound is
        // reached without them. 0.999 covers the rounding of the quotient.
        if (!limited) count = collect(exps, static_cast<float>((mass - bound) / vocab) / WEIGHT_OF_ONE * 0.999f, ids);
        return reach(ids, count, bound, of);
    }

    // Return the first id at which the cumulative weight of the remaining tokens exceeds uniform · total. least: the
    // least weight that min_p keeps.
    int64_t draw(const Cut &cut, int64_t least, double uniform) const {
        const auto kept = [&](int64_t i) {
            const int64_t w = weight(exps[i]);
            return w >= least && cut.keeps(logits[i], i) ? w : 0;
        };
        int64_t *const sums = reinterpret_cast<int64_t *>(scratch(SUMS, 2 * blocks(vocab)));
        int64_t total = 0;
        for (int64_t block = 0; block < blocks(vocab); ++block) {
            int64_t sum = 0;
            for (int64_t i = block * BLOCK; i < std::min(block * BLOCK + BLOCK, vocab); ++i) sum += kept(i);
            total += sums[block] = sum;
        }
        int64_t target = static_cast<int64_t>(uniform * static_cast<double>(total)), block = 0;
        for (; block + 1 < blocks(vocab) && sums[block] <= target; ++block) target -= sums[block];
        int64_t id = block * BLOCK;
        for (; id + 1 < vocab && kept(id) <= target; ++id) target -= kept(id);
        return id;
    }
};

}  // namespace

// Find the greatest logit of each row.
// logits: float32 [rows, vocab], rows `stride` elements apart.
// best: [rows], that logit's id, the lowest on a tie; the id of the first NaN if there is one.
// greatest: [rows], that logit. finite: [rows], whether it is finite.
extern "C" void baton_arg_max(const float *logits, int64_t stride, int64_t rows, int64_t vocab, int64_t *best,
                              float *greatest, bool *finite) {
    parallel_for(rows, [=](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            best[row] = find_greatest(logits + row * stride, vocab);
            greatest[row] = logits[row * stride + best[row]];
            finite[row] = std::abs(greatest[row]) <= FLT_MAX;
        }
    });
}

// scaled [count, vocab] = (logit - greatest) / temperature of the rows `chosen`, [count].
extern "C" void baton_scale_logits(const float *logits, int64_t stride, int64_t vocab, const int64_t *chosen,
                                   int64_t count, const float *greatest, const float *temperature, float *scaled) {
    parallel_for(count, [=](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const int64_t row = chosen[i];
            const float *const from = logits + row * stride;
            float *const to = scaled + i * vocab, most = greatest[row], heat = temperature[row];
            over(vocab, [=](int64_t at, auto v) { put(to + at, (get<decltype(v)>(from + at) - most) / heat); });
        }
    });
}

// Draw tokens[row] for the rows `chosen`, [count], whose greatest logits are finite.
// exps: [count, vocab], e^scaled. Other parameters: one for each row, as in reference.SamplingTensors.
extern "C" void baton_draw(const float *logits, int64_t stride, int64_t vocab, const int64_t *chosen, int64_t count,
                           const float *exps, const int64_t *top_k, const float *top_p, const float *min_p,
                           const int64_t *seed, const int64_t *position, int64_t *tokens) {
    parallel_for(count, [=](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const int64_t row = chosen[i];
            const Row drawn{logits + row * stride, exps + i * vocab, vocab};
            const bool limited = top_k[row] > 0 && top_k[row] < vocab, nucleus = top_p[row] < 1.0f;
            Cut cut{-INFINITY, vocab};
            if (limited || nucleus) cut = drawn.cut(top_k[row], top_p[row], limited ? 0 : drawn.mass());
            const auto least = static_cast<int64_t>(static_cast<double>(min_p[row]) * WEIGHT_OF_ONE);
            tokens[row] = drawn.draw(cut, least, uniform(seed[row], position[row]));
        }
    });
}

// logits [count] = outputs [count] · multiplier. Denormals may become 0.
extern "C" void baton_widen_logits(const bfloat16 *outputs, int64_t count, float multiplier, float *logits) {
    parallel_for(count, 65536, [=](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i += LANES)
            put(logits + i, load(outputs + i, end - i) * multiplier, end - i);
    });
}

BATON_RECORDABLE(baton_widen_logits)
BATON_RECORDABLE(baton_arg_max)
BATON_RECORDABLE(baton_scale_logits)
BATON_RECORDABLE(baton_draw)

// In the rows `chosen`, [count], set the logits of tokens that are not allowed to -infinity. NaN and +infinity stay.
// allowed: [count, width], a bit for each token.
extern "C" void baton_mask_logits(float *logits, int64_t stride, int64_t vocab, const int64_t *chosen, int64_t count,
                                  const uint32_t *allowed, int64_t width) {
    parallel_for(count, [=](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            float *const row = logits + chosen[i] * stride;
            for (int64_t at = 0; at < vocab; at += 32) {
                const uint32_t bits = allowed[i * width + at / 32];
                const int64_t last = std::min<int64_t>(32, vocab - at);
                for (int64_t bit = 0; bit < last; ++bit) {
                    const bool kept = bits >> bit & 1 || !(row[at + bit] < INFINITY);
                    row[at + bit] = kept ? row[at + bit] : -INFINITY;
                }
            }
        }
    });
}

BATON_RECORDABLE(baton_mask_logits)
