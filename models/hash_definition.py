"""The hash model in scalars. Its state is a hash of every token consumed, so a single stale, foreign, misaligned or
over-advanced state or page shows as a wrong token at once. Its fold is a weighted sum of all KV entries.

This module imports no other part of Baton: the simulator and clients compute the expected tokens with it.
"""

from collections.abc import Sequence

MODULUS = 2**31 - 1
INITIAL_STATE = 0
FOLD_PERIOD = 127


def next_state(state: int, token: int, position: int) -> int:
    """Return the state after consuming `token` at absolute `position`. The KV entry at `position` equals the state."""
    return (state * 48271 + (token + 1) * 69621 + (position + 1) * 16807 + 1) % MODULUS


def add_entry(fold: int, entry: int, position: int) -> int:
    """Return the fold over the KV entries 0..position, given `fold`, the fold over the entries before `position`."""
    return (fold + entry * (position % FOLD_PERIOD + 1)) % MODULUS


def fold_entries(entries: Sequence[int]) -> int:
    """Return the fold over the KV entries of positions 0, 1, …"""
    fold = 0
    for position, entry in enumerate(entries):
        fold = add_entry(fold, entry, position)
    return fold


def output_hash(state: int, fold: int) -> int:
    """Return the model's hidden state. Modulo the size of the vocabulary, it is the next token."""
    return (state * 31 + fold * 17 + 7) % MODULUS


def next_token(state: int, fold: int, vocab_size: int) -> int:
    """Return the token that greedy sampling draws next. fold: 0 for a model without pages."""
    return output_hash(state, fold) % vocab_size


def expected_output(tokens: Sequence[int], count: int, vocab_size: int, *, page_fold: bool = True) -> list[int]:
    """Return the greedy continuation of `tokens` by `count` tokens. Raises ValueError if `tokens` is empty."""
    if not tokens:
        raise ValueError("nothing to continue: tokens is empty")
    state, fold = INITIAL_STATE, 0
    output: list[int] = []
    for position in range(len(tokens) + count - 1):
        token = tokens[position] if position < len(tokens) else output[-1]
        state = next_state(state, token, position)
        if page_fold:
            fold = add_entry(fold, state, position)
        if position + 1 >= len(tokens):
            output.append(next_token(state, fold, vocab_size))
    return output
