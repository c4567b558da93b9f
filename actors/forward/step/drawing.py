"""Drawing a token for each row that samples: planned on the host, and enqueued over the logits."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from baton.actors.forward.device import Work, WorkChunk, WorkMask
from baton.actors.forward.step.packing import Inbox, Packing, Section
from baton.actors.forward.step.rows import RowTable
from baton.actors.requests import Request
from baton.kernels.sampling import (
    ALL_GREEDY,
    Sampled,
    SamplingTensors,
    TokenCounts,
    apply_bias,
    apply_masks,
    apply_penalties,
)


@dataclass(frozen=True, slots=True)
class Draws:
    """The rows that sample, in this order: behind which of the batch's tokens, and the absolute positions drawn for."""

    rows: list[int]
    at: list[int]
    positions: list[int]


@dataclass(frozen=True, slots=True)
class PackedParameters:
    """Those of SamplingTensors."""

    temperature: Section
    top_k: Section
    top_p: Section
    min_p: Section
    seed: Section
    position: Section


@dataclass(frozen=True, slots=True)
class PackedDraws:
    """rows: their indices; parameters: None where they are all greedy."""

    rows: Section
    parameters: PackedParameters | None
    all_greedy: bool
    any_truncated: bool

    def params(self, inbox: Inbox) -> SamplingTensors:
        if not (given := self.parameters):
            return ALL_GREEDY
        return SamplingTensors(
            inbox.view(given.temperature),
            inbox.view(given.top_k),
            inbox.view(given.top_p),
            inbox.view(given.min_p),
            inbox.view(given.seed),
            inbox.view(given.position),
            self.all_greedy,
            self.any_truncated,
        )


@dataclass(frozen=True, slots=True)
class PackedPenalties:
    """at: which draws; lines: of their counts."""

    at: Section
    lines: Section
    repetition: Section
    presence: Section
    frequency: Section


@dataclass(frozen=True, slots=True)
class PackedBiases:
    rows: Section
    tokens: Section
    addends: Section


@dataclass(frozen=True, slots=True)
class PackedMasks:
    """at: which draws; words: int32 [n, ceil(V / 32)]."""

    at: Section
    words: Section


@dataclass(frozen=True, slots=True)
class PackedAdjustments:
    """For the rows that ask for it; most steps have none."""

    penalties: PackedPenalties | None = None
    biases: PackedBiases | None = None
    masks: PackedMasks | None = None

    def apply(self, logits: Tensor, counts: TokenCounts, inbox: Inbox) -> None:
        if p := self.penalties:
            at, lines = inbox.view(p.at), inbox.view(p.lines)
            of_rows = [inbox.view(section) for section in (p.repetition, p.presence, p.frequency)]
            apply_penalties(logits, at, counts.prompt_seen, counts.output_counts, lines, *of_rows)
        if b := self.biases:
            apply_bias(logits, inbox.view(b.rows), inbox.view(b.tokens), inbox.view(b.addends))
        if m := self.masks:
            apply_masks(logits, inbox.view(m.at), inbox.view(m.words))

    def count(self, tokens: Tensor, counts: TokenCounts, inbox: Inbox) -> None:
        """Of what was drawn, int64 [draws]."""
        if p := self.penalties:
            counts.add(inbox.view(p.lines), tokens[inbox.view(p.at)])


def draws_of(work: Work) -> Draws:
    """Of chunks that end their prompt, then of rows that decode."""
    chunks = [(chunk, offset + chunk.stop - chunk.start - 1) for chunk, offset in offsets_of(work) if chunk.samples]
    prefilled = sum(chunk.stop - chunk.start for chunk in work.chunks)
    return Draws(
        [chunk.row for chunk, _ in chunks] + work.decodes,
        [last for _, last in chunks] + list(range(prefilled, prefilled + len(work.decodes))),
        [chunk.stop for chunk, _ in chunks] + [position + 1 for position in work.positions],
    )


def offsets_of(work: Work) -> Iterator[tuple[WorkChunk, int]]:
    """Each chunk with the index of its first token in the batch."""
    return zip(work.chunks, accumulate((c.stop - c.start for c in work.chunks), initial=0), strict=False)


def told_of(sampled: Sampled) -> Tensor:
    """int64 [draws]: the tokens, -1 where the logits were not finite."""
    return torch.where(sampled.finite, sampled.tokens, -1)


def pack_draws(packing: Packing, draws: Draws, table: RowTable, whole: bool = False) -> PackedDraws:
    """whole: with parameters that nobody looks at."""
    rows, temperature = draws.rows, table.temperature[draws.rows]
    at, all_greedy = packing.put(rows), not temperature.any()
    if all_greedy and not whole:
        return PackedDraws(at, None, True, False)
    top_k, top_p = table.top_k[rows], table.top_p[rows]
    parameters = PackedParameters(
        packing.put(temperature, torch.float32),
        packing.put(top_k),
        packing.put(top_p, torch.float32),
        packing.put(table.min_p[rows], torch.float32),
        packing.put(table.seed[rows]),
        packing.put(draws.positions),
    )
    return PackedDraws(at, parameters, all_greedy, bool((top_k > 0).any() or (top_p < 1).any()))


def pack_adjustments(packing: Packing, draws: Draws, table: RowTable, masks: PackedMasks | None) -> PackedAdjustments:
    of_rows = [(table[row].counts_index, table[row].request) for row in draws.rows]
    penalised = [(i, line, request) for i, (line, request) in enumerate(of_rows) if line is not None]
    positions = zip(of_rows, draws.positions, strict=True)
    biases = [(i, *bias) for i, ((_, request), at) in enumerate(positions) for bias in _biases(request, at)]
    return PackedAdjustments(_pack_penalties(packing, penalised), _pack_biases(packing, biases), masks)


def pack_masks(packing: Packing, draws: Draws, masks: Sequence[WorkMask]) -> PackedMasks | None:
    if not masks:
        return None
    words = np.frombuffer(b"".join(mask.words for mask in masks), np.int32).reshape(len(masks), -1)
    draw_of = {row: i for i, row in enumerate(draws.rows)}
    return PackedMasks(packing.put([draw_of[mask.row] for mask in masks]), packing.put(words, torch.int32))


def _pack_penalties(packing: Packing, penalised: list[tuple[int, int, Request]]) -> PackedPenalties | None:
    if not penalised:
        return None
    sampling = [request.sampling for _, _, request in penalised]
    return PackedPenalties(
        packing.put([i for i, _, _ in penalised]),
        packing.put([line for _, line, _ in penalised]),
        packing.put([s.repetition_penalty for s in sampling], torch.float32),
        packing.put([s.presence_penalty for s in sampling], torch.float32),
        packing.put([s.frequency_penalty for s in sampling], torch.float32),
    )


def _pack_biases(packing: Packing, biases: list[tuple[int, int, float]]) -> PackedBiases | None:
    if not biases:
        return None
    rows, tokens, addends = zip(*biases, strict=True)
    return PackedBiases(packing.put(rows), packing.put(tokens), packing.put(addends, torch.float32))


def _biases(request: Request, position: int) -> Iterator[tuple[int, float]]:
    yield from request.sampling.logit_bias.items()
    if position - request.prompt_len < request.stops.min_tokens and not request.grammar:  # Its mask says that too.
        yield from ((token, float("-inf")) for token in request.stops.token_ids)
