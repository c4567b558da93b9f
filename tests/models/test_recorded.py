"""Replayed decoding steps give the same results as the model's forward, in every family."""

from collections.abc import Iterator

import pytest
import torch

from baton.models.batch import Batch, Decode, Pools, Prefill, allocate
from baton.models.loading.checkpoint import random_model
from baton.models.recorded import RecordingModel, recording
from tests.kernels.installed import installed, runnable
from tests.models.oracle import CHECKPOINTS, VOCABULARY, settings_of

CPU = torch.device("cpu")
PAGE, ROWS, PAGES = 4, 5, 12
everywhere = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@pytest.fixture
def native_kernels() -> Iterator[None]:
    with installed(runnable()[0], threads=2):
        yield


class Pair:
    """A model and the same model with recorded steps, each with pools of its own."""

    def __init__(
        self, name: str, dtype: torch.dtype, bits: int | None = None, states: torch.dtype = torch.float32
    ) -> None:
        self.model = random_model(settings_of(name), dtype, CPU, 0, states, bits)
        self.pools = [allocate(self.model, ROWS, ROWS * PAGES, PAGE, CPU) for _ in range(2)]
        self.recorded = recording(self.model, self.pools[1], ROWS, PAGES)
        order = torch.randperm(ROWS * PAGES, generator=torch.Generator().manual_seed(0))
        self.table = order.view(ROWS, PAGES).int()

    def forward(self, batch: Batch) -> None:
        """Run the batch through both models, and check that hidden states and pools are the same to the bit."""
        expected = self.model.forward(batch, self.pools[0])
        assert torch.equal(self.recorded.forward(batch, self.pools[1]), expected)
        assert self.bits(self.pools[0]) == self.bits(self.pools[1])

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
    assert sorted(pair.recorded._steps) == [1, 2, 3, 5]


@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize(
    "name",
    ["granitemoehybrid", "granitemoehybrid-moe", "nemotron_h-moe-latent", "qwen3_next-moe", "kimi_linear"],
)
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_integer_weights_and_bfloat16_states_are_replayed_too(bits: int | None, name: str) -> None:
    pair = Pair(name, torch.bfloat16, bits, torch.bfloat16)
    pair.prefill(1, 9)
    for position in range(9, 14):
        pair.decode([1], [position])
    assert isinstance(pair.recorded, RecordingModel)
    assert pair.recorded.unrecordable == "" and list(pair.recorded._steps) == [1]


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
