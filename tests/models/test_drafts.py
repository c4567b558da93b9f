"""Decoding with drafts gives each family's bits of decoding one token at a time, in hidden states, states and pages."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

import pytest
import torch
from torch import Tensor

from baton.kernels.drafts import Drafts
from baton.models.batch import Batch, Decode, Model, Prefill, allocate
from baton.models.hash import HashModel
from baton.models.loading.checkpoint import random_model
from tests.kernels.installed import installed, runnable
from tests.models.oracle import CHECKPOINTS, VOCABULARY, settings_of

CPU = torch.device("cpu")
ROWS, PAGE, PAGES, PROMPT, TOKENS, MOST = 3, 4, 12, 9, 16, 6
everywhere = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@pytest.fixture
def native_kernels() -> Iterator[None]:
    with installed(runnable()[0], threads=2):
        yield


@dataclass
class Rows:
    """Rows that decode fixed tokens after a prompt. Slot r holds the state of row r."""

    model: Model
    sequences: Tensor = field(default_factory=lambda: torch.randint(0, VOCABULARY, (ROWS, PROMPT + TOKENS)))

    def __post_init__(self) -> None:
        self.pools = allocate(self.model, ROWS, ROWS * PAGES, PAGE, CPU, ROWS, MOST)
        self.table = torch.arange(ROWS * PAGES, dtype=torch.int32).view(ROWS, PAGES)
        for row in range(ROWS):
            prompt = Prefill([0, PROMPT], [0], [row], [], self.table[row : row + 1])
            self.model.forward(Batch(self.sequences[row, :PROMPT], torch.arange(PROMPT), prompt, None), self.pools)

    def step(self, rows: list[int], positions: list[int], tokens: list[list[int]], replays: list[int]) -> Tensor:
        """Feed tokens to rows, the first of them at the row's position. Return the hidden states."""
        at, counts = torch.tensor(positions), [len(fed) for fed in tokens]
        places = torch.tensor([start + i for start, count in zip(positions, counts, strict=True) for i in range(count)])
        drafts = Drafts.of(replays, counts, rows) if any(replays) or set(counts) != {1} else None
        decode = Decode(torch.tensor(rows), at, self.table[rows], drafts=drafts)
        return self.model.forward(Batch(torch.tensor([*chain(*tokens)]), places, None, decode), self.pools)

    def replay(self, row: int, position: int, count: int) -> None:
        """Put `count` accepted drafts into the row's state; position: of the next token to feed."""
        at, drafts = torch.tensor([position]), Drafts.of([count], [0], [row])
        self.model.replay(Decode(torch.tensor([row]), at, self.table[[row]], drafts=drafts), self.pools)


def assert_drafts_change_no_bit(model: Model, seed: int = 0) -> None:
    torch.manual_seed(seed)
    plain, chance = Rows(model), random.Random(seed)
    drafted = Rows(model, plain.sequences)
    expected = [
        plain.step(list(range(ROWS)), [position] * ROWS, [[int(t)] for t in plain.sequences[:, position]], [0] * ROWS)
        for position in range(PROMPT, PROMPT + TOKENS)
    ]
    done, pending = [0] * ROWS, [0] * ROWS
    while min(done) < TOKENS:
        going = [row for row in chance.sample(range(ROWS), ROWS) if done[row] < TOKENS]
        fed, right = list[list[int]](), list[int]()
        for row in going:
            count = min(TOKENS - done[row], 1 + chance.choice([0, 1, 3, MOST]))
            right.append(chance.randint(1, count))
            start = PROMPT + done[row]
            wrong = [chance.randrange(VOCABULARY) for _ in range(count - right[-1])]
            fed.append([*drafted.sequences[row, start : start + right[-1]].tolist(), *wrong])
        hidden = drafted.step(going, [PROMPT + done[row] for row in going], fed, [pending[row] for row in going])
        first = 0
        for row, tokens, accepted in zip(going, fed, right, strict=True):
            for i in range(accepted):
                assert torch.equal(hidden[first + i], expected[done[row] + i][row])
            first += len(tokens)
            done[row] += accepted
            pending[row] = accepted - 1
    for row, count in enumerate(pending):
        if count:
            drafted.replay(row, PROMPT + TOKENS, count)
    assert torch.equal(drafted.pools.slots, plain.pools.slots)
    whole = (PROMPT + TOKENS) // PAGE
    for found, exact in zip(drafted.pools.pages, plain.pools.pages, strict=True):
        assert torch.equal(found[plain.table[:, :whole].long()], exact[plain.table[:, :whole].long()])


@everywhere
@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_drafts_change_no_bit(name: str, dtype: torch.dtype) -> None:
    assert_drafts_change_no_bit(random_model(settings_of(name), dtype, CPU, seed=0))


@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize("name", ["mamba2", "nemotron_h", "qwen3_next", "kimi_linear"])
def test_states_in_bfloat16_are_rounded_alike(name: str) -> None:
    assert_drafts_change_no_bit(random_model(settings_of(name), torch.bfloat16, CPU, 1, torch.bfloat16), 1)


@pytest.mark.parametrize("page_fold", [False, True])
def test_so_does_the_hash_model(page_fold: bool) -> None:
    model = HashModel(VOCABULARY, 4, 64, page_fold)
    for seed in range(20):
        assert_drafts_change_no_bit(model, seed)
