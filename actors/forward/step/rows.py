"""The rows of the running batch: what the host records of them, and what the device keeps."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.actors.forward.step.packing import Inbox
from baton.actors.requests import Request
from baton.models.batch import Pools


@dataclass(slots=True)
class DeviceRow:
    """A request that has a row."""

    grant: int
    request: Request
    tokens: NDArray[np.int32]  # the tokens that the request was admitted with
    page_count: int  # pages in the row's page table
    counts_index: int | None  # the row's index in TokenCounts; None without penalties
    pooled: Tensor | None = None  # float64 [hidden]: the sum so far of the hidden states that the request pools

    @property
    def is_plain(self) -> bool:
        """Whether the request has no penalties, biases or banned tokens, and reports no log probabilities."""
        request = self.request
        bans = request.stops.min_tokens > 0 and request.stops.token_ids
        reports = request.logprobs is not None or request.prompt_logprobs_from is not None
        return not (self.counts_index is not None or request.sampling.logit_bias or bans or reports)


class RowTable:
    """All rows, by index, and one more for padding, which uses the last slot and the last page of the pools.

    The host has the current values of all rows. The device has only `pages`, which is large and follows `host_pages`
    with each step's upload, and `last_token`, which only the device knows.
    """

    def __init__(self, rows: int, max_model_len: int, pools: Pools) -> None:
        self._device = pools.slots.device
        self.padding = rows  # the index of the padding row
        self.rows: dict[int, DeviceRow] = {}
        self.slots = np.zeros(rows + 1, np.int64)
        self.is_plain = np.ones(rows + 1, np.bool_)
        self.seed = np.zeros(rows + 1, np.int64)
        self.top_k = np.zeros(rows + 1, np.int64)
        self.temperature = np.zeros(rows + 1, np.float32)
        self.top_p = np.ones(rows + 1, np.float32)
        self.min_p = np.zeros(rows + 1, np.float32)
        self.host_pages = np.zeros((rows + 1, pools.pages_for(max_model_len + 1)), np.int32)
        self.slots[self.padding] = len(pools.slots) - 1
        self._padding_page = max(len(pools.blocks) - 1, 0)
        self.host_pages[self.padding] = self._padding_page
        self.last_token = torch.zeros(rows + 1, dtype=torch.int64, device=self._device)  # the newest drawn token
        self._stale: list[tuple[int, int, int]] = []  # (row, begin, end) of entries that the device does not have yet

    @cached_property
    def pages(self) -> Tensor:
        """The page table on the device, int32 [rows, pages].

        Created on first use, so that the device's thread creates it. torch fills a table of this size in parallel, and
        libgomp gives each thread that runs parallel loops its own team of threads. If two threads had teams, there
        would be more threads than processors. libgomp's threads would then sleep instead of spinning, and each
        parallel loop of a step would have to wake them.
        """
        pages = torch.zeros(self.host_pages.shape, dtype=torch.int32, device=self._device)
        pages[self.padding] = self._padding_page
        return pages

    @property
    def width(self) -> int:
        """Entries of a row's page table; 0 without attention."""
        return self.host_pages.shape[1]

    def __getitem__(self, row: int) -> DeviceRow:
        return self.rows[row]

    def open(self, row: int, opened: DeviceRow, slot: int) -> None:
        """Give a row to a request."""
        sampling = opened.request.sampling
        self.rows[row] = opened
        self.slots[row] = slot
        self.is_plain[row] = opened.is_plain
        self.temperature[row], self.seed[row] = sampling.temperature, sampling.seed
        self.top_k[row], self.top_p[row], self.min_p[row] = sampling.top_k, sampling.top_p, sampling.min_p

    def extend(self, row: int, pages: Sequence[int]) -> None:
        """Append pages to a row's page table."""
        opened = self.rows[row]
        first, end = opened.page_count, opened.page_count + len(pages)
        self.host_pages[row, first:end] = pages
        opened.page_count = end
        if pages:
            self._stale.append((row, first, end))

    def pack(self, inbox: Inbox) -> "PageUpdate | None":
        """Pack the entries of the page table that the device does not have yet."""
        if not self._stale:
            return None
        places = np.concatenate([np.arange(row * self.width + a, row * self.width + b) for row, a, b in self._stale])
        return PageUpdate(inbox.put(places), inbox.put(self.host_pages.reshape(-1)[places], torch.int32))

    def update(self, update: "PageUpdate") -> None:
        """Enqueue an update; after it the device's page table equals the host's."""
        self.pages.view(-1).index_copy_(0, update.places, update.pages)
        self._stale.clear()


@dataclass(frozen=True, slots=True)
class PageUpdate:
    """Entries of the page table to change."""

    places: Tensor  # int64: indices into the flattened page table
    pages: Tensor  # int32
