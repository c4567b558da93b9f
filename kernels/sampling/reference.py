"""Sampling, defined by a full sort. Nothing in here waits for the device or looks at another row.

For each row, in this order:
1. weights: w[i] = floor(exp((logit[i] - max) / temperature) · 2**40), so that sums of weights are exact in any order.
2. top_k: tokens are ranked by (logit descending, id ascending); those of rank >= top_k go.
3. top_p: a token goes if those of lower rank already hold top_p of the mass that step 2 left. The first one stays.
4. min_p: a token goes if its weight is below min_p of the largest weight.
5. draw: inverse CDF over the remaining weights in ascending order of token id, with `uniform(seed, position)`.
temperature 0 is argmax, the lowest id on a tie. A token of weight 0 (below 1e-12 of the best) is never drawn.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

WEIGHT_OF_ONE = 2**40

# SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014; constants as signed.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


@dataclass(frozen=True)
class SamplingTensors:
    """How to draw one token for each of R rows; every tensor is [R], on the device of the logits.

    temperature float32 (0: greedy), top_k int64 (0: all), top_p float32 in (0, 1], min_p float32 in [0, 1], seed int64,
    position int64: the absolute position of the token to be drawn.
    all_greedy, any_truncated (a row with top_k or top_p): what the host knows of the rows. None reads it from the
    tensors, which waits for the device.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    position: Tensor
    all_greedy: bool | None = None
    any_truncated: bool | None = None

    def greedy(self) -> bool:
        """Whether no row draws at random."""
        if self.all_greedy is None:
            return bool((self.temperature <= 0).all())
        return self.all_greedy

    def truncated(self) -> bool:
        """Whether top_k or top_p of some row needs the ranks of the tokens."""
        if self.any_truncated is None:
            return bool(((self.top_k > 0) | (self.top_p < 1)).any())
        return self.any_truncated


_NOTHING = torch.empty(0)
ALL_GREEDY = SamplingTensors(_NOTHING, _NOTHING, _NOTHING, _NOTHING, _NOTHING, _NOTHING, True, False)
"""Of rows that are all greedy: nothing else of them matters."""


@dataclass(frozen=True)
class Sampled:
    """tokens: int64 [R]. finite: bool [R], whether a row's greatest logit is; where not, there is no distribution."""

    tokens: Tensor
    finite: Tensor


