"""Steps with drafts on an emulated accelerator: the tokens and states of steps without drafts on a CPU, from captured
steps that upload at most twice and wait for nothing.
"""

import random
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import pytest
import torch

from baton.actors.forward.device import Work, WorkChunk, WorkCommit, WorkDraft, WorkMask
from baton.actors.forward.step.captured import MOST_DRAFTING, ladder_of_drafts
from baton.actors.forward.torch_device import TorchDevice
from baton.actors.forward.warming import warm_up
from baton.actors.requests import Request, Sampling, Stops
from baton.actors.tokens import pack, unpack
from baton.kernels.runtime.triton import Launch
from baton.kernels.sampling import reference
from baton.models.batch import Pools, allocate
from tests.actors.forward.story import PAGE, PAGES, ROWS, SLOTS, VOCABULARY, mask, model_of
from tests.actors.forward.test_late_device import variant
from tests.late import LateDevice

COUNT, DRAFTS = 11, 4
PROMPTS = (9, 5, 2)
SAMPLINGS = (
    Sampling(temperature=0.0),
    Sampling(temperature=1.0, seed=3, top_k=20),
    Sampling(temperature=0.8, seed=5, presence_penalty=1.0, repetition_penalty=1.2),
)
ALLOWED = range(10, 60)


class Decoding:
    """Rows that decode after their prompts. The last row's prompt is fed while the others decode.

    foretold: the tokens that the rows will draw, of which drafts are made; None: no drafts.
    """

    def __init__(self, device: TorchDevice, foretold: Sequence[Sequence[int]] | None, seed: int = 0) -> None:
        self.device, self.foretold, self.chance = device, foretold, random.Random(seed)
        self.tokens: list[list[int]] = [[] for _ in PROMPTS]
        self.accepted = [0] * len(PROMPTS)
        self.commits: list[WorkCommit] = []

    def run(self) -> list[list[int]]:
        self._feed([0, 1])
        for _ in range(3):
            self._decode([0, 1])
        self._decode([0, 1], [2])
        while rows := [row for row in range(ROWS) if len(self.tokens[row]) < COUNT]:
            self._decode(rows)
        ends = [(row, self.accepted[row]) for row in range(ROWS) if self.accepted[row]]
        self.commits = [WorkCommit(row, count, self._position(row)) for row, count in ends]
        if self.commits:
            self.device.launch(Work(0, [], [], [], [], commits=self.commits)).collect()
        return self.tokens

    def _feed(self, rows: list[int]) -> None:
        chunks = [self._opened(row) for row in rows]
        self._take(rows, self.device.launch(Work(0, chunks, [], [], [])).collect().report.tokens, [()] * len(rows))

    def _opened(self, row: int) -> WorkChunk:
        """Open a row. Return the chunk of its prompt."""
        pages = list(range(7 * row, 7 * row + 7)) if self.device.pools.pages else []
        ids = pack((7 * row + 3 * i * i + 1) % VOCABULARY for i in range(PROMPTS[row]))
        self.device.clear(row)
        self.device.open_row(row, 10 + row, row, Request("r", ids, PROMPTS[row], SAMPLINGS[row], Stops(99)), pages)
        return WorkChunk(row, 0, PROMPTS[row], True)

    def _position(self, row: int) -> int:
        return PROMPTS[row] + len(self.tokens[row]) - 1

    def _decode(self, rows: list[int], opening: Sequence[int] = ()) -> None:
        """Run a step in which rows decode, with what is foretold, and others are fed their prompts."""
        chunks = [self._opened(row) for row in opening]
        drafts = [self._drafts(row) for row in rows]
        fed = [WorkDraft(row, self.accepted[row], tokens) for row, tokens in zip(rows, drafts, strict=True)]
        positions = [self._position(row) for row in rows]
        words, masked = mask(0, *ALLOWED).words, [tokens for row, tokens in zip(rows, drafts, strict=True) if row == 0]
        masks = [WorkMask(0, words, [words] * len(tokens)) for tokens in masked]
        fed = [draft for draft in fed if draft.replays or draft.tokens]
        ran = self.device.launch(Work(1, chunks, rows, positions, [], masks, fed)).collect().report
        self._take([*opening, *rows], ran.tokens, [*[()] * len(opening), *drafts])

    def _drafts(self, row: int) -> tuple[int, ...]:
        if self.foretold is None:
            return ()
        known, left = len(self.tokens[row]), COUNT - len(self.tokens[row]) - 1
        right = self.foretold[row][known : known + min(left, self.chance.choice([0, 1, 2, DRAFTS]))]
        return tuple(token if self.chance.random() < 0.8 else (token + 1) % VOCABULARY for token in right)

    def _take(self, rows: list[int], drawn: bytes, drafts: list[tuple[int, ...]]) -> None:
        draws = iter(unpack(drawn))
        for row, fed in zip(rows, drafts, strict=True):
            of_row = [next(draws) for _ in range(1 + len(fed))]
            self.accepted[row] = sum(
                1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(fed, of_row, strict=False))
            )
            self.tokens[row] += of_row[: 1 + self.accepted[row]]


