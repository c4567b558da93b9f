from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from baton.kernels.attention.paged import paged_attention, write_pages
from tests.kernels.rounding import assert_within, attention_error

PAGE, HEADS, KV_HEADS, WIDTH = 4, 6, 2, 8
STARTS, LENGTHS = [0, 7, 0, 12, 0, 5, 30], [9, 6, 1, 4, 17, 1, 1]


@dataclass(frozen=True)
class Batch:
    """Packed chunks and decode rows, with the expected attention."""

    query: Tensor
    key_pages: Tensor
    value_pages: Tensor
    table: Tensor
    expected: Tensor

    def run(self, seen_from: int = 0, window: int = 0) -> Tensor:
        layout = self.table, torch.tensor([0, *LENGTHS]).cumsum(0), torch.tensor(STARTS)
        pages = self.key_pages, self.value_pages
        sizes = len(LENGTHS), max(LENGTHS)
        return paged_attention(self.query, *pages, *layout, 0.3, *sizes, seen_from, window)


def attend_by_definition(
    query: Tensor, keys: Tensor, values: Tensor, start: int, seen_from: int, window: int
) -> Tensor:
    """Compute the attention of L queries [L, heads, d] over keys and values [start + L, kv_heads, …], one by one."""
    outputs = torch.empty(*query.shape[:2], values.shape[2])
    for place in range(len(query)):
        for head in range(HEADS):
            kv = head // (HEADS // KV_HEADS)
            end = start + place + 1
            seen = slice(max(seen_from, end - window if window else 0), end)
            weights = (keys[seen, kv] @ query[place, head] * 0.3).softmax(0)
            outputs[place, head] = weights @ values[seen, kv]
    return outputs


def drawn(seed: int, value_width: int, are_values_of_keys: bool, seen_from: int = 0, window: int = 0) -> Batch:
    """Return a random batch, in which page entries that belong to no segment are NaN.

    are_values_of_keys: if true, the values are the first columns of the keys.
    """
    torch.manual_seed(seed)
    table = torch.randperm(7 * 12).view(7, 12).int()
    key_pages, value_pages = (torch.full((7 * 12, PAGE, KV_HEADS, width), torch.nan) for width in (WIDTH, value_width))
    queries, expected = [], []
    for segment, (start, length) in enumerate(zip(STARTS, LENGTHS, strict=True)):
        keys, values = (torch.randn(start + length, KV_HEADS, width) for width in (WIDTH, value_width))
        positions = torch.arange(start + length)
        places = table[segment, positions // PAGE].long() * PAGE + positions % PAGE
        write_pages(keys, values, key_pages, value_pages, places)
        queries.append(torch.randn(length, HEADS, WIDTH))
        seen = keys[..., :value_width] if are_values_of_keys else values
        expected.append(attend_by_definition(queries[-1], keys, seen, start, seen_from, window))
    value_pages = key_pages[..., :value_width] if are_values_of_keys else value_pages
    return Batch(torch.cat(queries), key_pages, value_pages, table, torch.cat(expected))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("value_width", "are_values_of_keys"), [(WIDTH, False), (5, False), (5, True)])
def test_packed_chunks_and_decode_rows_attend_to_their_own_pages(
    seed: int, value_width: int, are_values_of_keys: bool
) -> None:
    batch = drawn(seed, value_width, are_values_of_keys)
    ends = [start + length for start, length in zip(STARTS, LENGTHS, strict=True)]
    error = attention_error(batch.query, batch.key_pages, batch.value_pages, 0.3, max(ends))
    assert_within(batch.run(), batch.expected, 2 * error)


@pytest.mark.parametrize("seen_from", [1, 6])
def test_positions_before_the_first_one_to_see_change_nothing(seen_from: int) -> None:
    batch = drawn(4, WIDTH, False, seen_from)
    positions = torch.cat([torch.arange(at, at + length) for at, length in zip(STARTS, LENGTHS, strict=True)])
    found, sees = batch.run(seen_from), positions >= seen_from
    error = attention_error(batch.query, batch.key_pages, batch.value_pages, 0.3, len(positions))
    assert_within(found[sees], batch.expected[sees], 2 * error)


@pytest.mark.parametrize("window", [1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 15, 30, 31, 100])
@pytest.mark.parametrize("seen_from", [0, 6])
def test_a_window_ends_at_a_tokens_own_position_and_has_as_many_positions_as_it_names(
    window: int, seen_from: int
) -> None:
    batch = drawn(5, WIDTH, False, seen_from, window)
    positions = torch.cat([torch.arange(at, at + length) for at, length in zip(STARTS, LENGTHS, strict=True)])
    found, sees = batch.run(seen_from, window), positions >= seen_from
    error = attention_error(batch.query, batch.key_pages, batch.value_pages, 0.3, len(positions))
    assert_within(found[sees], batch.expected[sees], 2 * error)


def test_pages_that_do_not_fit_are_refused() -> None:
    batch = drawn(0, WIDTH, False)
    wide, short, few = batch.value_pages.repeat(1, 1, 1, 2), batch.value_pages[:, :3], batch.value_pages[:, :, :1]
    others = [replace(batch, value_pages=pages) for pages in (wide, short, few)]
    for other in [*others, replace(batch, query=batch.query[:, :5]), replace(batch, query=batch.query[..., :7])]:
        with pytest.raises(ValueError, match="do not fit"):
            other.run()
