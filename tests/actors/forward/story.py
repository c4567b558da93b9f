"""A sequence of steps that every kind of device must run: a CPU, the late device (tests/late), and a GPU."""

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from baton.actors.forward.device import Work, WorkCheckpoint, WorkChunk, WorkMask
from baton.actors.forward.launching import Pending
from baton.actors.forward.streams import CpuStream
from baton.actors.forward.torch_device import TorchDevice
from baton.actors.messages import Ran
from baton.actors.requests import Request, Sampling, Stops
from baton.actors.tokens import pack, unpack
from baton.models.batch import Pools, allocate
from baton.models.loading.checkpoint import random_model
from tests.models.oracle import settings_of

VOCABULARY, ROWS, SLOTS, PAGES, PAGE = 97, 3, 12, 24, 4
GREEDY = Sampling(temperature=0.0)


def model_of(family: str) -> Any:
    return random_model(settings_of(family, VOCABULARY), torch.float32, torch.device("cpu"), seed=0)


@dataclass
class Story:
    """A sequence of device calls as a ring makes them: rows come and go, and two steps are in flight."""

    device: TorchDevice
    ran: list[Ran] = field(default_factory=list)
    in_flight: list[Pending] = field(default_factory=list)

    def open(self, row: int, tokens: int, pages: list[int], sampling: Sampling = GREEDY, **more: Any) -> None:
        ids = pack((7 * row + 3 * i * i + 1) % VOCABULARY for i in range(tokens))
        pages = pages if self.device.pools.pages else []
        self.device.clear(row)
        self.device.open_row(row, 10 + row, row, Request("r", ids, tokens, sampling, Stops(9), **more), pages)

    def run(
        self,
        chunks: list[WorkChunk],
        decodes: dict[int, int],
        *checkpoints: WorkCheckpoint,
        masks: tuple[WorkMask, ...] = (),
        late: tuple[WorkMask, ...] = (),
    ) -> None:
        """Launch a step. decodes: the position of each decoding row. late: masks that come after it is prepared."""
        come = Future[list[WorkMask]]() if late else None
        of_rows = chunks, list(decodes), list(decodes.values()), list(checkpoints), list(masks)
        work = Work(len(self.ran), *of_rows, late=come)
        if work.step % 2:  # The device's thread may prepare a step first; other callers leave it to `launch`.
            self.device.prepare(work)
        if come is not None:
            come.set_result(list(late))
        self.in_flight.append(self.device.launch(work))
        if len(self.in_flight) == 2:
            self.settle()

    def settle(self) -> None:
        self.ran.append(self.in_flight.pop(0).collect().report)

    def tell(self) -> list[Ran]:
        self.open(0, 9, [3, 1, 4])
        self.open(1, 70, list(range(5, 23)), Sampling(temperature=1.0, seed=3), logprobs=2)
        self.run([WorkChunk(0, 0, 9, True)], {})
        self.run([WorkChunk(1, 0, 40, False)], {0: 9}, WorkCheckpoint(1, 17, 8), WorkCheckpoint(0, 10, 9))
        self.open(2, 2, [0], Sampling(temperature=0.7, top_k=5, top_p=0.9, seed=4))
        self.run([WorkChunk(1, 40, 70, True), WorkChunk(2, 0, 2, True)], {0: 10}, WorkCheckpoint(1, 64, 10))
        if self.device.pools.pages:
            self.device.extend_row(2, [2])
        self.run([], {0: 11, 1: 70, 2: 2})
        self.run([], {2: 3})
        self.open(0, 3, [1, 3], Sampling(temperature=0.0, presence_penalty=9.0, logit_bias={5: 1.5}))
        self.device.copy(8, 7)
        self.run([WorkChunk(0, 0, 3, True)], {1: 71, 2: 4}, masks=(mask(0, 20, 60, 96), mask(2, 33)))
        for step in range(2):
            self.run([], {1: 72 + step, 0: 3 + step, 2: 5 + step}, late=(mask(0, *range(40, 50)),))
        while self.in_flight:
            self.settle()
        return self.ran


def mask(row: int, *tokens: int) -> WorkMask:
    return WorkMask(row, sum(1 << token for token in tokens).to_bytes(16, "little"))


def pools_of(model: Any, device: torch.device) -> Pools:
    return allocate(model, SLOTS, PAGES if model.kv_specs() else 0, PAGE, device)


def on_the_cpu(family: str) -> tuple[list[Ran], Pools]:
    model = model_of(family)
    pools = pools_of(model, torch.device("cpu"))
    return Story(TorchDevice(model, pools, ROWS, 90, stream=CpuStream())).tell(), pools


def same(found: list[Ran], expected: list[Ran]) -> None:
    assert [ran.tokens for ran in found] == [ran.tokens for ran in expected]
    assert [ran.not_finite for ran in found] == [[]] * len(found)
    last, *before = [unpack(ran.tokens) for ran in found[-3:]][::-1]
    assert before[-1][0] in (20, 60, 96) and before[-1][2] == 33 and all(40 <= of[1] < 50 for of in (last, before[0]))
    lines = [[line for ran in reports for line in ran.logprobs] for reports in (found, expected)]
    assert [(line.grant, line.start) for line in lines[0]] == [(line.grant, line.start) for line in lines[1]]
    for line, other in zip(*lines, strict=True):
        assert line.items[0].logprob == pytest.approx(other.items[0].logprob, abs=1e-4)
