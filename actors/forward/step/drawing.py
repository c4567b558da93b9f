"""Drawing a token for each row that samples: planned and packed on the host, enqueued over the logits."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from baton.actors.forward.device import Work, WorkChunk, WorkMask
from baton.actors.forward.step.drafting import fed_drafts
from baton.actors.forward.step.packing import Inbox
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
    """The rows of a step that sample a token, in the order of their logits. The index into these lists is a *draw*."""

    rows: list[int]
    at: list[int]  # the index in the batch of the token before the token to draw
    positions: list[int]  # the absolute position of the token to draw
    before: list[tuple[int, ...]]  # the drafts that the row has fed before the draw


@dataclass(frozen=True, slots=True)
class PackedDraws:
    """The inputs of a step's draws, as views of the inbox."""

    rows: Tensor  # int64 [draws]
    params: SamplingTensors


@dataclass(frozen=True, slots=True)
class Penalties:
    """The draws with penalties; each tensor has one element for each such draw."""

    draws: Tensor  # int64
    lines: Tensor  # int64: the index in TokenCounts of each draw's row
    repetition: Tensor  # float32
    presence: Tensor  # float32
    frequency: Tensor  # float32
    drafts: tuple[Tensor, Tensor] | None  # int64: indices into these tensors, each with a draft before that draw


@dataclass(frozen=True, slots=True)
class Biases:
    """Addends to single logits; each tensor has one element for each addend."""

    draws: Tensor  # int64
    tokens: Tensor  # int64
    addends: Tensor  # float32


@dataclass(frozen=True, slots=True)
class Masks:
    """The n draws of rows with a grammar, and the tokens that each grammar allows; V is the size of the vocabulary."""

    draws: Tensor  # int64 [n]
    words: Tensor  # int32 [n, ceil(V / 32)], as in RowMask


@dataclass(frozen=True, slots=True)
class Adjustments:
    """Changes of the logits before the draw, for the rows that need them; most steps have none."""

    penalties: Penalties | None = None
    biases: Biases | None = None
    masks: Masks | None = None

    def apply(self, logits: Tensor, counts: TokenCounts) -> None:
        """Enqueue the changes, in place. Masks come last, so that no bias allows a token that the grammar forbids."""
        if p := self.penalties:
            of_rows = p.repetition, p.presence, p.frequency
            if p.drafts is None:
                apply_penalties(logits, p.draws, counts.prompt_seen, counts.output_counts, p.lines, *of_rows)
            else:
                own = torch.arange(len(p.lines), device=p.lines.device)
                apply_penalties(logits, p.draws, *counts.after(p.lines, *p.drafts), own, *of_rows)
        if b := self.biases:
            apply_bias(logits, b.draws, b.tokens, b.addends)
        if m := self.masks:
            apply_masks(logits, m.draws, m.words)

    def count(self, tokens: Tensor, counts: TokenCounts, valid: Tensor | None) -> None:
        """Enqueue the counting of the drawn tokens, int64 [draws], for rows with penalties.

        valid: bool [draws], which of them count; None: all.
        """
        if p := self.penalties:
            counts.add(p.lines, tokens[p.draws], None if valid is None else valid[p.draws])


def draws_of(work: Work) -> Draws:
    """Return the draws of a step: chunks that end their prompt, then rows that decode, with a draw for each token."""
    chunks = [(chunk, offset + chunk.stop - chunk.start - 1) for chunk, offset in offsets_of(work) if chunk.samples]
    prefilled = sum(chunk.stop - chunk.start for chunk in work.chunks)
    rows, positions = work.decodes, [position + 1 for position in work.positions]
    before: list[tuple[int, ...]] = [()] * (len(chunks) + len(rows))
    if work.drafts:
        fed = fed_drafts(work)
        counts = [1 + len(tokens) for tokens in fed]
        rows = [row for row, count in zip(rows, counts, strict=True) for _ in range(count)]
        positions = [at for first, count in zip(positions, counts, strict=True) for at in range(first, first + count)]
        before = [()] * len(chunks) + [tokens[:number] for tokens in fed for number in range(1 + len(tokens))]
    return Draws(
        [chunk.row for chunk, _ in chunks] + rows,
        [last for _, last in chunks] + list(range(prefilled, prefilled + len(rows))),
        [chunk.stop for chunk, _ in chunks] + positions,
        before,
    )


