import itertools
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from baton.models.batch import Batch, Decode, Model, Pools, Prefill, StateCheckpoint, allocate
from baton.models.loading.checkpoint import load_model
from tests.kernels.installed import installed
from tests.models.oracle import CHECKPOINTS, VOCABULARY, Oracle

CPU = torch.device("cpu")
PAGE = 16
LENGTH = 150
DECODED = 64
KINDS = (
    *("mamba2", "nemotron_h-moe", "granitemoehybrid-rope", "falcon_h1-norm", "qwen3_5_moe", "kimi_linear-moe"),
    "lfm2_moe",
    *("olmo_hybrid", "bailing_hybrid"),
)
"""These checkpoints together contain every kind of layer."""
KERNELS = {"torch": nullcontext, "native": lambda: installed(threads=2)}
FAMILIES = pytest.mark.parametrize(
    ("name", "kernels"),
    [
        pytest.param(name, kernels, marks=[pytest.mark.soak] if kernels == "torch" and name not in KINDS else [])
        for kernels in KERNELS
        for name in CHECKPOINTS
    ],
    indirect=["kernels"],
)


@pytest.fixture
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    with KERNELS[request.param]():
        yield


def ids(length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))


def pages(segments: int, seed: int = 0) -> Tensor:
    """Return a random page table for up to 20 pages per segment."""
    order = torch.randperm(segments * 20, generator=torch.Generator().manual_seed(seed))
    return order.view(segments, 20).int()


def make_pools(model: Model, slots: int, segments: int) -> Pools:
    pools = allocate(model, slots, segments * 20, PAGE, CPU)
    for tensor in pools.pages:
        tensor.fill_(torch.nan)
    return pools


def prefill(tokens: Tensor, start: int, slot: int, table: Tensor) -> Batch:
    positions = torch.arange(start, start + len(tokens))
    return Batch(tokens, positions, Prefill([0, len(tokens)], [start], [slot], [], table), None)


def decode(tokens: Tensor, slots: list[int], positions: list[int], table: Tensor) -> Batch:
    places = torch.tensor(positions)
    return Batch(tokens, places, None, Decode(torch.tensor(slots), places, table))


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=0)


@FAMILIES
@pytest.mark.usefixtures("kernels")
def test_prefill_at_once_in_uneven_chunks_and_64_decoded_tokens(oracle: Oracle, name: str) -> None:
    path = oracle.checkpoint(name)
    tokens = ids(LENGTH + DECODED)
    expected = oracle.logits(path, tokens.tolist())
    model = load_model(path, None, CPU)
    table = pages(1)

    pools = make_pools(model, 3, 1)
    hidden = model.forward(prefill(tokens[:LENGTH], 0, 2, table), pools)
    assert_close(model.logits(hidden), expected[:LENGTH])
    for position in range(LENGTH, LENGTH + DECODED):
        hidden = model.forward(decode(tokens[position : position + 1], [2], [position], table), pools)
        assert_close(model.logits(hidden), expected[position : position + 1])

    pools = make_pools(model, 3, 1)
    cuts = [0, 1, 3, 34, 35, 64, 101, LENGTH]
    for start, end in itertools.pairwise(cuts):
        hidden = model.forward(prefill(tokens[start:end], start, 1, table), pools)
        assert_close(model.logits(hidden), expected[start:end])


@FAMILIES
@pytest.mark.usefixtures("kernels")
def test_prefill_and_decode_of_many_sequences_in_one_step(oracle: Oracle, name: str) -> None:
    """Three sequences decode while three others are prefilled, one of which resumes in its middle."""
    path = oracle.checkpoint(name)
    model = load_model(path, None, CPU)
    lengths = [20, 37, 61, 9, 80, 33]
    sequences = [ids(length, seed) for seed, length in enumerate(lengths)]
    expected = [oracle.logits(path, tokens.tolist()) for tokens in sequences]
    table, pools = pages(6), make_pools(model, 8, 6)
    slots, fed = [3, 0, 7, 1, 5, 4], [19, 36, 60, 0, 50, 0]
    for number in (0, 1, 2, 4):
        tokens = sequences[number][: fed[number]]
        model.forward(prefill(tokens, 0, slots[number], table[number : number + 1]), pools)

    chunks = [3, 4, 5]
    parts = [sequences[n][fed[n] :] for n in chunks] + [sequences[n][-1:] for n in (0, 1, 2)]
    batch = Batch(
        torch.cat(parts),
        torch.cat([torch.arange(fed[n], lengths[n]) for n in (3, 4, 5, 0, 1, 2)]),
        Prefill([0, 9, 39, 72], [fed[n] for n in chunks], [slots[n] for n in chunks], [], table[3:, :6]),
        Decode(torch.tensor(slots[:3]), torch.tensor(fed[:3]), table[:3, :4]),
    )
    actual = model.logits(model.forward(batch, pools))
    assert_close(actual, torch.cat([expected[n][fed[n] :] for n in (3, 4, 5, 0, 1, 2)]))


@FAMILIES
@pytest.mark.usefixtures("kernels")
def test_checkpoints_of_a_packed_prefill_equal_the_states_of_decoding(oracle: Oracle, name: str) -> None:
    model = load_model(oracle.checkpoint(name), None, CPU)
    lengths, places = [45, 100, 7], [(0, 5), (0, 45), (1, 33), (1, 64), (1, 90), (2, 1)]
    sequences = [ids(length, seed) for seed, length in enumerate(lengths)]
    table = pages(3)
    decoded, packed = make_pools(model, 9, 3), make_pools(model, 9, 3)

    for segment, tokens in enumerate(sequences):
        for position in range(len(tokens)):
            model.forward(decode(tokens[position : position + 1], [segment], [position], table[segment, None]), decoded)
            for slot, place in enumerate(places, start=3):
                if place == (segment, position + 1):
                    decoded.copy(segment, slot)

    checkpoints = [StateCheckpoint(segment, at, slot) for slot, (segment, at) in enumerate(places, start=3)]
    positions = torch.cat([torch.arange(length) for length in lengths])
    batch = Batch(
        torch.cat(sequences), positions, Prefill([0, 45, 145, 152], [0, 0, 0], [0, 1, 2], checkpoints, table), None
    )
    model.forward(batch, packed)
    for actual, expected in zip(packed.state, decoded.state, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kernels", KERNELS, indirect=True)
@pytest.mark.parametrize(
    "name",
    [
        *("mamba2", "nemotron_h", "granitemoehybrid", "qwen3_next", "bamba", "falcon_h1", "kimi_linear"),
        *("nemotron_h-moe-latent", "granitemoehybrid-moe", "qwen3_5_moe", "kimi_linear-moe", "lfm2", "lfm2_moe"),
        *("olmo_hybrid", "bailing_hybrid"),
    ],
)
@pytest.mark.usefixtures("kernels")
def test_bfloat16_weights_keep_states_in_float32_and_stay_near(oracle: Oracle, name: str) -> None:
    path = oracle.checkpoint(name)
    tokens = ids(40)
    exact, rounded = load_model(path, torch.float32, CPU), load_model(path, torch.bfloat16, CPU)
    table = pages(1)
    logits = [m.logits(m.forward(prefill(tokens, 0, 0, table), make_pools(m, 1, 1))) for m in (exact, rounded)]
    assert all(shape.dtype == torch.float32 for shape in rounded.state_specs())
    assert logits[1].dtype == torch.float32
    # The median, because a token for which rounding chooses another expert may be far off.
    error = (logits[1] - logits[0]).square().mean(1).sqrt().median() / logits[0].std()
    assert 0 < error < 0.1