def apply_masks(logits: Tensor, rows: Tensor, words: Tensor) -> Tensor:
    """Set to -inf what is not allowed in rows of logits, float32 [R, V], in place, and return the logits.

    rows: int64 [n], no row twice; words: int32 [n, W >= ceil(V / 32)], of which bit i % 32 of word i // 32 says whether
    token i is allowed. NaN and +inf stay, so that `finite` still tells of a row which had them.
    """
    ids = torch.arange(logits.shape[1], device=logits.device)
    allowed = words[:, ids // 32].bitwise_right_shift((ids % 32).int()).bitwise_and(1).bool()
    before = logits[rows]
    return logits.index_copy_(0, rows, before.masked_fill(~allowed & (before < torch.inf), -torch.inf))


def uniform(seed: Tensor, position: Tensor) -> Tensor:
    """float64 [R] in [0, 1) with 53 random bits: a pure function of (seed, position), int64 [R] each.

    Integer arithmetic that wraps, so it is the same on every device.
    """
    bits = _mix(_mix(seed + _GAMMA) + (position + 1) * _GAMMA)
    return _shift_right(bits, 11).double() * 2.0**-53


def weights(logits: Tensor, temperature: Tensor) -> Tensor:
    """int64 [R, V]: the unnormalised probabilities in units of 2**-40, the greatest being exactly 2**40.

    Each element depends on its own logit, the row's maximum (finite) and its temperature (> 0) alone.
    """
    scaled = (logits - logits.amax(-1, keepdim=True)).div_(temperature[:, None])
    return scaled.exp_().mul_(WEIGHT_OF_ONE).long()


def top_p_threshold(top_p: Tensor, mass: Tensor) -> Tensor:
    """int64 [R]: ranked tokens stay while the mass before them is below this."""
    partial = (top_p.double() * mass.double()).long()
    return torch.where(top_p >= 1, mass, torch.minimum(partial, mass)).clamp(min=1)


def apply_min_p(weights: Tensor, min_p: Tensor) -> Tensor:
    """The weights with those under min_p of the greatest set to 0."""
    floor = (min_p.double() * WEIGHT_OF_ONE).long()
    return weights.masked_fill(weights < floor[:, None], 0)


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """int64 [R]: the first id at which the cumulative weight exceeds uniform · total. Always a valid id."""
    cumulative = weights.cumsum(-1)
    # Below the total also after rounding, as no uniform exceeds 1 - 2**-53.
    target = (uniforms * cumulative[:, -1].double()).long()
    ids = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    return ids.clamp(max=weights.shape[1] - 1)


def sample(logits: Tensor, params: SamplingTensors) -> Sampled:
    """One token for each row of logits, float32 [R, V].

    Logits may be -inf. A row whose greatest logit is not finite (NaN, or all -inf) is drawn greedily.
    """
    best = logits.argmax(-1)
    finite = logits.gather(1, best[:, None])[:, 0].isfinite()
    if params.greedy():
        return Sampled(best, finite)
    random = (params.temperature > 0) & finite
    kept = weights(logits, torch.where(random, params.temperature, 1.0))
    if params.truncated():
        kept = _truncate(logits, kept, params.top_k, params.top_p)
    drawn = draw(apply_min_p(kept, params.min_p), uniform(params.seed, params.position))
    return Sampled(torch.where(random, drawn, best), finite)


def ranking_keys(logits: Tensor) -> Tensor:
    """int64 [R, V], all different within a row and ordered like (logit ascending, id descending).

    The high half is the logit's bit pattern made monotone, the low half V - 1 - id. Not for NaN.
    """
    bits = (logits + 0.0).view(torch.int32)  # adding 0.0 turns -0.0 into 0.0: the two are equal
    bits.bitwise_xor_((bits >> 31) & 0x7FFFFFFF)
    reversed_ids = torch.arange(logits.shape[1] - 1, -1, -1, device=logits.device)
    return bits.long().mul_(2**32).add_(reversed_ids)


def ids_of_keys(keys: Tensor, vocab_size: int) -> Tensor:
    """The token ids, int64, of ranking keys."""
    return vocab_size - 1 - (keys & 0xFFFFFFFF)


def log_probabilities(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log probabilities under softmax(logits), float32 [R, V]: give it the logits before bias, penalties, temperature.

    Returns those of `tokens` (int64 [R]) as float32 [R], and of the `top` best, float32 [R, top], with their ids,
    int64 [R, top]: best first, the lowest id first on a tie. Needs about 12·R·V bytes: split long prompts.
    """
    normalizer = logits.logsumexp(-1, keepdim=True)
    chosen = logits.gather(1, tokens[:, None]) - normalizer
    if top == 0:
        return chosen[:, 0], chosen[:, :0], tokens.new_empty(len(tokens), 0)
    keys = ranking_keys(logits).topk(min(top, logits.shape[1])).values
    ids = ids_of_keys(keys, logits.shape[1])
    return chosen[:, 0], logits.gather(1, ids) - normalizer, ids


def log_probabilities_of(logits: Tensor, ids: Tensor) -> Tensor:
    """float32 [R, N]: those of ids, int64 [R, N], under softmax(logits), float32 [R, V]."""
    return logits.gather(1, ids) - logits.logsumexp(-1, keepdim=True)


def _truncate(logits: Tensor, weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The weights with those that top_k and top_p drop set to 0."""
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    limit = torch.where(top_k > 0, top_k, logits.shape[1])
    rank = torch.arange(logits.shape[1], device=logits.device)
    ranked = weights.gather(1, order).masked_fill_(rank >= limit[:, None], 0)
    cumulative = ranked.cumsum(-1)
    threshold = top_p_threshold(top_p, cumulative[:, -1])
    ranked.masked_fill_(cumulative - ranked >= threshold[:, None], 0)
    return torch.zeros_like(weights).scatter_(1, order, ranked)


def _mix(x: Tensor) -> Tensor:
    x = _xor_shifted(x, 30) * _MIX_1
    x = _xor_shifted(x, 27) * _MIX_2
    return _xor_shifted(x, 31)


def _xor_shifted(x: Tensor, bits: int) -> Tensor:
    return x.bitwise_xor(_shift_right(x, bits))


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """A logical shift: int64's own is arithmetic."""
    return x.bitwise_right_shift(bits).bitwise_and(2 ** (64 - bits) - 1)
