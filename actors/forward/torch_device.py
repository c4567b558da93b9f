"""The torch device: per-row arrays that live on the device, and the step that runs a batch over them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from actors.forward.device import Work, WorkChunk
from actors.messages import Ran
from actors.requests import Request, RowLogprobs, TokenLogprob
from actors.storage import host_memory as host_states
from actors.storage.host_memory import HostStates
from kernels.sampling import (
    SamplingTensors,
    TokenCounts,
    apply_bias,
    apply_penalties,
    log_probabilities,
    log_probabilities_of,
    sample,
)
from models.batch import Batch, Decode, Model, Pools, Prefill, StateCheckpoint

LOGITS_ROWS = 128


@dataclass(slots=True)
class DeviceRow:
    """What the host keeps of a row.

    tokens: int64 [given] on the device. counts_index: of its token counts, if it is penalised.
    """

    grant: int
    request: Request
    tokens: Tensor
    page_count: int
    counts_index: int | None


@dataclass(slots=True)
class Draw:
    """One row that samples: the batch's token behind which it does, and the absolute position of what is drawn."""

    row: int
    batch_index: int
    position: int


class TorchDevice:
    """The Device that runs a model with torch: it keeps the rows' arrays, builds each batch, runs it and samples.

    All calls come from one thread. Sampled tokens stay on the device, in `_last_token`, and feed the next step.
    deliver: called with each step's Ran. host: where exported states go.
    """

    def __init__(
        self,
        model: Model,
        pools: Pools,
        max_running: int,
        max_model_len: int,
        deliver: Callable[[Ran], None],
        host: HostStates | None = None,
    ) -> None:
        device = pools.slots.device
        self._host = host if host is not None else HostStates()
        self.model, self.pools, self.torch_device = model, pools, device
        self._deliver = deliver
        self._rows: dict[int, DeviceRow] = {}
        per_row = -(-(max_model_len + 1) // pools.page_size) if pools.pages else 0
        self._pages = torch.zeros(max_running, per_row, dtype=torch.int32, device=device)
        self._slots = torch.zeros(max_running, dtype=torch.int64, device=device)
        self._last_token = torch.zeros(max_running, dtype=torch.int64, device=device)
        self._temperature = torch.zeros(max_running, dtype=torch.float32, device=device)
        self._top_k = torch.zeros(max_running, dtype=torch.int64, device=device)
        self._top_p = torch.ones(max_running, dtype=torch.float32, device=device)
        self._min_p = torch.zeros(max_running, dtype=torch.float32, device=device)
        self._seed = torch.zeros(max_running, dtype=torch.int64, device=device)
        self._counts = TokenCounts(model.vocab_size, device)

    def clear(self, slot: int) -> None:
        self.pools.clear(slot)

    def poison(self, slot: int) -> None:
        self.pools.poison(slot)

    def copy(self, source: int, target: int) -> None:
        self.pools.copy(source, target)

    def copy_page(self, source: int, target: int) -> None:
        self.pools.copy_page(source, target)

    def export(self, key: int, slot: int, pages: list[int], position: int) -> None:
        copy = None
        try:
            copy = host_states.export(self.pools, slot, pages, position)
        finally:
            self._host.put(key, copy)

    def fill(self, key: int, slot: int, pages: list[int], first_page: int) -> None:
        host_states.fill(self.pools, slot, pages, first_page, self._host.get(key))

    def drop(self, key: int) -> None:
        self._host.drop(key)

    def drop_all(self) -> None:
        self._host.clear()

    def open_row(self, row: int, grant: int, slot: int, request: Request, pages: list[int]) -> None:
        sampling = request.sampling
        tokens = torch.frombuffer(bytearray(request.tokens), dtype=torch.int32).to(self.torch_device, torch.int64)
        before = self._rows.pop(row, None)
        if before is not None and before.counts_index is not None:
            self._counts.close(before.counts_index)
        line = None
        if (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (1.0, 0.0, 0.0):
            line = self._counts.open(tokens[: request.prompt_len], tokens[request.prompt_len :])
        self._rows[row] = DeviceRow(grant, request, tokens, 0, line)
        self.extend_row(row, pages)
        self._slots[row] = slot
        self._temperature[row] = sampling.temperature
        self._top_k[row] = sampling.top_k
        self._top_p[row] = sampling.top_p
        self._min_p[row] = sampling.min_p
        self._seed[row] = sampling.seed

    def extend_row(self, row: int, pages: list[int]) -> None:
        opened = self._rows[row]
        if pages:
            self._pages[row, opened.page_count : opened.page_count + len(pages)] = self._tensor(pages, torch.int32)
        opened.page_count += len(pages)

    def run(self, work: Work) -> None:
        self._deliver(self._run(work))

    @torch.inference_mode()
    def _run(self, work: Work) -> Ran:
        torch.set_flush_denormal(True)  # Of this thread: states decay into numbers on which a CPU is slow.
        batch = self._batch(work)
        hidden = self.model.forward(batch, self.pools)
        self._keep_decode_checkpoints(work)
        prompt_logprobs = [p for chunk, at in _offsets(work) for p in self._prompt_logprobs(chunk, hidden[at:])]
        draws = list(_draws(work))
        tokens, logprobs = self._sample(draws, hidden) if draws else (torch.empty(0, dtype=torch.int64), [])
        sampled = tokens.to("cpu", torch.int32).numpy().tobytes()
        return Ran(work.step, sampled, logprobs, prompt_logprobs)

    # The batch

    def _batch(self, work: Work) -> Batch:
        chunks = [self._rows[c.row].tokens[c.start : c.stop] for c in work.chunks]
        positions = [torch.arange(c.start, c.stop, device=self.torch_device) for c in work.chunks]
        prefill = self._prefill(work) if work.chunks else None
        decode = None
        if work.decodes:
            rows, at = self._tensor(work.decodes), self._tensor(work.positions)
            decode = Decode(self._slots[rows], at, self._table(rows, max(work.positions) + 1))
            chunks.append(self._last_token[rows])
            positions.append(at)
        return Batch(torch.cat(chunks), torch.cat(positions), prefill, decode)

    def _prefill(self, work: Work) -> Prefill:
        offsets = [0]
        for chunk in work.chunks:
            offsets.append(offsets[-1] + chunk.stop - chunk.start)
        rows = self._tensor([chunk.row for chunk in work.chunks])
        segment = {chunk.row: index for index, chunk in enumerate(work.chunks)}
        checkpoints = [
            StateCheckpoint(segment[c.row], c.position, c.slot) for c in work.checkpoints if c.row in segment
        ]
        return Prefill(
            offsets=offsets,
            starts=[chunk.start for chunk in work.chunks],
            slots=self._slots[rows].tolist(),
            checkpoints=checkpoints,
            page_table=self._table(rows, max(chunk.stop for chunk in work.chunks)),
        )

    def _table(self, rows: Tensor, length: int) -> Tensor:
        """The page table of these rows, as wide as `length` positions need; of no width without pages."""
        return self._pages[rows, : -(-length // self.pools.page_size)]

    def _keep_decode_checkpoints(self, work: Work) -> None:
        """A decoding row's state stands at the wanted position when its step is done."""
        decoding = set(work.decodes)
        for checkpoint in work.checkpoints:
            if checkpoint.row in decoding:
                self.pools.copy(int(self._slots[checkpoint.row]), checkpoint.slot)

    # Sampling

    def _sample(self, draws: list[Draw], hidden: Tensor) -> tuple[Tensor, list[RowLogprobs]]:
        rows = self._tensor([draw.row for draw in draws])
        positions = self._tensor([draw.position for draw in draws])
        raw = self.model.logits(hidden[self._tensor([draw.batch_index for draw in draws])])
        reported = [i for i, draw in enumerate(draws) if self._rows[draw.row].request.logprobs is not None]
        kept = raw[self._tensor(reported)] if reported else raw[:0]
        logits = self._adjust(draws, raw)
        asked = [self._rows[draw.row].request.sampling for draw in draws]
        params = SamplingTensors(
            temperature=self._temperature[rows],
            top_k=self._top_k[rows],
            top_p=self._top_p[rows],
            min_p=self._min_p[rows],
            seed=self._seed[rows],
            position=positions,
            all_greedy=all(sampling.temperature == 0 for sampling in asked),
            any_truncated=any(sampling.top_k > 0 or sampling.top_p < 1 for sampling in asked),
        )
        tokens = sample(logits, params).tokens
        self._last_token[rows] = tokens
        self._count(draws, tokens)
        return tokens, self._logprobs([draws[i] for i in reported], kept, tokens[self._tensor(reported)])

    def _adjust(self, draws: list[Draw], logits: Tensor) -> Tensor:
        """Penalties, biases and bans, for the rows that ask for them."""
        penalised = [(i, self._rows[d.row]) for i, d in enumerate(draws) if self._rows[d.row].counts_index is not None]
        if penalised:
            at = self._tensor([i for i, _ in penalised])
            lines = self._tensor([row.counts_index for _, row in penalised])
            sampling = [row.request.sampling for _, row in penalised]
            logits[at] = apply_penalties(
                logits[at],
                self._counts.prompt_seen[lines],
                self._counts.output_counts[lines],
                self._tensor([s.repetition_penalty for s in sampling], torch.float32),
                self._tensor([s.presence_penalty for s in sampling], torch.float32),
                self._tensor([s.frequency_penalty for s in sampling], torch.float32),
            )
        biases = [(i, *bias) for i, draw in enumerate(draws) for bias in self._biases(draw)]
        if biases:
            at_rows, ids, addends = zip(*biases, strict=True)
            apply_bias(logits, self._tensor(at_rows), self._tensor(ids), self._tensor(addends, torch.float32))
        return logits

    def _biases(self, draw: Draw) -> Iterator[tuple[int, float]]:
        request = self._rows[draw.row].request
        yield from request.sampling.logit_bias.items()
        if draw.position - request.prompt_len < request.stops.min_tokens:
            yield from ((token, float("-inf")) for token in request.stops.token_ids)

    def _count(self, draws: list[Draw], tokens: Tensor) -> None:
        lines = [(i, self._rows[draw.row].counts_index) for i, draw in enumerate(draws)]
        counted = [(i, line) for i, line in lines if line is not None]
        if counted:
            at, of = zip(*counted, strict=True)
            self._counts.add(self._tensor(of), tokens[self._tensor(at)])

    # Log probabilities

    def _logprobs(self, draws: list[Draw], logits: Tensor, tokens: Tensor) -> list[RowLogprobs]:
        if not draws:
            return []
        items = token_logprobs(logits, tokens, [self._rows[draw.row].request for draw in draws])
        return [
            RowLogprobs(self._rows[draw.row].grant, draw.position, [item])
            for draw, item in zip(draws, items, strict=True)
        ]

    def _prompt_logprobs(self, chunk: WorkChunk, hidden: Tensor) -> Iterator[RowLogprobs]:
        """Of the prompt tokens behind those of a chunk, a few rows of logits at a time."""
        row = self._rows[chunk.row]
        request = row.request
        begin = request.prompt_logprobs_from
        if begin is None:
            return
        if begin == 0 and chunk.start == 0:
            yield RowLogprobs(row.grant, 0, [TokenLogprob(int(row.tokens[0]), None, [])])
        first, last = max(chunk.start + 1, begin), min(chunk.stop + 1, request.prompt_len)
        for index in range(first, last, LOGITS_ROWS):
            stop = min(index + LOGITS_ROWS, last)
            logits = self.model.logits(hidden[index - 1 - chunk.start : stop - 1 - chunk.start])
            items = token_logprobs(logits, row.tokens[index:stop], [request] * (stop - index))
            yield RowLogprobs(row.grant, index, items)

    def _tensor(self, values: object, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.torch_device)


def survives(error: Exception) -> bool:
    """Whether the device can go on after this error of one call."""
    return not isinstance(error, torch.AcceleratorError)


def token_logprobs(logits: Tensor, tokens: Tensor, requests: list[Request]) -> list[TokenLogprob]:
    """The log probability of tokens[i] under logits[i], with what else requests[i] wants to know."""
    wanted = [request.logprobs or 0 for request in requests]
    chosen, values, ids = log_probabilities(logits, tokens, max(wanted))
    asked = asked_logprobs(logits, [request.logprob_ids for request in requests])
    rows = zip(tokens.tolist(), chosen.tolist(), values.tolist(), ids.tolist(), wanted, asked, strict=True)
    return [TokenLogprob(token, lp, list(zip(i[:n], v[:n], strict=True)), of) for token, lp, v, i, n, of in rows]


def asked_logprobs(logits: Tensor, asked: list[tuple[int, ...]]) -> list[list[float]]:
    """The log probabilities of the ids asked[i] under logits[i]."""
    longest = max(map(len, asked))
    if longest == 0:
        return [[] for _ in asked]
    rows = [i for i, ids in enumerate(asked) if ids]
    padded = [[*asked[i], *[0] * (longest - len(asked[i]))] for i in rows]
    of = torch.tensor(padded, dtype=torch.int64, device=logits.device)
    found = dict(zip(rows, log_probabilities_of(logits[rows], of).tolist(), strict=True))
    return [found[i][: len(ids)] if ids else [] for i, ids in enumerate(asked)]


def _offsets(work: Work) -> Iterator[tuple[WorkChunk, int]]:
    """Each chunk with the index of its first token in the batch."""
    at = 0
    for chunk in work.chunks:
        yield chunk, at
        at += chunk.stop - chunk.start


def _draws(work: Work) -> Iterator[Draw]:
    for chunk, at in _offsets(work):
        if chunk.samples:
            yield Draw(chunk.row, at + chunk.stop - chunk.start - 1, chunk.stop)
    prefilled = sum(chunk.stop - chunk.start for chunk in work.chunks)
    for index, (row, position) in enumerate(zip(work.decodes, work.positions, strict=True)):
        yield Draw(row, prefilled + index, position + 1)
