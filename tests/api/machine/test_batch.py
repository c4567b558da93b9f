"""Defaults of batches and pools by device."""

from typing import Any

import pytest
import torch

from baton.actors.forward.streams import CpuStream
from baton.api import wiring
from baton.api.cli.commands import description
from baton.api.config import Config, fields
from baton.api.machine import device
from baton.api.machine.batch import MOST_GPU_STATES, BatchLimits, batch_limits, explain_headless, wants_head
from baton.api.wiring import notes, size
from baton.models.batch import TensorSpec
from baton.models.config import ModelError
from baton.models.loading.heads import NoHeadError
from tests.api.machine.fake_cuda import GIB

MIB = 2**20


class Sized:
    """A model with a state of `mib` MiB and 16 KiB of keys and values per token."""

    def __init__(self, mib: int) -> None:
        self._mib = mib

    def state_specs(self) -> list[TensorSpec]:
        return [TensorSpec((self._mib * MIB,), torch.uint8)]

    def kv_specs(self) -> list[TensorSpec]:
        return [TensorSpec((2**14,), torch.uint8)]

    def ring_specs(self) -> list[TensorSpec]:
        return [TensorSpec((MIB,), torch.uint8)]


class FakeCudaStream(CpuStream):
    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)


def test_drafts_are_made_on_a_cpu_unless_they_are_turned_off() -> None:
    assert batch_limits(Config(speculation="ngram"), False, 0).drafts == 8
    assert batch_limits(Config(speculation="off"), False, 0).drafts == 0


def test_a_gpu_makes_drafts_from_n_grams_where_they_are_asked_for() -> None:
    drafts = {kind: batch_limits(Config(speculation=kind), True, 60 * GIB).drafts for kind in ("auto", "ngram", "off")}
    assert drafts == {"auto": 0, "ngram": 8, "off": 0}
    with pytest.raises(ValueError, match="--speculation mtp: the head predicts on a CPU only"):
        wants_head(Config(speculation="mtp"), True)


def test_predictions_need_a_head() -> None:
    limits = {kind: batch_limits(Config(speculation=kind), False, 0, True) for kind in ("auto", "mtp")}
    assert [each.predictions for each in limits.values()] == [4, 4]
    assert batch_limits(Config(), False, 0).predictions == 0


def test_a_head_is_loaded_where_it_may_predict() -> None:
    kinds = ("auto", "ngram", "mtp", "off")
    assert [wants_head(Config(speculation=kind), False) for kind in kinds] == [True, False, True, False]
    assert not any(wants_head(Config(speculation=kind), True) for kind in ("auto", "ngram", "off"))


def test_only_a_head_that_cannot_be_computed_is_worth_a_note() -> None:
    assert explain_headless(Config(), NoHeadError("the files hold no head")) == []
    assert explain_headless(Config(), ModelError("2 layers")) == ["no drafts from the model's head: 2 layers"]


def test_a_gpu_gets_more_rows_and_larger_steps_than_a_cpu() -> None:
    assert batch_limits(Config(), False, 500 * GIB) == BatchLimits(16, 512, 8, 0, 48)
    assert batch_limits(Config(), True, 60 * GIB) == BatchLimits(256, 8192, 0, 0, MOST_GPU_STATES)


@pytest.mark.parametrize(
    ("gib", "tokens"), [(0, 2048), (2, 2048), (8, 2048), (15.9, 2048), (16, 4096), (31, 4096), (32, 8192), (140, 8192)]
)
def test_a_step_is_as_large_as_the_free_memory_of_a_gpu_suggests(gib: float, tokens: int) -> None:
    assert batch_limits(Config(), True, int(gib * GIB)).step_tokens == tokens


@pytest.mark.parametrize("is_gpu", [False, True])
def test_options_come_before_the_devices_defaults(is_gpu: bool) -> None:
    limits = batch_limits(Config(max_running=7, step_tokens=99), is_gpu, 60 * GIB)
    assert (limits.max_running, limits.step_tokens) == (7, 99)


def test_the_pools_of_a_gpu_take_all_the_memory_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU's rule would give a card of 60 GiB only 64 slots of 145 MiB, which are 9 GiB."""
    trials = list[Any]()

    def pool_memory(*arguments: Any) -> int:
        trials.append(arguments)
        return 60 * GIB

    monkeypatch.setattr(wiring, "pool_memory", pool_memory)
    model: Any = Sized(145)
    for config, rows in ((Config(), 211), (Config(max_running=16), 16)):
        batch = batch_limits(config, True, 60 * GIB)
        sizes = size(config, batch, model, 131_072, FakeCudaStream())
        assert (sizes.slots, sizes.max_running) == (30 * GIB // (145 * MIB), rows)
        assert sizes.slots * sizes.slot_bytes + sizes.pages * sizes.page_bytes > 59.9 * GIB
    assert [(each[1], each[4]) for each in trials] == [(256, 8192), (16, 8192)], "the trial's rows and tokens"
    tiny = size(Config(), batch_limits(Config(), True, 60 * GIB), Sized(1), 131_072, FakeCudaStream())  # type: ignore[arg-type]
    assert tiny.slots == 256 + MOST_GPU_STATES, "the ledger stays small"


def test_the_log_and_the_help_say_which_defaults_were_taken() -> None:
    model: Any = Sized(2)
    batch = batch_limits(Config(), False, 0)
    sizes = size(Config(memory=2**30), batch, model, 1000, CpuStream())
    assert "16 requests run at once, in steps of up to 512 tokens" in notes(Config(), sizes, batch)
    texts = {field.name: description(field) for field in fields()}
    assert "[256 on a GPU, otherwise 16]" in texts["max_running"]
    assert "[2048 to 8192 on a GPU, by its free memory; otherwise 512]" in texts["step_tokens"]


def test_the_rings_of_drafts_leave_less_memory_to_the_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "free_memory", lambda of: 64 * GIB)
    sizes = (Sized(1), 16, 1024, 16, 512, CpuStream())
    without, with_drafts = (device.pool_memory(*sizes, drafts=drafts) for drafts in (0, 8))  # type: ignore[arg-type]
    assert without - with_drafts == 16 * 8 * MIB, "a draft takes 1 MiB of a ring"