def offsets_of(work: Work) -> Iterator[tuple[WorkChunk, int]]:
    """Yield each chunk with the index of its first token in the batch."""
    return zip(work.chunks, accumulate((c.stop - c.start for c in work.chunks), initial=0), strict=False)


def reported_tokens(sampled: Sampled) -> Tensor:
    """Return int64 [draws]: the tokens, and -1 where the logits were not finite."""
    return torch.where(sampled.finite, sampled.tokens, -1)


def pack_draws(inbox: Inbox, draws: Draws, table: RowTable, whole: bool = False) -> PackedDraws:
    """Pack the draws of a step.

    whole: pack all parameters even if all rows are greedy. Captured steps need that, because every array must have the
    same address in the inbox at each replay.
    """
    rows, temperature = draws.rows, table.temperature[draws.rows]
    at, all_greedy = inbox.put(rows), not temperature.any()
    if all_greedy and not whole:
        return PackedDraws(at, ALL_GREEDY)
    top_k, top_p = table.top_k[rows], table.top_p[rows]
    params = SamplingTensors(
        inbox.put(temperature, torch.float32),
        inbox.put(top_k),
        inbox.put(top_p, torch.float32),
        inbox.put(table.min_p[rows], torch.float32),
        inbox.put(table.seed[rows]),
        inbox.put(draws.positions),
        all_greedy,
        any_truncated=bool((top_k > 0).any() or (top_p < 1).any()),
    )
    return PackedDraws(at, params)


def pack_adjustments(inbox: Inbox, draws: Draws, table: RowTable, masks: Masks | None) -> Adjustments:
    """Pack the penalties and biases of the draws' requests; `masks` have been packed before."""
    of_rows = [(table[row].counts_index, table[row].request) for row in draws.rows]
    penalised = [(i, line, request) for i, (line, request) in enumerate(of_rows) if line is not None]
    positions = zip(of_rows, draws.positions, strict=True)
    biases = [(i, *bias) for i, ((_, request), at) in enumerate(positions) for bias in _biases(request, at)]
    drafts = [(at, token) for at, (i, _, _) in enumerate(penalised) for token in draws.before[i]]
    return Adjustments(_pack_penalties(inbox, penalised, drafts), _pack_biases(inbox, biases), masks)


def pack_masks(inbox: Inbox, draws: Draws, masks: Sequence[WorkMask]) -> Masks:
    """Pack the masks of some of a step's rows, at least one."""
    first = {row: draw for draw, row in reversed([*enumerate(draws.rows)])}  # a row's draws follow one another
    of = [first[mask.row] + number for mask in masks for number in range(1 + len(mask.ahead))]
    words = b"".join(words for mask in masks for words in (mask.words, *mask.ahead))
    return Masks(inbox.put(of), inbox.put(np.frombuffer(words, np.int32).reshape(len(of), -1), torch.int32))


def _pack_penalties(
    inbox: Inbox, penalised: list[tuple[int, int, Request]], drafts: list[tuple[int, int]]
) -> Penalties | None:
    """Pack penalties.

    penalised: the draw, index in TokenCounts, and request of each draw with penalties.
    drafts: indices into `penalised`, each with a draft before that draw.
    """
    if not penalised:
        return None
    sampling = [request.sampling for _, _, request in penalised]
    return Penalties(
        inbox.put([i for i, _, _ in penalised]),
        inbox.put([line for _, line, _ in penalised]),
        inbox.put([s.repetition_penalty for s in sampling], torch.float32),
        inbox.put([s.presence_penalty for s in sampling], torch.float32),
        inbox.put([s.frequency_penalty for s in sampling], torch.float32),
        (inbox.put([at for at, _ in drafts]), inbox.put([token for _, token in drafts])) if drafts else None,
    )


def _pack_biases(inbox: Inbox, biases: list[tuple[int, int, float]]) -> Biases | None:
    """Pack biases. biases: the draw, token and addend of each."""
    if not biases:
        return None
    draws, tokens, addends = zip(*biases, strict=True)
    return Biases(inbox.put(draws), inbox.put(tokens), inbox.put(addends, torch.float32))


def _biases(request: Request, position: int) -> Iterator[tuple[int, float]]:
    """Yield (token, addend to its logit) for the draw of the request's token at this position."""
    yield from request.sampling.logit_bias.items()
    # With a grammar, the mask forbids these tokens before min_tokens.
    if position - request.prompt_len < request.stops.min_tokens and not request.grammar:
        yield from ((token, float("-inf")) for token in request.stops.token_ids)
