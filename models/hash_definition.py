"""The hash model in scalars. Its state is a hash of every token consumed, so a single stale, foreign, misaligned or
over-advanced state or page shows as a wrong token at once.

It does not depend on the rest of Baton: the simulator and clients compute the expected tokens with it.
"""

from collections.abc import Sequence

MODULUS = 2**31 - 1
INITIAL_STATE = 0
FOLD_PERIOD = 127


def next_state(state: int, token: int, position: int) -> int:
    """Return the state after consuming `token` at absolute `position`, which is also the KV entry at that position."""
    return (state * 48271 + (token + 1) * 69621 + (position + 1) * 16807 + 1) % MODULUS


def add_entry(fold: int, entry: int, position: int) -> int:
    """Return the fold over the entries 0..position. fold: that over the entries before `position`."""
    return (fold + entry * (position % FOLD_PERIOD + 1)) % MODULUS


def fold_entries(entries: Sequence[int]) -> int:
    """Return the fold over the KV entries of positions 0, 1, …"""
    fold = 0
    for position, entry in enumerate(entries):
        fold = add_entry(fold, entry, position)
    return fold


def output_hash(state: int, fold: int) -> int:
    """Return the model's hidden state: the next token before it is reduced modulo the vocabulary."""
    return (state * 31 + fold * 17 + 7) % MODULUS


def next_token(state: int, fold: int, vocab_size: int) -> int:
    """Return the token that greedy sampling draws next. Without pages the fold is 0."""
    return output_hash(state, fold) % vocab_size


def expected_output(tokens: Sequence[int], count: int, vocab_size: int, *, page_fold: bool = True) -> list[int]:
    """Return the greedy continuation of `tokens` (at least one) by `count` tokens."""
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
