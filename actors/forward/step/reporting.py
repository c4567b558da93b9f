"""Reports of a step: the log probabilities that requests ask for, enqueued with the step and read when it is over."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from baton.actors.forward.device import Work, WorkChunk
from baton.actors.forward.step.drawing import Draws, offsets_of
from baton.actors.forward.step.packing import Inbox
from baton.actors.forward.step.rows import DeviceRow, RowTable
from baton.actors.forward.streams import Stream
from baton.actors.requests import Request, RowLogprobs, TokenLogprob
from baton.kernels.sampling import log_probabilities, log_probabilities_of
from baton.models.batch import Model

# Most prompt tokens whose logits are computed at once for their log probabilities: bounds the memory of a step.
LOGITS_ROWS = 128


@dataclass(frozen=True, slots=True)
class CopiedLogprobs:
    """Log probabilities of n tokens, in host memory once the step is over."""

    requests: list[Request]  # [n]
    tokens: Tensor  # int64 [n]
    chosen: Tensor  # [n]: the log probability of each token
    values: Tensor  # [n, top]: the log probabilities of the most likely tokens
    ids: Tensor  # [n, top]: the most likely tokens
    others: Tensor  # [n, most]: the log probabilities of the tokens in each request's logprob_ids, padded

    def items(self) -> list[TokenLogprob]:
        """Return the log probabilities. Call when the step is over."""
        columns = (self.tokens, self.chosen, self.values, self.ids, self.others)
        rows = zip(*(tensor.tolist() for tensor in columns), self.requests, strict=True)
        return [_item(*of_row) for of_row in rows]


@dataclass(frozen=True, slots=True)
class TokenReports:
    """The requests of n tokens whose log probabilities are reported, and the logprob_ids of these requests."""

    ids: Tensor | None  # int64 [n, most]: each request's logprob_ids, padded to the longest; None if no request has any
    requests: list[Request]  # [n]

    def enqueue(self, logits: Tensor, tokens: Tensor, stream: Stream) -> CopiedLogprobs:
        """Enqueue the log probabilities and their copies to host memory.

        logits: float32 [n, vocabulary], before bias, penalties and temperature.
        tokens: int64 [n].
        """
        top = max(request.logprobs or 0 for request in self.requests)
        chosen, values, ids = log_probabilities(logits, tokens, top)
        others = values[:, :0] if self.ids is None else log_probabilities_of(logits, self.ids)
        copies = [to_host(tensor, stream) for tensor in (tokens, chosen, values, ids, others)]
        return CopiedLogprobs(self.requests, *copies)


@dataclass(frozen=True, slots=True)
class DrawReports:
    """The reports of the drawn tokens."""

    draws: Tensor | None  # int64: the draws with a report; None if there are none
    reports: TokenReports
    of: list[tuple[int, int]]  # grant and position of each report

    def copy_logits(self, logits: Tensor) -> Tensor | None:
        """Enqueue a copy of the logits of the draws that report, before they are adjusted."""
        return None if self.draws is None else logits[self.draws]

    def enqueue(self, logits: Tensor | None, tokens: Tensor, stream: Stream) -> CopiedLogprobs | None:
        """Enqueue the reports. logits: the result of `copy_logits`. tokens: int64 [draws]."""
        if self.draws is None or logits is None:
            return None
        return self.reports.enqueue(logits, tokens[self.draws], stream)


@dataclass(frozen=True, slots=True)
class PromptReport:
    """The reports of consecutive prompt tokens of one grant."""

    grant: int
    first: int  # index in the prompt of the first reported token
    at: int  # index of the hidden state that predicts this first token; the next states predict the next tokens
    tokens: Tensor  # int64 [n]
    reports: TokenReports

    def enqueue(self, hidden: Tensor, model: Model, stream: Stream) -> CopiedLogprobs:
        """Enqueue the reports. hidden: the hidden states of the step's batch."""
        logits = model.logits(hidden[self.at : self.at + len(self.tokens)])
        return self.reports.enqueue(logits, self.tokens, stream)


def pack_reports(inbox: Inbox, draws: Draws, table: RowTable) -> DrawReports:
    """Pack the reports of a step's drawn tokens."""
    rows = [table[row] for row in draws.rows]
    reporting = [i for i, row in enumerate(rows) if row.request.logprobs is not None]
    reports = _pack_token_reports(inbox, [rows[i].request for i in reporting])
    grants = [(rows[i].grant, draws.positions[i]) for i in reporting]
    return DrawReports(inbox.put(reporting) if reporting else None, reports, grants)


def pack_prompts(inbox: Inbox, work: Work, table: RowTable) -> list[PromptReport]:
    """Pack reports of the prompt tokens that the chunks' hidden states predict, at most LOGITS_ROWS tokens each."""
    return [prompt for chunk, offset in offsets_of(work) for prompt in _prompts(inbox, chunk, offset, table[chunk.row])]


def _prompts(inbox: Inbox, chunk: WorkChunk, offset: int, row: DeviceRow) -> Iterator[PromptReport]:
    """Pack the reports of one chunk. offset: the index of the chunk's first token in the batch."""
    begin = row.request.prompt_logprobs_from
    if begin is None:
        return
    # The hidden state of a token predicts the next token.
    end = min(chunk.stop + 1, row.request.prompt_len)
    for first in range(max(chunk.start + 1, begin), end, LOGITS_ROWS):
        tokens = row.tokens[first : min(first + LOGITS_ROWS, end)]
        reports = _pack_token_reports(inbox, [row.request] * len(tokens))
        yield PromptReport(row.grant, first, offset + first - 1 - chunk.start, inbox.put(tokens), reports)


def first_tokens(work: Work, table: RowTable) -> list[RowLogprobs]:
    """Return the reports of prompts' first tokens, which have no log probability."""
    rows = [table[chunk.row] for chunk in work.chunks if chunk.start == 0]
    return [
        RowLogprobs(row.grant, 0, [TokenLogprob(int(row.tokens[0]), None, [])])
        for row in rows
        if row.request.prompt_logprobs_from == 0
    ]


def _pack_token_reports(inbox: Inbox, requests: list[Request]) -> TokenReports:
    most = max((len(request.logprob_ids) for request in requests), default=0)
    if not most:
        return TokenReports(None, requests)
    ids = np.zeros((len(requests), most), np.int64)
    for line, request in zip(ids, requests, strict=True):
        line[: len(request.logprob_ids)] = request.logprob_ids
    return TokenReports(inbox.put(ids), requests)


def to_host(tensor: Tensor, stream: Stream) -> Tensor:
    """Enqueue a copy to new host memory. A CPU's tensor is returned as it is."""
    if tensor.is_cpu:
        return tensor
    host = stream.host_buffer(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
    if tensor.numel():
        stream.download(tensor.contiguous(), host)
    return host


def _item(
    token: int, chosen: float, values: list[float], ids: list[int], others: list[float], request: Request
) -> TokenLogprob:
    """Return one token's report. Copied rows are as long as the step's longest: keep what this request asks for."""
    top = list(zip(ids, values, strict=True))[: request.logprobs or 0]
    return TokenLogprob(token, chosen, top, others[: len(request.logprob_ids)])
