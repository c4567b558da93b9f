"""The KV of a sequence by page, as in the pool, and by token, as in files.

numpy makes the copies: torch would start a team of threads for the calling thread.
"""

from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from baton.models.batch import Pools


@dataclass(frozen=True, slots=True)
class KvSection:
    """Where one page tensor lies in a page."""

    begin: int  # its first byte in a page
    token: int  # bytes of one token's entry
    shape: tuple[int, ...]  # of one token's entry
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The page tensors of a model, and where each lies in a page."""

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

    def by_token(self, blocks: Tensor, position: int) -> list[Tensor]:
        """Return [position, ...] for each page tensor, copied from `blocks`, uint8 [pages, bytes]."""
        pages, found = blocks.numpy(), []
        for section in self.sections:
            part = pages[:, section.begin : section.begin + section.token * self.page_size]
            entries = np.ascontiguousarray(part).reshape(-1, section.token)[:position]
            found.append(torch.from_numpy(entries.reshape(-1)).view(section.dtype).view(position, *section.shape))
        return found

    def to_pages(self, kv: list[Tensor], position: int, blocks: Tensor) -> None:
        """Copy `kv`, as `by_token` returns it, to `blocks`. Raise ValueError if its dtypes or shapes are others."""
        layout = [(section.dtype, (position, *section.shape)) for section in self.sections]
        if [(tensor.dtype, tuple(tensor.shape)) for tensor in kv] != layout:
            raise ValueError("the KV is not of this model")
        pages, size = blocks.numpy(), self.page_size
        for section, tensor in zip(self.sections, kv, strict=True):
            entries = tensor.contiguous().view(-1).view(torch.uint8).numpy().reshape(-1, section.token)
            for page in range(len(pages)):
                part = entries[page * size : (page + 1) * size].reshape(-1)
                pages[page, section.begin : section.begin + len(part)] = part
