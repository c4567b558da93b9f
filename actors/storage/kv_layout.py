"""The KV of a sequence as it lies in pages, and token by token.

Copied by numpy: torch would give the thread that asks a team of threads of its own.
"""

from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from baton.models.batch import Pools


@dataclass(frozen=True, slots=True)
class KvSection:
    """One page tensor. begin: its first byte in a page; token: bytes of a token; shape: of a token's entry."""

    begin: int
    token: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class KvLayout:
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
        """[position, ...] for each page tensor, out of uint8 [pages, bytes]."""
        pages, found = blocks.numpy(), []
        for section in self.sections:
            part = pages[:, section.begin : section.begin + section.token * self.page_size]
            entries = np.ascontiguousarray(part).reshape(-1, section.token)[:position]
            found.append(torch.from_numpy(entries.reshape(-1)).view(section.dtype).view(position, *section.shape))
        return found

    def to_pages(self, kv: list[Tensor], position: int, blocks: Tensor) -> None:
        """The other way round. Raises ValueError if `kv` is not what by_token gives."""
        wanted = [(section.dtype, (position, *section.shape)) for section in self.sections]
        if [(tensor.dtype, tuple(tensor.shape)) for tensor in kv] != wanted:
            raise ValueError("the KV is not of this model")
        pages, size = blocks.numpy(), self.page_size
        for section, tensor in zip(self.sections, kv, strict=True):
            entries = tensor.contiguous().view(-1).view(torch.uint8).numpy().reshape(-1, section.token)
            for page in range(len(pages)):
                part = entries[page * size : (page + 1) * size].reshape(-1)
                pages[page, section.begin : section.begin + len(part)] = part
