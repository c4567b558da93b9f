"""Preparing a step before its launch: the launch only computes, and what was prepared serves no other step."""

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from baton.actors.forward.device import Work, WorkChunk
from baton.actors.forward.torch_device import TorchDevice
from baton.actors.requests import Request, Sampling, Stops
from baton.actors.tokens import pack, unpack
from baton.models.batch import Batch, Pools, TensorSpec, allocate

VOCABULARY = 8


class Successor:
    """A model that predicts token t + 1 after t, and notes its calls."""

    vocab_size, chunk_size, max_position = VOCABULARY, 4, 64

    def __init__(self) -> None:
        self.calls: list[str] = []

    def state_specs(self) -> list[TensorSpec]:
        return [TensorSpec((1,), torch.float32)]

    def kv_specs(self) -> list[TensorSpec]:
        return []

    def ring_specs(self) -> list[TensorSpec]:
        return []

    def prepare(self, batch: Batch, pools: Pools) -> Callable[[], Tensor]:
        self.calls.append("prepare")

        def forward() -> Tensor:
            self.calls.append("forward")
            return batch.tokens[:, None].float()

        return forward

    def forward(self, batch: Batch, pools: Pools) -> Tensor:
        return self.prepare(batch, pools)()

    def replay(self, rows: object, pools: Pools) -> None:
        raise AssertionError("nothing is drafted")

    def logits(self, hidden: Tensor) -> Tensor:
        self.calls.append("logits")
        return torch.nn.functional.one_hot((hidden[:, 0].long() + 1) % VOCABULARY, VOCABULARY).float()


def device_with_rows(*tokens: int) -> tuple[TorchDevice, Successor]:
    """Return a device whose rows each have a prompt of one of the tokens, and its model."""
    model = Successor()
    device = TorchDevice(model, allocate(model, 4, 0, 1, torch.device("cpu")), 4, 15)
    for row, token in enumerate(tokens):
        device.open_row(row, row, row, Request("r", pack([token]), 1, Sampling(temperature=0.0), Stops(5)), [])
        device.launch(Work(row, [WorkChunk(row, 0, 1, True)], [], [], [])).collect()
    model.calls.clear()
    return device, model


def test_the_launch_of_a_prepared_step_only_computes() -> None:
    device, model = device_with_rows(3, 5)
    step = Work(7, [], [1, 0], [1, 1], [])
    device.prepare(step)
    assert model.calls == ["prepare"]
    assert unpack(device.launch(step).collect().report.tokens) == [7, 5]
    assert model.calls == ["prepare", "forward", "logits"]


def test_a_step_that_was_not_prepared_last_is_prepared_at_its_launch() -> None:
    device, model = device_with_rows(3, 5)
    device.prepare(Work(7, [], [0], [1], []))
    assert unpack(device.launch(Work(8, [], [1], [1], [])).collect().report.tokens) == [7]
    assert unpack(device.launch(Work(9, [], [1, 0], [2, 1], [])).collect().report.tokens) == [0, 5]
    assert model.calls.count("prepare") == 3


def test_a_preparation_that_fails_leaves_no_step_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    device, _ = device_with_rows(3, 5)
    first = Work(7, [], [0], [1], [])
    device.prepare(first)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(device, "_prepare_model", raise_memory_error)
        device.prepare(Work(8, [], [1, 0], [1, 1], []))
    assert unpack(device.launch(first).collect().report.tokens) == [5]


def raise_memory_error(batch: Batch, pools: Pools) -> Callable[[], Tensor]:
    raise MemoryError


def test_the_time_of_a_step_begins_at_its_launch() -> None:
    device, _ = device_with_rows(3)
    step = Work(7, [], [0], [1], [])
    device.prepare(step)
    time.sleep(0.2)
    began = time.perf_counter()
    done = device.launch(step).collect()
    assert done.seconds <= time.perf_counter() - began
