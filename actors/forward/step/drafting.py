"""Drafts in a step: what rows feed after their last token, what states consume first, and which draws are valid."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from baton.actors.forward.device import Work, WorkCommit
from baton.actors.forward.step.packing import Inbox
from baton.actors.forward.step.rows import RowTable
from baton.kernels.drafts import Drafts
from baton.models.batch import Decode

LAST_TOKEN = -1  # stands for a row's last token, which only the device knows
NO_DRAFT = -2  # follows a draw that no draft follows; no draw equals it


def fed_drafts(work: Work) -> list[tuple[int, ...]]:
    """Return the drafts of each row in `work.decodes`."""
    drafts = {draft.row: draft.tokens for draft in work.drafts}
    return [drafts.get(row, ()) for row in work.decodes]


@dataclass(frozen=True, slots=True)
class PackedDrafts:
    """The tokens of a step's n rows that decode, if any of them has drafts."""

    drafts: Drafts
    positions: Tensor  # int64 [n]: the position of the first token that each row feeds
    rows: Tensor  # int64 [fed tokens]: the row of each token
    tokens: Tensor  # int64 [fed tokens]: for each row LAST_TOKEN, then its drafts

    def fed(self, table: RowTable) -> Tensor:
        """Enqueue the completion of the tokens: int64 [fed tokens]."""
        return table.last_token[self.rows].where(self.tokens == LAST_TOKEN, self.tokens)


@dataclass(frozen=True, slots=True)
class PackedVerification:
    """Which draws of a step are to be compared with which drafts, for its n rows that draw."""

    rows: Tensor  # int64 [n]
    draws: Tensor  # int64 [n, most + 1]: the row's draws, in order; the last is repeated
    drafts: Tensor  # int64 [n, most]: the draft after each draw; NO_DRAFT where there is none
    row_of: Tensor  # int64 [draws]: the index in `rows` of each draw's row
    number: Tensor  # int64 [draws]: how many drafts the row has fed before the draw

    def verify(self, drawn: Tensor) -> tuple[Tensor, Tensor]:
        """Return the index of each row's last valid draw, int64 [n], and whether each draw is valid, bool [draws].

        Work says which are valid. drawn: int64 [draws], -1 where nothing was drawn.
        """
        right = (drawn[self.draws[:, :-1]] == self.drafts).cumprod(1).sum(1)
        return self.draws.gather(1, right[:, None])[:, 0], self.number <= right[self.row_of]


def pack_drafts(inbox: Inbox, work: Work) -> PackedDrafts | None:
    """Pack the drafts of a step; None if it has none."""
    if not work.drafts:
        return None
    drafts, replays = fed_drafts(work), {draft.row: draft.replays for draft in work.drafts}
    fed = [1 + len(tokens) for tokens in drafts]
    return PackedDrafts(
        _pack(inbox, [replays.get(row, 0) for row in work.decodes], fed, work.decodes),
        inbox.put(work.positions),
        inbox.put(np.repeat(work.decodes, fed)),
        inbox.put([token for tokens in drafts for token in (LAST_TOKEN, *tokens)]),
    )


def pack_commits(inbox: Inbox, commits: Sequence[WorkCommit], table: RowTable) -> Decode:
    """Pack accepted drafts of rows that feed nothing."""
    rows, replays = [commit.row for commit in commits], [commit.replays for commit in commits]
    drafts = _pack(inbox, replays, [0] * len(rows), rows)
    positions = inbox.put([commit.position for commit in commits])
    return Decode(inbox.put(table.slots[rows]), positions, table.pages[:0], drafts=drafts)


def pack_verification(inbox: Inbox, work: Work) -> PackedVerification | None:
    """Pack what decides which draws of a step, in the order of `draws_of`, are valid; None if it has no drafts."""
    if not work.drafts:
        return None
    rows = [chunk.row for chunk in work.chunks if chunk.samples] + work.decodes
    drafts = [()] * (len(rows) - len(work.decodes)) + fed_drafts(work)
    most, first = max(map(len, drafts)), 0
    draws, after = np.empty((len(rows), most + 1), np.int64), np.full((len(rows), most), NO_DRAFT, np.int64)
    for row, tokens in enumerate(drafts):
        last = first + len(tokens)
        draws[row] = np.minimum(np.arange(first, first + most + 1), last)
        after[row, : len(tokens)] = tokens
        first = last + 1
    counts = [1 + len(tokens) for tokens in drafts]
    return PackedVerification(
        inbox.put(rows),
        inbox.put(draws),
        inbox.put(after),
        inbox.put(np.repeat(np.arange(len(rows)), counts)),
        inbox.put(np.concatenate([np.arange(count) for count in counts])),
    )


def _pack(inbox: Inbox, replays: list[int], fed: list[int], rings: list[int]) -> Drafts:
    """Pack Drafts, whose rings have the rows' indices."""
    offsets = np.cumsum([0, *fed])
    begins = offsets + np.cumsum([0, *replays])
    most = max([0, *replays, *(count - 1 for count in fed)])
    return Drafts(inbox.put(begins), inbox.put(offsets), inbox.put(rings), int(begins[-1]), most)
