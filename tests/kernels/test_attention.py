import pytest
import torch
from torch import Tensor

from kernels.attention import paged_attention, write_pages

PAGE, HEADS, KV_HEADS, WIDTH = 4, 6, 2, 8


def attend_by_definition(query: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
    """Each query [L, heads, d] over keys and values [start + L, kv_heads, d] up to its own position."""
    outputs = torch.empty_like(query)
    for place in range(len(query)):
        for head in range(HEADS):
            kv = head // (HEADS // KV_HEADS)
            seen = slice(start + place + 1)
            weights = (keys[seen, kv] @ query[place, head] * 0.3).softmax(0)
            outputs[place, head] = weights @ values[seen, kv]
    return outputs


@pytest.mark.parametrize("seed", range(3))
def test_packed_chunks_and_decode_rows_attend_to_their_own_pages(seed: int) -> None:
    torch.manual_seed(seed)
    starts, lengths = [0, 7, 0, 12, 0, 5, 30], [9, 6, 1, 4, 17, 1, 1]
    table = torch.randperm(7 * 12).view(7, 12).int()
    key_pages, value_pages = torch.full((2, 7 * 12, PAGE, KV_HEADS, WIDTH), torch.nan)
    offsets, queries, expected = [0], [], []
    for segment, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        keys, values = torch.randn(2, start + length, KV_HEADS, WIDTH)
        positions = torch.arange(start + length)
        places = table[segment, positions // PAGE].long() * PAGE + positions % PAGE
        write_pages(keys, values, key_pages, value_pages, places)
        queries.append(torch.randn(length, HEADS, WIDTH))
        expected.append(attend_by_definition(queries[-1], keys, values, start))
        offsets.append(offsets[-1] + length)
    layout = table, torch.tensor(offsets), torch.tensor(starts)
    prompts, longest = len(lengths), max(lengths)
    actual = paged_attention(torch.cat(queries), key_pages, value_pages, *layout, 0.3, prompts, longest)
    torch.testing.assert_close(actual, torch.cat(expected), atol=1e-5, rtol=1e-5)
