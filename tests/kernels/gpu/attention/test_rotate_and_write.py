"""Rotation, and the write of keys and values, in Triton: equal to the references, and nothing else is written."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import baton.kernels.attention.paged.reference
import baton.kernels.attention.paged.triton_write
import baton.kernels.attention.rotary.reference
import baton.kernels.attention.rotary.triton
from baton.kernels.attention.rotate_and_write import reference, rotate_and_write, triton
from baton.kernels.runtime.triton import Launch, computes_for, watched
from tests.kernels.rounding import assert_rounded, largest

SIZES = {
    "tokens": st.integers(0, 6),
    "group": st.sampled_from([1, 3, 4]),
    "kv_heads": st.sampled_from([1, 2, 3]),
    "half": st.sampled_from([1, 10, 16, 40]),
    "rest": st.sampled_from([0, 1, 12, 32]),
    "page": st.sampled_from([1, 3, 16]),
    "seed": st.integers(0, 2**32),
}


def angles(tokens: int, half: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    angle = (torch.rand(tokens, 1, half, generator=generator) * 7).repeat(1, 1, 2)
    return angle.cos(), angle.sin()


def pool(page: int, kv_heads: int, width: int, generator: torch.Generator) -> Tensor:
    """Return memory for 9 pages. `views` returns the strided keys and values in it."""
    return torch.randn(9, 2 * page * kv_heads * width + 5, generator=generator)


def views(memory: Tensor, page: int, kv_heads: int, width: int) -> tuple[Tensor, Tensor]:
    keys, values = memory[:, 2:-3].unflatten(1, (2, page, kv_heads, width)).unbind(1)
    return keys, values


@given(**SIZES)
@settings(max_examples=30, deadline=None)
def test_equals_the_reference(
    tokens: int, group: int, kv_heads: int, half: int, rest: int, page: int, seed: int
) -> None:
    g, width = torch.Generator().manual_seed(seed), 2 * half + rest
    heads = group * kv_heads
    projected = torch.randn(tokens, heads + 2 * kv_heads, width, generator=g)
    parts = projected.split([heads, kv_heads, kv_heads], 1)
    memory, places = pool(page, kv_heads, width, g), torch.randperm(9 * page, generator=g)[:tokens]
    expected_memory = memory.clone()
    rotation = angles(len(places), half, g)
    inputs = [part[: len(places)] for part in parts]
    found = triton.rotate_and_write(*inputs, *rotation, *views(memory, page, kv_heads, width), places)
    expected = reference.rotate_and_write(*inputs, *rotation, *views(expected_memory, page, kv_heads, width), places)
    for one, other in ((found, expected), (memory, expected_memory)):
        assert_rounded(one, other, 2, 2 * largest(projected))
    written = expected_memory == memory
    assert torch.equal(views(memory, page, kv_heads, width)[1], views(expected_memory, page, kv_heads, width)[1])
    assert (~written).sum() <= inputs[1].numel()


@given(**SIZES)
@settings(max_examples=20, deadline=None)
def test_keys_and_values_are_written_as_they_are(
    tokens: int, group: int, kv_heads: int, half: int, rest: int, page: int, seed: int
) -> None:
    g, width = torch.Generator().manual_seed(seed), 2 * half + rest
    projected = torch.randn(tokens, group + 2 * kv_heads, width, generator=g)
    _, keys, values = projected.split([group, kv_heads, kv_heads], 1)
    memory, places = pool(page, kv_heads, width, g), torch.randperm(9 * page, generator=g)[:tokens]
    expected = memory.clone()
    keys, values = keys[: len(places)], values[: len(places)]
    baton.kernels.attention.paged.triton_write.write_pages(keys, values, *views(memory, page, kv_heads, width), places)
    baton.kernels.attention.paged.reference.write_pages(keys, values, *views(expected, page, kv_heads, width), places)
    assert torch.equal(memory, expected)


@given(**SIZES)
@settings(max_examples=20, deadline=None)
def test_heads_are_rotated(tokens: int, group: int, kv_heads: int, half: int, rest: int, page: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, group * kv_heads + page, 2 * half + rest, generator=g)[:, : group * kv_heads]
    rotation, before = angles(tokens, half, g), x.clone()
    for first in {0, rest // 2, rest}:
        found = baton.kernels.attention.rotary.triton.rotate(x, *rotation, first)
        expected = baton.kernels.attention.rotary.reference.rotate(x, *rotation, first)
        assert_rounded(found, expected, 2, 2 * largest(x))
    assert torch.equal(x, before)


@pytest.mark.parametrize("half", [8, 4, None])
def test_it_is_one_launch_where_triton_computes_and_the_operations_elsewhere(half: int | None) -> None:
    g, launches = torch.Generator().manual_seed(0), list[Launch]()
    query, keys, values = torch.randn(5, 8, 16, generator=g).split([4, 2, 2], 1)
    cos, sin = angles(5, half, g) if half else (None, None)
    memory, places = pool(4, 2, 16, g), torch.randperm(36, generator=g)[:5]
    expected = memory.clone()
    found = rotate_and_write(query, keys, values, cos, sin, *views(memory, 4, 2, 16), places)
    defined = reference.rotate_and_write(query, keys, values, cos, sin, *views(expected, 4, 2, 16), places)
    assert torch.equal(found, defined) and torch.equal(memory, expected)
    with computes_for("cpu"), watched(launches.append):
        rotate_and_write(query, keys, values, cos, sin, *views(memory, 4, 2, 16), places)
    assert len(launches) == 1
