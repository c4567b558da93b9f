"""Sampling, defined with a full sort. Rows are independent, and nothing in here waits for the device.

A token is drawn for each row in these steps:
1. weights: w[i] = floor(exp((logit[i] - max) / temperature) · 2**40). They are integers, so that their sums are exact
   in any order of addition.
2. top_k: rank the tokens by (logit descending, id ascending), and drop those of rank >= top_k (ranks begin at 0).
3. top_p: drop a token if the tokens ranked before it already hold top_p of the total weight that step 2 left. The first
   token is never dropped.
4. min_p: drop a token if its weight is below min_p · the largest weight.
5. draw: invert the cumulative distribution of the remaining weights, in ascending order of token id, at
   `uniform(seed, position)`.
Temperature 0 means argmax, with the lowest id on a tie. A token of weight 0 (below about 1e-12 of the best token's
probability) is never drawn.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

WEIGHT_OF_ONE = 2**40

# Constants of SplitMix64 as int64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


@dataclass(frozen=True)
class SamplingTensors:
    """The sampling parameters of R rows; every tensor is [R], on the device of the logits.

    The two flags can be set by the host, which knows them. A flag of None is computed from the tensors, which waits for
    the device.
    """

    temperature: Tensor  # float32, 0: greedy
    top_k: Tensor  # int64, 0: all tokens
    top_p: Tensor  # float32 in (0, 1]
    min_p: Tensor  # float32 in [0, 1]
    seed: Tensor  # int64
    position: Tensor  # int64, the absolute position of the token to be drawn
    all_greedy: bool | None = None  # whether no row draws at random
    any_truncated: bool | None = None  # whether some row has top_k or top_p

    def greedy(self) -> bool:
        """Return whether no row draws at random."""
        if self.all_greedy is None:
            return bool((self.temperature <= 0).all())
        return self.all_greedy

    def truncated(self) -> bool:
        """Return whether top_k or top_p of some row needs the ranks of the tokens."""
        if self.any_truncated is None:
            return bool(((self.top_k > 0) | (self.top_p < 1)).any())
        return self.any_truncated


_NOTHING = torch.empty(0)
ALL_GREEDY = SamplingTensors(_NOTHING, _NOTHING, _NOTHING, _NOTHING, _NOTHING, _NOTHING, True, False)
"""The parameters of a batch in which every row is greedy; the tensors are not read."""


@dataclass(frozen=True)
class Sampled:
    """The drawn token of each row, and whether the row had a distribution to draw from."""

    tokens: Tensor  # int64 [R]
    finite: Tensor  # bool [R]; whether the row's greatest logit is finite. If not, the token is meaningless


def widen(outputs: Tensor, multiplier: float) -> Tensor:
    """Return logits, float32 [R, V]: a head's outputs in its own dtype, times `multiplier`."""
    return outputs.float() if multiplier == 1 else outputs.float() * multiplier


