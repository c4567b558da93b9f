"""Rows that decode with drafts, compared with the same rows that decode one token at a time, on any device."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from baton.kernels.drafts import Drafts
from baton.models.batch import Batch, Decode, Model, Prefill, allocate
from baton.models.recorded import recording
from tests.models.oracle import VOCABULARY

CPU = torch.device("cpu")
ROWS, PAGE, PAGES, PROMPT, TOKENS, MOST = 3, 4, 12, 9, 16, 6


@dataclass
class Rows:
    """Rows that decode fixed tokens after a prompt. Slot r holds the state of row r."""

    model: Model
    device: torch.device
    recorded: bool = False  # whether steps are recorded and replayed, where that is possible
    sequences: Tensor = field(default_factory=lambda: torch.randint(0, VOCABULARY, (ROWS, PROMPT + TOKENS)))
    with_drafts: int = 0  # how many steps had drafts

    def __post_init__(self) -> None:
        self.pools = allocate(self.model, ROWS, ROWS * PAGES, PAGE, self.device, ROWS, MOST)
        if self.recorded:
            self.model = recording(self.model, self.pools, ROWS, PAGES)
        self.table = torch.arange(ROWS * PAGES, dtype=torch.int32, device=self.device).view(ROWS, PAGES)
        for row in range(ROWS):
            prompt = Prefill([0, PROMPT], [0], [row], [], self.table[row : row + 1])
            tokens, positions = self._on_device(self.sequences[row, :PROMPT].tolist(), list(range(PROMPT)))
            self._run(Batch(tokens, positions, prompt, None))

    def step(self, rows: list[int], positions: list[int], tokens: list[list[int]], replays: list[int]) -> Tensor:
        """Feed tokens to rows, the first of them at the row's position. Return the hidden states."""
        counts = [len(fed) for fed in tokens]
        places = [start + i for start, count in zip(positions, counts, strict=True) for i in range(count)]
        drafts = self._drafts(replays, counts, rows) if any(replays) or set(counts) != {1} else None
        self.with_drafts += drafts is not None
        fed, at, slots, starts = self._on_device([*chain(*tokens)], places, rows, positions)
        return self._run(Batch(fed, at, None, Decode(slots, starts, self.table[slots], drafts=drafts)))

    def replay(self, row: int, position: int, count: int) -> None:
        """Put `count` accepted drafts into the row's state; position: of the next token to feed."""
        slots, at = self._on_device([row], [position])
        self.model.replay(Decode(slots, at, self.table[slots], drafts=self._drafts([count], [0], [row])), self.pools)

    def _run(self, batch: Batch) -> Tensor:
        return self.model.forward(batch, self.pools)

    def _on_device(self, *numbers: list[int]) -> list[Tensor]:
        return [torch.tensor(each, dtype=torch.int64, device=self.device) for each in numbers]

    def _drafts(self, replays: list[int], fed: list[int], rings: list[int]) -> Drafts:
        return Drafts.of(replays, fed, rings, self.device)


def assert_equal(found: Tensor, expected: Tensor) -> None:
    assert torch.equal(found, expected)


def assert_drafts_change_nothing(
    model: Model,
    seed: int = 0,
    device: torch.device = CPU,
    assert_same: Callable[[Tensor, Tensor], None] = assert_equal,
    recorded: bool = False,
    counts: Sequence[int] = (0, 1, 3, MOST),
) -> Rows:
    """Check the hidden states of all accepted tokens, and the states and whole pages at the end.

    Returns the rows that had drafts. recorded: see Rows; only of these rows. counts: how many drafts a row may feed.
    """
    torch.manual_seed(seed)
    plain, chance = Rows(model, device), random.Random(seed)
    drafted = Rows(model, device, recorded, plain.sequences)
    expected = [
        plain.step(list(range(ROWS)), [position] * ROWS, [[int(t)] for t in plain.sequences[:, position]], [0] * ROWS)
        for position in range(PROMPT, PROMPT + TOKENS)
    ]
    done, pending = [0] * ROWS, [0] * ROWS
    while min(done) < TOKENS:
        going = [row for row in chance.sample(range(ROWS), ROWS) if done[row] < TOKENS]
        fed, right = list[list[int]](), list[int]()
        for row in going:
            count = min(TOKENS - done[row], 1 + chance.choice(counts))
            right.append(chance.randint(1, count))
            start = PROMPT + done[row]
            wrong = [chance.randrange(VOCABULARY) for _ in range(count - right[-1])]
            fed.append([*drafted.sequences[row, start : start + right[-1]].tolist(), *wrong])
        hidden = drafted.step(going, [PROMPT + done[row] for row in going], fed, [pending[row] for row in going])
        first = 0
        for row, tokens, accepted in zip(going, fed, right, strict=True):
            for i in range(accepted):
                assert_same(hidden[first + i], expected[done[row] + i][row])
            first += len(tokens)
            done[row] += accepted
            pending[row] = accepted - 1
    for row, count in enumerate(pending):
        if count:
            drafted.replay(row, PROMPT + TOKENS, count)
    for found, exact in zip(drafted.pools.state, plain.pools.state, strict=True):
        assert_same(found, exact)
    whole = plain.table[:, : (PROMPT + TOKENS) // PAGE].long()
    for found, exact in zip(drafted.pools.pages, plain.pools.pages, strict=True):
        assert_same(found[whole], exact[whole])
    return drafted
