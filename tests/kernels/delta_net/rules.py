"""Random inputs of the gated delta rule with a decay for each head, or each channel (KDA), and its definition."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from baton.kernels.delta_net.rule import delta_scan, delta_update, unit_length
from baton.kernels.prefill.chunk_table import chunk_table, cut
from tests.kernels.packing import Packed
from tests.kernels.rounding import FUNCTION, assert_within, gamma, largest, likely, lost_exponent, unit

F32, BF16 = torch.float32, torch.bfloat16
FALLS = ([0.0], [1.0], [60.0], [0.0, 1e-4, 0.1, 3.0, 90.0, 1e4])
"""Lists of upper bounds of -g, one drawn for each channel: no decay, usual decay, nearly full decay, all mixed."""


@dataclass
class Rule:
    """Inputs of the rule for some tokens, and the state pool that the rule updates."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor  # [tokens, value heads], or [tokens, value heads, key size] with a decay for each channel
    beta: Tensor
    pool: Tensor

    def prefill(self, packed: Packed, chunk_size: int = 64) -> Tensor:
        lists = cut(packed.offsets, packed.starts, packed.slots, packed.checkpoints, chunk_size)
        table = chunk_table(lists, torch.device("cpu"))
        return delta_scan(self.q, self.k, self.v, self.g, self.beta, self.pool, table)

    def update(self, slots: list[int], positions: list[int]) -> Tensor:
        at = torch.tensor(slots), torch.tensor(positions)
        return delta_update(self.q, self.k, self.v, self.g, self.beta, self.pool, *at)

    def rows(self, rows: slice) -> "Rule":
        """Return the inputs of these tokens, with the same pool."""
        return Rule(self.q[rows], self.k[rows], self.v[rows], self.g[rows], self.beta[rows], self.pool)

    def over(self, pool: Tensor) -> "Rule":
        return replace(self, pool=pool)


def drawn_by_head(
    tokens: int,
    slots: int,
    seed: int = 0,
    keys: int = 2,
    ratio: int = 3,
    size: int = 8,
    width: int = 5,
    fall: float = 1,
) -> Rule:
    """Draw inputs. Every second head decays, with g between -fall / 2 and 0; the remaining heads have g = 0."""
    gen, heads = torch.Generator().manual_seed(seed), keys * ratio
    g = -torch.rand(tokens, heads, generator=gen) * fall / 2 * (torch.arange(heads) % 2)
    return _drawn(tokens, slots, keys, size, width, g, gen)


def drawn_by_channel(
    tokens: int,
    slots: int,
    seed: int = 0,
    heads: int = 3,
    size: int = 8,
    width: int = 5,
    falls: list[float] = FALLS[1],
) -> Rule:
    """Draw inputs with g between -fall and 0; each channel draws its fall from `falls`."""
    gen = torch.Generator().manual_seed(seed)
    fall = torch.tensor(falls)[torch.randint(len(falls), (heads, size), generator=gen)]
    g = -torch.rand(tokens, heads, size, generator=gen) * fall
    return _drawn(tokens, slots, heads, size, width, g, gen)


def _drawn(tokens: int, slots: int, keys: int, size: int, width: int, g: Tensor, gen: torch.Generator) -> Rule:
    heads = g.shape[1]
    return Rule(
        unit_length(torch.randn(tokens, keys, size, generator=gen)) * size**-0.5,
        unit_length(torch.randn(tokens, keys, size, generator=gen)),
        torch.randn(tokens, heads, width, generator=gen),
        g,
        torch.rand(tokens, heads, generator=gen),
        torch.randn(slots, heads, width, size, generator=gen),
    )


def recurrence(rule: Rule, packed: Packed) -> tuple[Tensor, Tensor]:
    """Return o [tokens, value heads, value size] and the updated pool, by definition.

    The state S becomes S·diag(e^g)·(I − beta·k·kᵀ) + beta·v·kᵀ, where g is a number for a head or one for each channel.
    """
    pool, o = rule.pool.double(), torch.empty(rule.v.shape, dtype=torch.float64)
    ratio, identity = rule.v.shape[1] // rule.k.shape[1], torch.eye(rule.k.shape[2], dtype=torch.float64)
    for segment, slot in enumerate(packed.slots):
        state = pool[slot].clone()
        for token in range(packed.offsets[segment], packed.offsets[segment + 1]):
            for head in range(rule.v.shape[1]):
                q, k = rule.q[token, head // ratio].double(), rule.k[token, head // ratio].double()
                beta, decay = rule.beta[token, head].double(), rule.g[token, head].double().exp()
                held = state[head] * decay @ (identity - beta * torch.outer(k, k))
                state[head] = held + beta * torch.outer(rule.v[token, head].double(), k)
                o[token, head] = state[head] @ q
            position = packed.starts[segment] + token - packed.offsets[segment] + 1
            for owner, at, target in packed.checkpoints:
                if (owner, at) == (segment, position):
                    pool[target] = state
        pool[slot] = state
    return o, pool


def assert_close(found: Tensor, exact: Tensor, rule: Rule, chunk_size: int = 64) -> None:
    """Compare outputs or pools for these inputs; those have random signs, so errors are relative to the largest number.

    The terms are a segment's tokens, and the numbers of a key. Each of the results has been computed in float32, unless
    it is float64.
    """
    results = 1 if exact.dtype == torch.float64 else 2
    error = likely(len(rule.q) + rule.q.shape[2] + 2 * FUNCTION) + gamma(int(lost_exponent(rule.g, chunk_size)))
    size = largest(exact, rule.v)
    assert_within(found, exact, results * (error * size + unit(F32) * exact.double().abs()))


@dataclass(frozen=True)
class RuleKind:
    """A form of the rule: with a decay for each head, or for each channel."""

    name: str
    drawn: Callable[..., Rule]
    options: st.SearchStrategy[dict[str, Any]]  # arguments of `drawn` that choose shapes and decays


SIZES = st.integers(1, 20)
BY_HEAD = RuleKind(
    "by head",
    drawn_by_head,
    st.fixed_dictionaries(
        {
            "keys": st.integers(1, 3),
            "ratio": st.integers(1, 3),
            "size": SIZES,
            "width": SIZES,
            "fall": st.sampled_from([0.0, 1.0, 60.0, 300.0]),
        }
    ),
)
BY_CHANNEL = RuleKind(
    "by channel",
    drawn_by_channel,
    st.fixed_dictionaries({"heads": st.integers(1, 4), "size": SIZES, "width": SIZES, "falls": st.sampled_from(FALLS)}),
)
RULES = [BY_HEAD, BY_CHANNEL]


def name_of(kind: RuleKind) -> str:
    return kind.name
