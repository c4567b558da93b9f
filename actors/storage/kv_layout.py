"""The KV of a sequence in two layouts: by page, as in the pool, and by token, as in files.

A page holds a part of each of the model's *page tensors* (`models/batch.py:Pools.pages`). numpy copies between the
layouts, because torch would start a team of threads for the calling thread.
"""

from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from baton.models.batch import Pools


@dataclass(frozen=True, slots=True)
class KvSection:
    """The place of one page tensor's entries within the bytes of a page."""

    begin: int  # offset of the first entry, in bytes
    token: int  # bytes of one token's entry
    shape: tuple[int, ...]  # shape of one token's entry
    dtype: torch.dtype


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

    def by_token(self, blocks: Tensor, position: int) -> list[Tensor]:
        """Return a tensor [position, ...] for each page tensor, copied from `blocks`: uint8 [pages, page bytes]."""
        pages, found = blocks.numpy(), []
        for section in self.sections:
            part = pages[:, section.begin : section.begin + section.token * self.page_size]
            entries = np.ascontiguousarray(part).reshape(-1, section.token)[:position]
            found.append(torch.from_numpy(entries.reshape(-1)).view(section.dtype).view(position, *section.shape))
        return found

    def to_pages(self, kv: list[Tensor], position: int, blocks: Tensor) -> None:
        """Copy `kv`, in the form that `by_token` returns, to `blocks`. Raise ValueError for wrong dtypes or shapes."""
        layout = [(section.dtype, (position, *section.shape)) for section in self.sections]
        if [(tensor.dtype, tuple(tensor.shape)) for tensor in kv] != layout:
            raise ValueError("the KV is not of this model")
        pages, size = blocks.numpy(), self.page_size
        for section, tensor in zip(self.sections, kv, strict=True):
            entries = tensor.contiguous().view(-1).view(torch.uint8).numpy().reshape(-1, section.token)
            for page in range(len(pages)):
                part = entries[page * size : (page + 1) * size].reshape(-1)
                pages[page, section.begin : section.begin + len(part)] = part
