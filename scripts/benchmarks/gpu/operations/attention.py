"""Attention over pages, and what lies before it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from baton.kernels.attention.mla_cache import reference as latents
from baton.kernels.attention.paged import reference as attention
from baton.kernels.attention.rotary import reference as rotary
from baton.kernels.attention.rotate_and_write import reference as rotate_and_write
from scripts.benchmarks.gpu.operation import Draw, Operation, bytes_of

PAGE = 16


@dataclass(frozen=True)
class Heads:
    """rank: of latents, which are keys, and whose first columns are the values."""

    heads: int = 32
    kv_heads: int = 8
    width: int = 128
    rank: int | None = None

    def pages(self, draw: Draw, count: int) -> Tensor:
        """[count, 2, PAGE, kv_heads, width]: keys and values of one layer of two; of latents [count, 1, …]."""
        return draw.normal(count, 2, 2 if self.rank is None else 1, PAGE, self.kv_heads, self.width)[:, 1]

    def keys_and_values(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        keys = pages[:, 0]
        return keys, pages[:, 1] if self.rank is None else keys[..., : self.rank]

    def projected(self, draw: Draw, tokens: int) -> Tensor:
        return draw.normal(tokens, self.heads + 2 * self.kv_heads, self.width)

    def angles(self, draw: Draw, tokens: int) -> tuple[Tensor, Tensor]:
        """Their cosines and sines, which both halves of a head share."""
        drawn = draw.uniform(-3.0, 3.0, tokens, 1, self.width // 2).repeat(1, 1, 2)
        return drawn.cos(), drawn.sin()


def attend(draw: Draw, heads: Heads, prompts: Sequence[tuple[int, int]], rows: Sequence[int] = ()) -> Operation:
    """prompts: (start, length) of each; rows: the positions of those that decode."""
    from baton.kernels.attention.paged import triton

    starts, lengths = [*(start for start, _ in prompts), *rows], [*(length for _, length in prompts), *[1] * len(rows)]
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    width = -(-max(ends) // PAGE)
    pages = heads.pages(draw, len(ends) * width)
    table = draw.order(len(pages)).view(len(ends), width).int()
    offsets = torch.tensor([0, *accumulate(lengths)]).to(draw.device)
    begin, scale, longest = torch.tensor(starts).to(draw.device), heads.width**-0.5, max(lengths)
    query = heads.projected(draw, sum(lengths))[:, : heads.heads]

    def run(query: Tensor, pages: Tensor, *layout: Tensor) -> Sequence[Tensor]:
        kept = heads.keys_and_values(pages)
        return (triton.paged_attention(query, *kept, *layout, scale, len(prompts), longest),)

    def exact(query: Tensor, pages: Tensor, *layout: Tensor) -> Sequence[Tensor]:
        return (attention.paged_attention(query, *heads.keys_and_values(pages), *layout, scale),)

    seen = sum(length * start + length * (length + 1) // 2 for start, length in zip(starts, lengths, strict=True))
    of_position = bytes_of(pages) // len(pages) // PAGE
    columns = heads.width + (heads.rank or heads.width)
    moved = bytes_of(query) * columns // heads.width + sum(ends) * of_position
    return Operation(run, exact, (query, pages, table, offsets, begin), moved, 2 * seen * heads.heads * columns)


def write(draw: Draw, heads: Heads, tokens: int, is_rotated: bool) -> Operation:
    """Keys and values to their pages, query and keys rotated before or not."""
    from baton.kernels.attention.paged import triton as attention_triton
    from baton.kernels.attention.rotate_and_write import triton

    pages, projected = heads.pages(draw, -(-tokens // PAGE) + 1), heads.projected(draw, tokens)
    places = draw.order(len(pages) * PAGE)[:tokens]
    cos, sin = heads.angles(draw, tokens)

    def parts(projected: Tensor, pages: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        return projected.split([heads.heads, heads.kv_heads, heads.kv_heads], 1), pages.unbind(1)

    def run(projected: Tensor, pages: Tensor, cos: Tensor, sin: Tensor, places: Tensor) -> Sequence[Tensor]:
        (query, keys, values), kept = parts(projected, pages)
        if is_rotated:
            return triton.rotate_and_write(query, keys, values, cos, sin, *kept, places), pages
        attention_triton.write_pages(keys, values, *kept, places)
        return (pages,)

    def exact(projected: Tensor, pages: Tensor, cos: Tensor, sin: Tensor, places: Tensor) -> Sequence[Tensor]:
        (query, keys, values), kept = parts(projected, pages)
        if is_rotated:
            return rotate_and_write.rotate_and_write(query, keys, values, cos, sin, *kept, places), pages
        attention.write_pages(keys, values, *kept, places)
        return (pages,)

    moved = 2 * bytes_of(projected if is_rotated else projected[:, heads.heads :])
    return Operation(run, exact, (projected, pages, cos, sin, places), moved)


def write_latents(draw: Draw, heads: Heads, tokens: int) -> Operation:
    """Latents, normed, to their pages."""
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
    from baton.kernels.attention.rotary import triton

    x, (cos, sin) = heads.projected(draw, tokens)[:, : heads.heads], heads.angles(draw, tokens)

    def run(x: Tensor, cos: Tensor, sin: Tensor) -> Sequence[Tensor]:
        return (triton.rotate(x, cos, sin),)

    def exact(x: Tensor, cos: Tensor, sin: Tensor) -> Sequence[Tensor]:
        return (rotary.rotate(x, cos, sin),)

    return Operation(run, exact, (x, cos, sin), 2 * bytes_of(x) + bytes_of(cos, sin))
