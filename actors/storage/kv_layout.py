"""The KV of a sequence in two layouts: by page, as in the pool, and by token, as in files.

A page holds a part of each of the model's *page tensors* (`models/batch.py:Pools.pages`). numpy copies between the
layouts, because torch would start a team of threads for the calling thread.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.models.batch import Pools


@dataclass(frozen=True, slots=True)
class KvSection:
    """The place of one page tensor's entries within the bytes of a page."""

    begin: int  # offset of the first entry, in bytes
    token: int  # bytes of one token's entry
    shape: tuple[int, ...]  # shape of one token's entry
    dtype: torch.dtype

    def nbytes(self, page_size: int) -> int:
        return self.token * page_size

    def part_of(self, pages: NDArray[np.uint8], page_size: int) -> NDArray[np.uint8]:
        """Return this section of pages, as a view. pages: [pages, page bytes]"""
        return pages[:, self.begin : self.begin + self.nbytes(page_size)]


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The layout of a page: the place of each page tensor's entries."""

    page_size: int
    sections: list[KvSection]

    @classmethod
    def of(cls, pools: Pools) -> "KvLayout":
        sections = []
        for tensor in pools.pages:
            shape = tuple(tensor.shape[2:])
            begin = (int(tensor.storage_offset())) * tensor.itemsize
            sections.append(KvSection(begin, prod(shape) * tensor.itemsize, shape, tensor.dtype))
        return cls(pools.page_size, sections)

    def by_token(self, blocks: Sequence[Tensor], position: int) -> list[Tensor]:
        """Return a tensor [position, ...] for each page tensor, copied from `blocks`.

        blocks: consecutive pages, uint8 [pages, page bytes] each
        """
        count, found = sum(map(len, blocks)), []
        for section in self.sections:
            entries = np.empty((count, section.nbytes(self.page_size)), np.uint8)
            for first, block in numbered(blocks):
                entries[first : first + len(block)] = section.part_of(block.numpy(), self.page_size)
            tokens = entries.reshape(-1, section.token)[:position]
            found.append(torch.from_numpy(tokens.reshape(-1)).view(section.dtype).view(position, *section.shape))
        return found

    def to_pages(self, kv: list[Tensor], position: int, blocks: Sequence[Tensor]) -> None:
        """Copy `kv`, in the form that `by_token` returns, to `blocks`. Raise ValueError for wrong dtypes or shapes."""
        layout = [(section.dtype, (position, *section.shape)) for section in self.sections]
        if [(tensor.dtype, tuple(tensor.shape)) for tensor in kv] != layout:
            raise ValueError("the KV is not of this model")
        for section, tensor in zip(self.sections, kv, strict=True):
            entries, width = tensor.contiguous().view(-1).view(torch.uint8).numpy(), section.nbytes(self.page_size)
            for first, block in numbered(blocks):
                part = entries[first * width : (first + len(block)) * width]
                whole, rest = divmod(len(part), width)
                pages = section.part_of(block.numpy(), self.page_size)
                pages[:whole] = part[: whole * width].reshape(whole, width)
                if rest:
                    pages[whole, :rest] = part[whole * width :]


def numbered(blocks: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Yield blocks of consecutive pages, each with the index of its first page."""
    first = 0
    for block in blocks:
        yield first, block
        first += len(block)