def pools_of(family: str, device: torch.device) -> Pools:
    model = model_of(family)
    return allocate(model, SLOTS, PAGES if model.kv_specs() else 0, PAGE, device, ROWS + 1, DRAFTS)


@pytest.mark.parametrize(
    "family",
    [
        "nemotron_h",
        pytest.param("mamba2-groups", marks=pytest.mark.soak),
        pytest.param("qwen3_next-moe", marks=pytest.mark.soak),
        pytest.param("kimi_linear-moe", marks=pytest.mark.soak),
        pytest.param("granitemoehybrid-moe", marks=pytest.mark.soak),
        pytest.param("lfm2", marks=pytest.mark.soak),
    ],
)
def test_captured_steps_verify_drafts(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("step.captured", "torch_device"):
        monkeypatch.setattr(f"baton.actors.forward.{module}.sample", reference.sample)
    monkeypatch.setattr("baton.actors.forward.step.captured.ladder_of_drafts", lambda rows, drafts: [4, 15])
    plain = TorchDevice(model_of(family), pools_of(family, torch.device("cpu")), ROWS, 90)
    expected = Decoding(plain, None).run()
    with LateDevice(1) as late:
        stream, model = late.stream(), model_of(family)
        late.to(model)
        with late.setup():
            pools = pools_of(family, torch.device("meta"))
        device = TorchDevice(model, pools, ROWS, 90, stream=stream)
        device.capture()
        launch, launches = device.launch, list[int]()

        def counted(work: Work) -> object:
            mark = len(late.log)
            pending = launch(work)
            assert late.count("upload", mark) <= 2 and late.count("wait", mark) == 0
            if work.drafts and not work.chunks:
                assert late.count("replay", mark) == 2, "the model and the draw"
                launches.append(late.count("launch", mark))
            return pending

        device.launch = counted  # type: ignore[method-assign, assignment]
        drafted = Decoding(device, expected, seed=2)
        assert drafted.run() == expected
        assert max(launches) < 40, "what is not captured: verification, masks and penalties"
        for row in range(ROWS):
            for found, exact in zip(device.pools.state, plain.pools.state, strict=True):
                torch.testing.assert_close(late.read(found)[row], exact[row], rtol=1e-4, atol=1e-4)


def test_sizes_of_steps_with_drafts() -> None:
    assert ladder_of_drafts(16, 0) == []
    assert ladder_of_drafts(1, 1) == [2]
    assert ladder_of_drafts(2, 8) == [*range(2, 10), 12, 16, 18]
    assert ladder_of_drafts(256, 8)[-1] == MOST_DRAFTING


@pytest.mark.soak
@pytest.mark.parametrize("family", ["mamba2-groups", "qwen3_next"])
def test_the_warm_up_compiles_what_drafts_need(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("step.captured", "torch_device"):
        monkeypatch.setattr(f"baton.actors.forward.{module}.sample", reference.sample)
    monkeypatch.setattr("baton.actors.forward.step.captured.ladder_of_drafts", lambda rows, drafts: [5])
    seen = set[tuple[Any, ...]]()
    late = LateDevice()
    launch = late.operations.launch

    def noted(kernel: Launch) -> None:
        seen.add(variant(kernel))
        launch(kernel)

    late.operations.launch = noted  # type: ignore[method-assign]
    with late:
        stream, model = late.stream(), model_of(family)
        late.to(model)
        with late.setup():
            pools = pools_of(family, torch.device("meta"))
        device = TorchDevice(model, pools, ROWS, 90, stream=stream)
        device.capture()
        warm_up(device, 20)
        warmed = set(seen)
        Decoding(device, [[3] * COUNT] * ROWS, seed=2).run()
    assert len(warmed) > 5 and seen - warmed == set()