def apply_masks(logits: Tensor, rows: Tensor, words: Tensor) -> Tensor:
    """Set the logits of forbidden tokens to -inf in place, and return the logits, float32 [R, V].

    NaN and +inf stay as they are, so that `Sampled.finite` still reports the row.

    rows: int64 [n], the rows that have a mask, all different.
    words: int32 [n, W >= ceil(V / 32)], a bit mask for each of these rows; token i is allowed if bit i % 32 of word i
        // 32 is set.
    """
    ids = torch.arange(logits.shape[1], device=logits.device)
    allowed = words[:, ids // 32].bitwise_right_shift((ids % 32).int()).bitwise_and(1).bool()
    before = logits[rows]
    return logits.index_copy_(0, rows, before.masked_fill(~allowed & (before < torch.inf), -torch.inf))


def uniform(seed: Tensor, position: Tensor) -> Tensor:
    """Return random numbers, float64 [R] in [0, 1) with 53 random bits: a pure function of (seed, position), int64 [R].

    The arithmetic is on wrapping integers, so the numbers are the same on every device.
    """
    bits = _mix(_mix(seed + _GAMMA) + (position + 1) * _GAMMA)
    return _shift_right(bits, 11).double() * 2.0**-53


def weights(logits: Tensor, temperature: Tensor) -> Tensor:
    """Return the unnormalised probabilities in units of 2**-40, int64 [R, V]; the greatest is exactly 2**40.

    Each element depends only on its own logit, and on the row's maximum (finite) and temperature (> 0).
    """
    scaled = (logits - logits.amax(-1, keepdim=True)).div_(temperature[:, None])
    return scaled.exp_().mul_(WEIGHT_OF_ONE).long()


def top_p_threshold(top_p: Tensor, mass: Tensor) -> Tensor:
    """Return the threshold of top_p, int64 [R]: a ranked token stays if the weights before it sum to less.

    top_p: float32 [R]. mass: int64 [R], the sum of each row's weights.
    """
    partial = (top_p.double() * mass.double()).long()
    return torch.where(top_p >= 1, mass, torch.minimum(partial, mass)).clamp(min=1)


def apply_min_p(weights: Tensor, min_p: Tensor) -> Tensor:
    """Return the weights, int64 [R, V], with those below min_p · the greatest weight set to 0."""
    floor = (min_p.double() * WEIGHT_OF_ONE).long()
    return weights.masked_fill(weights < floor[:, None], 0)


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return the first id at which the cumulative weight exceeds uniform · total, int64 [R]; always a valid id."""
    cumulative = weights.cumsum(-1)
    # No uniform exceeds 1 - 2**-53, so the target is below the total even after the product was rounded.
    target = (uniforms * cumulative[:, -1].double()).long()
    ids = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    return ids.clamp(max=weights.shape[1] - 1)


def sample(logits: Tensor, params: SamplingTensors) -> Sampled:
    """Draw one token for each row of logits, float32 [R, V], as the steps at the top of this file define it.

    Logits may be -inf. A row whose greatest logit is not finite (NaN, +inf, or all -inf) is drawn greedily.
    """
    best = logits.argmax(-1)
    finite = logits.gather(1, best[:, None])[:, 0].isfinite()
    if params.greedy():
        return Sampled(best, finite)
    random = (params.temperature > 0) & finite
    candidates = weights(logits, torch.where(random, params.temperature, 1.0))
    if params.truncated():
        candidates = _truncate(logits, candidates, params.top_k, params.top_p)
    drawn = draw(apply_min_p(candidates, params.min_p), uniform(params.seed, params.position))
    return Sampled(torch.where(random, drawn, best), finite)


def ranking_keys(logits: Tensor) -> Tensor:
    """Return sort keys, int64 [R, V]: all different within a row, and ordered by (logit ascending, id descending).

    The upper 32 bits are the logit's bit pattern, made monotone; the lower 32 bits are V - 1 - id. Not for NaN.
    """
    bits = (logits + 0.0).view(torch.int32)  # adding 0.0 turns -0.0 into 0.0: the two are equal
    bits.bitwise_xor_((bits >> 31) & 0x7FFFFFFF)
    reversed_ids = torch.arange(logits.shape[1] - 1, -1, -1, device=logits.device)
    return bits.long().mul_(2**32).add_(reversed_ids)


def ids_of_keys(keys: Tensor, vocab_size: int) -> Tensor:
    """Return the token ids, int64, that ranking keys contain."""
    return vocab_size - 1 - (keys & 0xFFFFFFFF)


def log_probabilities(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute log probabilities under softmax(logits), float32 [R, V].

    The logits must be the model's own, before bias, penalties and temperature. This takes about 12·R·V bytes of
    memory, so callers split long prompts.

    Return three tensors: the log probabilities of `tokens` (int64 [R]), float32 [R]; the log probabilities of the `top`
    best tokens, float32 [R, top]; and the ids of the best tokens, int64 [R, top], best first and the lowest id first on
    a tie.
    """
    normalizer = logits.logsumexp(-1, keepdim=True)
    chosen = logits.gather(1, tokens[:, None]) - normalizer
    if top == 0:
        return chosen[:, 0], chosen[:, :0], tokens.new_empty(len(tokens), 0)
    keys = ranking_keys(logits).topk(min(top, logits.shape[1])).values
    ids = ids_of_keys(keys, logits.shape[1])
    return chosen[:, 0], logits.gather(1, ids) - normalizer, ids


def log_probabilities_of(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the log probabilities, float32 [R, N], of ids, int64 [R, N], under softmax(logits), float32 [R, V]."""
    return logits.gather(1, ids) - logits.logsumexp(-1, keepdim=True)


def _truncate(logits: Tensor, weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return the weights, with the weights that top_k and top_p drop set to 0 (steps 2 and 3)."""
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    limit = torch.where(top_k > 0, top_k, logits.shape[1])
    rank = torch.arange(logits.shape[1], device=logits.device)
    ranked = weights.gather(1, order).masked_fill_(rank >= limit[:, None], 0)
    cumulative = ranked.cumsum(-1)
    threshold = top_p_threshold(top_p, cumulative[:, -1])
    ranked.masked_fill_(cumulative - ranked >= threshold[:, None], 0)
    return torch.zeros_like(weights).scatter_(1, order, ranked)


def _mix(x: Tensor) -> Tensor:
    """Apply SplitMix64's output function to int64 numbers."""
    x = _xor_shifted(x, 30) * _MIX_1
    x = _xor_shifted(x, 27) * _MIX_2
    return _xor_shifted(x, 31)


def _xor_shifted(x: Tensor, bits: int) -> Tensor:
    """Return x ^ (x >> bits) with a logical shift."""
    return x.bitwise_xor(_shift_right(x, bits))


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros; torch's own shift of int64 fills with the sign."""
    return x.bitwise_right_shift(bits).bitwise_and(2 ** (64 - bits) - 1)
