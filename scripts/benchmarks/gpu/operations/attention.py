"""Operations of attention layers: attention over KV pages, rotation of queries and keys, writing of KV to pages."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from baton.kernels.attention.latents import reference as by_heads
from baton.kernels.attention.mla_cache import reference as latents
from baton.kernels.attention.paged import reference as attention
from baton.kernels.attention.rotary import reference as rotary
from baton.kernels.attention.rotate_and_write import reference as rotate_and_write
from scripts.benchmarks.gpu.operation import Draw, Operation, bytes_of

PAGE = 16


@dataclass(frozen=True)
class Heads:
    """The sizes of an attention layer."""

    heads: int = 32
    kv_heads: int = 8
    width: int = 128  # columns of a head
    rank: int | None = None  # for latent attention: a latent is the key, and its first `rank` columns are the value

    def pages(self, draw: Draw, count: int) -> Tensor:
        """Return one layer's strided pages, [count, 2, PAGE, kv_heads, width]; latents have 1 instead of 2."""
        return draw.normal(count, 2, 2 if self.rank is None else 1, PAGE, self.kv_heads, self.width)[:, 1]

    def keys_and_values(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of the keys and of the values."""
        keys = pages[:, 0]
        return keys, pages[:, 1] if self.rank is None else keys[..., : self.rank]

    def projected(self, draw: Draw, tokens: int) -> Tensor:
        """Return queries, keys and values in one tensor, [tokens, heads + 2 · kv_heads, width]."""
        return draw.normal(tokens, self.heads + 2 * self.kv_heads, self.width)

    def angles(self, draw: Draw, tokens: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of random angles, the same for both halves of a head."""
        drawn = draw.uniform(-3.0, 3.0, tokens, 1, self.width // 2).repeat(1, 1, 2)
        return drawn.cos(), drawn.sin()


def attend(draw: Draw, heads: Heads, prompts: Sequence[tuple[int, int]], rows: Sequence[int] = ()) -> Operation:
    """Build a call of attention.

    prompts: (start, length) of each prompt. rows: position of each row that decodes.
    """
    from baton.kernels.attention.paged import triton

    starts, lengths = [*(start for start, _ in prompts), *rows], [*(length for _, length in prompts), *[1] * len(rows)]
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    width = -(-max(ends) // PAGE)
    pages = heads.pages(draw, len(ends) * width)
    table = draw.order(len(pages)).view(len(ends), width).int()
    offsets = torch.tensor([0, *accumulate(lengths)]).to(draw.device)
    begin, scale, longest = torch.tensor(starts).to(draw.device), heads.width**-0.5, max(lengths)
    query = heads.projected(draw, sum(lengths))[:, : heads.heads]

    def run(query: Tensor, pages: Tensor, table: Tensor, offsets: Tensor, begin: Tensor) -> Sequence[Tensor]:
        inputs = query, *heads.keys_and_values(pages), table, offsets, begin
        return (triton.paged_attention(*inputs, scale, len(prompts), longest),)

    def exact(query: Tensor, pages: Tensor, table: Tensor, offsets: Tensor, begin: Tensor) -> Sequence[Tensor]:
        inputs = query, *heads.keys_and_values(pages), table, offsets, begin
        return (attention.paged_attention(*inputs, scale),)

    # Number of pairs of a query and a position that the query attends to.
    pairs = sum(length * start + length * (length + 1) // 2 for start, length in zip(starts, lengths, strict=True))
    bytes_per_position = bytes_of(pages) // len(pages) // PAGE
    columns = heads.width + (heads.rank or heads.width)
    moved = bytes_of(query) * columns // heads.width + sum(ends) * bytes_per_position
    return Operation(run, exact, (query, pages, table, offsets, begin), moved, 2 * pairs * heads.heads * columns)


def attend_by_heads(draw: Draw, heads: Heads, start: int, length: int) -> Operation:
    """Build a call of attention of one prompt over latents by heads, with the expansion of the latents.

    A head's own key and its value have a quarter of a latent's columns, as in Kimi Linear.
    """
    from baton.kernels.attention.latents import triton

    rank, end = heads.rank or heads.width, start + length
    own = value = rank // 4
    shared, scale = heads.width - rank, (own + heads.width - rank) ** -0.5
    pages = heads.pages(draw, -(-end // PAGE))
    table, query = draw.order(len(pages)).int(), draw.normal(length, heads.heads, own + shared)
    weights = draw.normal(heads.heads, rank, own) * rank**-0.5, draw.normal(heads.heads, value, rank) * rank**-0.5

    def run(query: Tensor, pages: Tensor, table: Tensor, key: Tensor, values: Tensor) -> Sequence[Tensor]:
        output = torch.empty(length, heads.heads, value, dtype=query.dtype, device=query.device)
        triton.attend_by_heads(query, pages[:, 0], table, key, values, scale, 0, length, start, output)
        return (output,)

    def exact(query: Tensor, pages: Tensor, table: Tensor, key: Tensor, values: Tensor) -> Sequence[Tensor]:
        output = torch.empty(length, heads.heads, value, dtype=query.dtype, device=query.device)
        by_heads.attend_by_heads(query, pages[:, 0], table, key, values, scale, 0, length, start, output)
        return (output,)

    pairs = length * start + length * (length + 1) // 2
    products = pairs * (own + shared + value) + end * rank * (own + value)
    moved = bytes_of(query, pages, *weights) + bytes_of(query) * value // (own + shared)
    return Operation(run, exact, (query, pages, table, *weights), moved, 2 * heads.heads * products)


def write(draw: Draw, heads: Heads, tokens: int, is_rotated: bool) -> Operation:
    """Build a call that writes keys and values to their pages; queries and keys are rotated first if `is_rotated`."""
    from baton.kernels.attention.paged import triton_write
    from baton.kernels.attention.rotate_and_write import triton

    pages, projected = heads.pages(draw, -(-tokens // PAGE) + 1), heads.projected(draw, tokens)
    places = draw.order(len(pages) * PAGE)[:tokens]
    cos, sin = heads.angles(draw, tokens)

    def parts(projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, keys, values = torch.split(projected, [heads.heads, heads.kv_heads, heads.kv_heads], 1)
        return query, keys, values

    def run(projected: Tensor, pages: Tensor, cos: Tensor, sin: Tensor, places: Tensor) -> Sequence[Tensor]:
        (query, keys, values), (key_pages, value_pages) = parts(projected), pages.unbind(1)
        if is_rotated:
            return triton.rotate_and_write(query, keys, values, cos, sin, key_pages, value_pages, places), pages
        triton_write.write_pages(keys, values, key_pages, value_pages, places)
        return (pages,)

    def exact(projected: Tensor, pages: Tensor, cos: Tensor, sin: Tensor, places: Tensor) -> Sequence[Tensor]:
        (query, keys, values), (key_pages, value_pages) = parts(projected), pages.unbind(1)
        if is_rotated:
            inputs = query, keys, values, cos, sin, key_pages, value_pages, places
            return rotate_and_write.rotate_and_write(*inputs), pages
        attention.write_pages(keys, values, key_pages, value_pages, places)
        return (pages,)

    moved = 2 * bytes_of(projected if is_rotated else projected[:, heads.heads :])
    return Operation(run, exact, (projected, pages, cos, sin, places), moved)


def write_latents(draw: Draw, heads: Heads, tokens: int) -> Operation:
    """Build a call that normalizes latents and writes them to their pages."""
    from baton.kernels.attention.mla_cache import triton

    pages, projected = heads.pages(draw, -(-tokens // PAGE) + 1), draw.normal(tokens, heads.width)
    weight, places = draw.normal(heads.rank or heads.width), draw.order(len(pages) * PAGE)[:tokens]

    def run(projected: Tensor, weight: Tensor, pages: Tensor, places: Tensor) -> Sequence[Tensor]:
        triton.write_latents(projected, weight, 1e-6, pages[:, 0], places)
        return (pages,)

    def exact(projected: Tensor, weight: Tensor, pages: Tensor, places: Tensor) -> Sequence[Tensor]:
        latents.write_latents(projected, weight, 1e-6, pages[:, 0], places)
        return (pages,)

    return Operation(run, exact, (projected, weight, pages, places), 2 * bytes_of(projected))


def rotate(draw: Draw, heads: Heads, tokens: int) -> Operation:
    """Build a call that rotates queries."""
    from baton.kernels.attention.rotary import triton

    x, (cos, sin) = heads.projected(draw, tokens)[:, : heads.heads], heads.angles(draw, tokens)

    def run(x: Tensor, cos: Tensor, sin: Tensor) -> Sequence[Tensor]:
        return (triton.rotate(x, cos, sin),)

    def exact(x: Tensor, cos: Tensor, sin: Tensor) -> Sequence[Tensor]:
        return (rotary.rotate(x, cos, sin),)

    return Operation(run, exact, (x, cos, sin), 2 * bytes_of(x) + bytes_of(cos, sin))
