"""The rows of the running batch: what the host knows of them, and what lies on the device."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.actors.forward.step.packing import Inbox, Packing, Section
from baton.actors.requests import Request
from baton.models.batch import Pools


@dataclass(slots=True)
class DeviceRow:
    """tokens: int32 [given], those that the request came with. counts_index: of its token counts, if penalised."""

    grant: int
    request: Request
    tokens: NDArray[np.int32]
    page_count: int
    counts_index: int | None

    @property
    def is_plain(self) -> bool:
        """Whether it has no penalties, biases or bans, and reports no log probabilities."""
        request = self.request
        bans = request.stops.min_tokens > 0 and request.stops.token_ids
        reports = request.logprobs is not None or request.prompt_logprobs_from is not None
        return not (self.counts_index is not None or request.sampling.logit_bias or bans or reports)


class RowTable:
    """Rows by index; one more than can run, `padding`, whose slot and page are the pools' last.

    The host's arrays are of all rows, the current values. What is large, or known to the device alone, lies there:
    `pages`, which follows the host's with the next step, and `last_token`, int64, what each row drew last.
    """

    def __init__(self, rows: int, max_model_len: int, pools: Pools) -> None:
        self._device = pools.slots.device
        self.padding = rows
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
        self.last_token = torch.zeros(rows + 1, dtype=torch.int64, device=self._device)
        self._moved: list[tuple[int, int, int]] = []

    @cached_property
    def pages(self) -> Tensor:
        """int32 [rows, pages]: made on the device's thread, for it is large enough that torch fills it in parallel.

        A second thread with a team of its own would be more threads than processors for libgomp, which then lets none
        of them spin: each loop of a step would begin with waking someone.
        """
        pages = torch.zeros(self.host_pages.shape, dtype=torch.int32, device=self._device)
        pages[self.padding] = self._padding_page
        return pages

    @property
    def width(self) -> int:
        """Entries of a row's page table."""
        return self.host_pages.shape[1]

    def __getitem__(self, row: int) -> DeviceRow:
        return self.rows[row]

    def open(self, row: int, opened: DeviceRow, slot: int) -> None:
        sampling = opened.request.sampling
        self.rows[row] = opened
        self.slots[row] = slot
        self.is_plain[row] = opened.is_plain
        self.temperature[row], self.seed[row] = sampling.temperature, sampling.seed
        self.top_k[row], self.top_p[row], self.min_p[row] = sampling.top_k, sampling.top_p, sampling.min_p

    def extend(self, row: int, pages: Sequence[int]) -> None:
        opened = self.rows[row]
        first, end = opened.page_count, opened.page_count + len(pages)
        self.host_pages[row, first:end] = pages
        opened.page_count = end
        if pages:
            self._moved.append((row, first, end))

    def pack(self, packing: Packing) -> "PageUpdate | None":
        """What of the page table the device does not have yet."""
        if not self._moved:
            return None
        places = np.concatenate([np.arange(row * self.width + a, row * self.width + b) for row, a, b in self._moved])
        return PageUpdate(packing.put(places), packing.put(self.host_pages.reshape(-1)[places], torch.int32))

    def update(self, update: "PageUpdate", inbox: Inbox) -> None:
        """Enqueue what was packed; behind it the device's table is the host's."""
        self.pages.view(-1).index_copy_(0, inbox.view(update.places), inbox.view(update.pages))
        self._moved.clear()


@dataclass(frozen=True, slots=True)
class PageUpdate:
    """places: in the flattened table."""

    places: Section
    pages: Section
