"""Replayed decoding steps give the same results as the model's forward, in every family."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from baton.models import recorded
from baton.models.batch import Batch, Decode, Model, Pools, PredictingModel, Prefill, allocate
from baton.models.loading.checkpoint import random_model
from baton.models.recorded import RecordingModel, recording
from tests.kernels.installed import installed
from tests.models.drafting import assert_drafts_change_nothing
from tests.models.oracle import CHECKPOINTS, VOCABULARY, settings_of

CPU = torch.device("cpu")
PAGE, ROWS, PAGES = 4, 5, 12
WITH_HEADS = ["qwen3_5", "qwen3_5_moe", "nemotron_h-moe"]
everywhere = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@pytest.fixture
def native_kernels() -> Iterator[None]:
    with installed(threads=2):
        yield


class Pair:
    """A model and the same model with recorded steps, each with pools of its own."""

    def __init__(
        self,
        name: str,
        dtype: torch.dtype,
        bits: int | None = None,
        states: torch.dtype = torch.float32,
        with_head: bool = False,
    ) -> None:
        self.model = random_model(settings_of(name), dtype, CPU, 0, states, bits, with_head)
        self.pools = [allocate(self.model, ROWS, ROWS * PAGES, PAGE, CPU) for _ in range(2)]
        self.recorded = recording(self.model, self.pools[1], ROWS, PAGES)
        order = torch.randperm(ROWS * PAGES, generator=torch.Generator().manual_seed(0))
        self.table = order.view(ROWS, PAGES).int()

    def forward(self, batch: Batch) -> None:
        """Run the batch through both models, and check that hidden states and pools are the same to the bit."""
        expected = self.model.forward(batch, self.pools[0])
        assert torch.equal(self.recorded.forward(batch, self.pools[1]), expected)
        assert self.bits(self.pools[0]) == self.bits(self.pools[1])

    def predict(self, tokens: list[int], hidden: Tensor, position: int) -> None:
        """Predict a token of the first rows in both models, and check that the results are the same to the bit."""
        rows = Decode(*2 * (torch.full((len(tokens),), position),), self.table[: len(tokens)])
        results = []
        for model, pools in zip((self.model, self.recorded), self.pools, strict=True):
            assert isinstance(model, PredictingModel)
            results.append(model.predict(torch.tensor(tokens), hidden, rows, pools))
        assert torch.equal(*results) and self.bits(self.pools[0]) == self.bits(self.pools[1])

    def bits(self, pools: Pools) -> bytes:
        return pools.slots.numpy().tobytes() + pools.blocks.numpy().tobytes()

    def prefill(self, slot: int, tokens: int) -> None:
        table = self.table[slot, None, : self.pools[0].pages_for(tokens)]
        plan = Prefill([0, tokens], [0], [slot], [], table)
        self.forward(Batch(torch.arange(tokens) % VOCABULARY, torch.arange(tokens), plan, None))

    def decode(self, slots: list[int], positions: list[int]) -> None:
        at = torch.tensor(positions)
        table = self.table[slots, : self.pools[0].pages_for(max(positions) + 1)]
        self.forward(Batch((at * 7 + 3) % VOCABULARY, at, None, Decode(torch.tensor(slots), at, table)))


@everywhere
@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_replayed_steps_equal_the_models(name: str, dtype: torch.dtype) -> None:
    pair = Pair(name, dtype)
    lengths = [3, 17, 1, 9, 6]
    for slot, length in enumerate(lengths):
        pair.prefill(slot, length)
    for slots in ([1], [1], [4, 0, 2], [0, 1, 2, 3, 4], [3, 2, 0], [1], [2, 4], [0, 1, 2, 3, 4]):
        pair.decode(slots, [lengths[slot] for slot in slots])
        for slot in slots:
            lengths[slot] += 1
    assert isinstance(pair.recorded, RecordingModel)
    assert pair.recorded.unrecordable == "", "every layer of the family is native"
    assert sorted(kind.rows for kind in pair.recorded._steps) == [1, 2, 3, 5]


@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize(
    "name",
    [
        "granitemoehybrid",
        "granitemoehybrid-moe",
        "nemotron_h-moe-latent",
        "qwen3_next-moe",
        "kimi_linear",
        "lfm2_moe",
        "olmo_hybrid",
        "bailing_hybrid",
    ],
)
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_integer_weights_and_bfloat16_states_are_replayed_too(bits: int | None, name: str) -> None:
    pair = Pair(name, torch.bfloat16, bits, torch.bfloat16)
    pair.prefill(1, 9)
    for position in range(9, 14):
        pair.decode([1], [position])
    assert isinstance(pair.recorded, RecordingModel)
    assert pair.recorded.unrecordable == "" and [kind.rows for kind in pair.recorded._steps] == [1]


@everywhere
@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_steps_with_drafts_are_replayed_too(name: str, dtype: torch.dtype) -> None:
    """Each recording serves rows that feed and replay other numbers of drafts than when it was made."""
    assert_replays(random_model(settings_of(name), dtype, CPU, 3))


@everywhere
@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize("name", WITH_HEADS)
def test_so_is_what_a_head_for_predictions_observes(name: str, dtype: torch.dtype) -> None:
    assert_replays(random_model(settings_of(name), dtype, CPU, 4, with_head=True))


@pytest.mark.usefixtures("native_kernels")
def test_a_step_that_is_prepared_has_not_run() -> None:
    pair = Pair("mamba2", torch.float32)
    pair.prefill(1, 9)
    for position in range(9, 12):
        pair.decode([1], [position])
    assert isinstance(pair.recorded, RecordingModel)
    before, at = pair.bits(pair.pools[1]), torch.tensor([12])
    batch = Batch(at, at, None, Decode(torch.tensor([1]), at, pair.table[[1], :3]))
    expected = pair.model.forward(batch, pair.pools[0])
    forward = pair.recorded.prepare(batch, pair.pools[1])
    assert pair.bits(pair.pools[1]) == before
    at.zero_()  # Everything that depends on the batch has been computed.
    assert torch.equal(forward(), expected)
    assert pair.bits(pair.pools[1]) == pair.bits(pair.pools[0]) != before


@pytest.mark.usefixtures("native_kernels")
def test_a_step_that_was_only_prepared_is_not_taken_for_one_that_has_run() -> None:
    pair = Pair("mamba2", torch.float32)
    at = torch.tensor([0])
    batch = Batch(at, at, None, Decode(torch.tensor([1]), at, pair.table[[1], :1]))
    assert isinstance(pair.recorded, RecordingModel)
    for _ in range(2):
        forward = pair.recorded.prepare(batch, pair.pools[1])
    assert torch.equal(forward(), pair.model.forward(batch, pair.pools[0])) and not pair.recorded.unrecordable
    pair.decode([1], [1])
    assert pair.recorded._steps and not pair.recorded.unrecordable


def assert_replays(model: Model) -> None:
    rows = assert_drafts_change_nothing(model, 4, recorded=True, counts=(1, 2))
    assert isinstance(rows.model, RecordingModel)
    assert rows.model.unrecordable == ""
    kinds = [kind for kind in rows.model._steps if kind.drafts]
    assert 3 < len(kinds) < rows.with_drafts - 3, "some steps replay what others have recorded"


@everywhere
@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize("name", WITH_HEADS)
def test_predictions_are_replayed_too(name: str, dtype: torch.dtype) -> None:
    pair = Pair(name, dtype, with_head=True)
    for slot in range(2):
        pair.prefill(slot, 9)
    g = torch.Generator().manual_seed(0)
    for rows in (1, 1, 2, 2, 1):
        hidden = torch.randn(rows, 64, generator=g).to(dtype)
        pair.predict([5, 7][:rows], hidden, 9)
    assert isinstance(pair.recorded, RecordingModel)
    assert pair.recorded.unrecordable == "" and [kind.rows for kind in pair.recorded._steps] == [2, 1]


def test_the_least_recently_used_recording_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "MOST_RECORDINGS", 2)
    with installed(threads=2):
        pair = Pair("mamba2", torch.float32)
        for position, slots in enumerate([[0], [0], [0, 1], [0], [0, 1, 2], [0]]):
            pair.decode(slots, [position] * len(slots))
    assert isinstance(pair.recorded, RecordingModel)
    assert [kind.rows for kind in pair.recorded._steps] == [3, 1]


def test_without_native_code_the_model_runs_unrecorded() -> None:
    pair = Pair("granitemoehybrid", torch.float32)
    for position in range(4):
        pair.decode([2, 0], [position, position])
    assert isinstance(pair.recorded, RecordingModel)
    assert pair.recorded.unrecordable == "no native code is installed"


def test_a_model_without_layers_is_not_wrapped() -> None:
    config = {"model_type": "hash", "vocab_size": 10, "chunk_size": 4, "max_position_embeddings": 64}
    model = random_model(config, torch.float32, CPU, seed=0)
    pools = allocate(model, 2, 2, PAGE, CPU)
    assert recording(model, pools, 2, 2) is model
