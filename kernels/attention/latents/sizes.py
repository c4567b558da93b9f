"""Which segments are computed by heads, and how many positions are expanded at a time."""

from dataclasses import dataclass

POSITIONS = 8192
"""Maximum positions whose keys and values by head are in memory at a time.

Kimi-Linear-48B-A3B, 32 heads with 128 own columns of a key and 128 of a value, in bfloat16: 128 MiB, and 9 MiB of
latents.
"""
WIDEST = 256
"""Maximum columns of a head's query or value in the kernel by heads, which holds each as one tile."""


@dataclass(frozen=True)
class Forms:
    """The limits that choose the form of attention for a segment (the tokens of one row in a step)."""

    shortest: int  # segments of at least this many tokens are computed by heads
    absorbed: int  # tokens of other segments that are computed together, at most, unless one segment has more


def forms_of(rank: int, own: int, shared: int, value: int) -> Forms | None:
    """Return the limits for these numbers of columns; None if attention by heads never pays, or is too wide.

    For each head and each pair of a token and a position that it sees, the absorbed form multiplies with rank + shared
    columns for a score, and with rank for the sum of values; by heads, these are own + shared and value columns.
    Attention by heads also multiplies with rank · (own + value) numbers for each position that it expands.
    L tokens after many positions see each position L times, so by heads takes less than the absorbed form if
    L · (2 · rank - own - value) > rank · (own + value). Tokens that begin a prompt see fewer pairs, but the absorbed
    form multiplies their own queries and sums with as many numbers as the expansion does.
    Kimi-Linear-48B-A3B: L · 768 > 131,072, so the shortest segment has 171 tokens.

    A group of short segments takes at most as much memory for absorbed queries and sums as the expanded block does.
    """
    saved, expanded = 2 * rank - own - value, rank * (own + value)
    if saved <= 0 or max(own + shared, value) > WIDEST:
        return None
    return Forms(expanded // saved + 1, max(1, POSITIONS * (own + value) // (2 * rank + shared)))


def is_long(shortest: int, tokens: int) -> bool:
    """Return whether a segment of `tokens` tokens is computed by heads: a class of numbers of tokens (row_classes)."""
    return tokens >= shortest


def block_positions(page_size: int) -> int:
    """Return how many positions are expanded at a time: whole pages, at least one."""
    return max(POSITIONS // page_size, 1) * page_size
