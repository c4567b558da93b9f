"""Log probabilities of a step: enqueued with it, read on the host when it is over."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from baton.actors.forward.device import Work, WorkChunk
from baton.actors.forward.step.drawing import Draws, offsets_of
from baton.actors.forward.step.packing import Inbox, Packing, Section
from baton.actors.forward.step.rows import DeviceRow, RowTable
from baton.actors.forward.streams import Stream
from baton.actors.requests import Request, RowLogprobs, TokenLogprob
from baton.kernels.sampling import log_probabilities, log_probabilities_of
from baton.models.batch import Model

LOGITS_ROWS = 128


@dataclass(frozen=True, slots=True)
class CopiedLogprobs:
    """Of n rows, in host memory once the step is over.

    tokens [n], those whose log probability is `chosen` [n]; values and ids [n, top] of the best; asked [n, most].
    """

    requests: list[Request]
    tokens: Tensor
    chosen: Tensor
    values: Tensor
    ids: Tensor
    asked: Tensor

    def items(self) -> list[TokenLogprob]:
        given = (self.tokens, self.chosen, self.values, self.ids, self.asked)
        rows = zip(*(tensor.tolist() for tensor in given), self.requests, strict=True)
        return [_item(*of_row) for of_row in rows]


@dataclass(frozen=True, slots=True)
class PackedAsked:
    """ids: int64 [n, most], of which each row's own come first; none if nobody asks for any."""

    ids: Section | None
    requests: list[Request]

    def enqueue(self, logits: Tensor, tokens: Tensor, stream: Stream, inbox: Inbox) -> CopiedLogprobs:
        """logits: float32 [n, V], before bias, penalties and temperature; tokens: int64 [n]."""
        top = max(request.logprobs or 0 for request in self.requests)
        chosen, values, ids = log_probabilities(logits, tokens, top)
        asked = log_probabilities_of(logits, inbox.view(self.ids)) if self.ids else values[:, :0]
        copies = [to_host(tensor, stream) for tensor in (tokens, chosen, values, ids, asked)]
        return CopiedLogprobs(self.requests, *copies)


@dataclass(frozen=True, slots=True)
class PackedReports:
    """at: which draws report; None if none does. of: their grants and positions."""

    at: Section | None
    asked: PackedAsked
    of: list[tuple[int, int]]

    def keep(self, logits: Tensor, inbox: Inbox) -> Tensor | None:
        """The rows of those that report, before they are adjusted."""
        return logits[inbox.view(self.at)] if self.at else None

    def enqueue(self, kept: Tensor | None, tokens: Tensor, stream: Stream, inbox: Inbox) -> CopiedLogprobs | None:
        if self.at is None or kept is None:
            return None
        return self.asked.enqueue(kept, tokens[inbox.view(self.at)], stream, inbox)


@dataclass(frozen=True, slots=True)
class PackedPrompt:
    """Prompt tokens of a grant, from index `first` on; the hidden states from `at` on are those before them."""

    grant: int
    first: int
    at: int
    tokens: Section
    asked: PackedAsked

    def enqueue(self, hidden: Tensor, model: Model, stream: Stream, inbox: Inbox) -> CopiedLogprobs:
        tokens = inbox.view(self.tokens)
        logits = model.logits(hidden[self.at : self.at + len(tokens)])
        return self.asked.enqueue(logits, tokens, stream, inbox)


def pack_reports(packing: Packing, draws: Draws, table: RowTable) -> PackedReports:
    rows = [table[row] for row in draws.rows]
    reporting = [i for i, row in enumerate(rows) if row.request.logprobs is not None]
    asked = _pack_asked(packing, [rows[i].request for i in reporting])
    grants = [(rows[i].grant, draws.positions[i]) for i in reporting]
    return PackedReports(packing.put(reporting) if reporting else None, asked, grants)


def pack_prompts(packing: Packing, work: Work, table: RowTable) -> list[PackedPrompt]:
    """Of the prompt tokens behind those of the chunks, a few rows of logits at a time."""
    return [
        prompt for chunk, offset in offsets_of(work) for prompt in _prompts(packing, chunk, offset, table[chunk.row])
    ]


def _prompts(packing: Packing, chunk: WorkChunk, offset: int, row: DeviceRow) -> Iterator[PackedPrompt]:
    begin = row.request.prompt_logprobs_from
    if begin is None:
        return
    end = min(chunk.stop + 1, row.request.prompt_len)
    for first in range(max(chunk.start + 1, begin), end, LOGITS_ROWS):
        tokens = row.tokens[first : min(first + LOGITS_ROWS, end)]
        asked = _pack_asked(packing, [row.request] * len(tokens))
        yield PackedPrompt(row.grant, first, offset + first - 1 - chunk.start, packing.put(tokens), asked)


def first_tokens(work: Work, table: RowTable) -> list[RowLogprobs]:
    """Of prompts from whose first token on log probabilities are wanted: that one has none."""
    rows = [table[chunk.row] for chunk in work.chunks if chunk.start == 0]
    return [
        RowLogprobs(row.grant, 0, [TokenLogprob(int(row.tokens[0]), None, [])])
        for row in rows
        if row.request.prompt_logprobs_from == 0
    ]


def _pack_asked(packing: Packing, requests: list[Request]) -> PackedAsked:
    most = max((len(request.logprob_ids) for request in requests), default=0)
    if not most:
        return PackedAsked(None, requests)
    ids = np.zeros((len(requests), most), np.int64)
    for line, request in zip(ids, requests, strict=True):
        line[: len(request.logprob_ids)] = request.logprob_ids
    return PackedAsked(packing.put(ids), requests)


def to_host(tensor: Tensor, stream: Stream) -> Tensor:
    """Enqueue a copy to host memory of its own; what a CPU has made is there already."""
    if tensor.is_cpu:
        return tensor
    host = stream.host_buffer(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
    if tensor.numel():
        stream.download(tensor.contiguous(), host)
    return host


def _item(
    token: int, chosen: float, values: list[float], ids: list[int], asked: list[float], request: Request
) -> TokenLogprob:
    """As many as this request wants of what was copied for all."""
    top = list(zip(ids, values, strict=True))[: request.logprobs or 0]
    return TokenLogprob(token, chosen, top, asked[: len(request.logprob_ids)])
