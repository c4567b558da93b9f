"""Linear layers with integer weights in Triton: equal to the reference, and batch-invariant."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from baton.kernels.linear.quantized import QuantizedWeight, linear, look_up, quantize, reference, triton
from baton.kernels.runtime import triton as gpu
from baton.models.layers.linear import Embedding, Linear
from baton.models.loading.checkpoint import random_model
from tests.actors.test_ring import MODELS
from tests.kernels.gpu.shapes.quantized_linear import CASES
from tests.kernels.linear.test_quantized import BITS, F32, assert_projects, assert_writes_columns, drawn
from tests.models.loading.test_quantized import logits, modules

few = settings(max_examples=25, deadline=None)


def by_triton(weight: Tensor, bits: int) -> QuantizedWeight:
    with gpu.computes_for("cpu"):
        return quantize(weight, bits)


@few
@given(
    seed=st.integers(0, 99), rows=st.one_of(st.integers(1, 20), st.integers(60, 70)), inputs=st.integers(1, 300),
    outputs=st.integers(1, 150), bits=BITS, bias=st.booleans(),
)  # fmt: skip
def test_projection_equals_the_exact_one_to_its_rounding(
    seed: int, rows: int, inputs: int, outputs: int, bits: int, bias: bool
) -> None:
    x, weight, drawn_bias = drawn(seed, rows, inputs, outputs, F32)
    added = drawn_bias if bias else None
    assert_projects(linear(x, by_triton(weight, bits), added), x, weight, bits, added)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("inputs", [1024, 1100])
def test_results_are_batch_invariant_and_independent_of_strides(
    inputs: int, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Integer inputs make products of a group exact, so only the order of groups and splits could change a result."""
    monkeypatch.setattr(triton, "SPLIT_OUTPUTS", 140)
    _, weight, bias = drawn(0, 1, inputs, 70, F32)
    x = torch.randint(-100, 101, (130, inputs)).float()
    integers = by_triton(weight, bits)
    steps = integers.data.shape[1]
    assert triton._splits(70, steps)[0] == 2
    together = linear(x, integers, bias)
    assert_projects(together, x, weight, bits, bias)
    for rows in (1, 17, triton.APART):
        assert torch.equal(linear(x[:rows], integers, bias), together[:rows])
    x[3] = torch.nan
    assert torch.equal(linear(x[:4], integers, bias)[:3], together[:3])
    apart = torch.full((3, inputs + 1), torch.nan)
    apart[:, :inputs] = x[:3]
    assert torch.equal(linear(apart[:, :inputs], integers, bias), together[:3])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("split_outputs", [140, 45])
@pytest.mark.parametrize("rows", [1, triton.APART + 1])
def test_results_are_written_to_columns_of_a_wider_tensor(
    rows: int, split_outputs: int, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "SPLIT_OUTPUTS", split_outputs)
    x, weight, bias = drawn(0, rows, 1024, 70, F32)
    integers = by_triton(weight, bits)
    assert triton._splits(70, integers.data.shape[1])[0] == (2 if split_outputs == 140 else 1)
    assert_writes_columns(partial(linear, x, integers, bias), rows, 70, F32)
    with pytest.raises(ValueError, match="out is"):
        linear(x, integers, None, x)


@given(outputs=st.integers(1, 300_000), steps=st.integers(1, 300))
def test_splits_hold_every_step_once(outputs: int, steps: int) -> None:
    splits, split_steps = triton._splits(outputs, steps)
    assert (splits - 1) * split_steps < steps <= splits * split_steps
    assert splits == 1 or split_steps >= triton.LEAST_STEPS
    assert splits == 1 or splits * outputs <= triton.SPLIT_OUTPUTS


@few
@given(vocab=st.integers(1, 150), hidden=st.integers(1, 300), bits=BITS)
def test_rows_are_looked_up_and_those_outside_are_nan(vocab: int, hidden: int, bits: int) -> None:
    _, weight, _ = drawn(0, 1, hidden, vocab, F32)
    tokens = torch.tensor([0, vocab - 1, vocab // 2, -1, vocab, 2**40])
    found = look_up(tokens, by_triton(weight, bits))
    assert torch.equal(found[:3], reference.look_up(tokens[:3], *reference.quantize(weight, bits), hidden, F32))
    assert found.isnan().all(1).tolist() == [False] * 3 + [True] * 3


def test_the_lowest_bits_of_a_bfloat16_are_integers() -> None:
    """The kernel's conversion in `_numbers`, which the interpreter cannot run, yields exactly 1/64 of the integers."""
    for bits, shift in ((8, 0), (4, 0), (4, 4)):
        integers = torch.arange(2**bits)
        denormals = (integers << shift).to(torch.int16).view(torch.bfloat16)
        numbers = denormals * 2.0 ** (127 - shift) - 2**bits / 128
        assert torch.equal(numbers.double(), (integers - 2 ** (bits - 1)).double() / 64)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_weight_is_quantized_in_parts_and_takes_little_more_than_its_bits(bits: int) -> None:
    _, weight, _ = drawn(0, 1, 256, 2500, F32)
    integers = by_triton(weight, bits)
    assert integers.layout == "triton"
    assert torch.equal(integers.data, triton.packed(*reference.quantize(weight, bits), bits))
    assert integers.data.shape == triton.data_shape(2500, 256, bits)
    assert integers.data.nbytes == 40 * 64 * 4 * (2 + 64 * bits // 8)


def test_other_layouts_are_refused() -> None:
    x, weight, _ = drawn(0, 3, 130, 40, F32)
    data = triton.packed(*reference.quantize(weight, 8), 8)
    with pytest.raises(ValueError, match=r"x is \(3, 128\)"):
        triton.linear(x[:, :128], data, 8, 40, None)
    with pytest.raises(ValueError, match="of 4 bits"):
        triton.linear(x, data, 4, 40, None)


@pytest.mark.parametrize("bits", [8, 4])
def test_layers_keep_only_the_integers(bits: int) -> None:
    x, weight, bias = drawn(0, 5, 64, 96, F32)
    layer, table = Linear(64, 96, True, F32), Embedding(96, 64, True, F32)
    for module in (layer, table):
        module.weight.data.copy_(weight)
    layer.bias.data.copy_(bias)
    tokens = torch.tensor([95, 0, 7])
    with gpu.computes_for("cpu"):
        for module in (layer, table):
            module.pack(bits)
            assert module.weight.dtype == torch.uint8
        integers = quantize(weight, bits)
        assert torch.equal(table(tokens), look_up(tokens, integers))
        assert torch.equal(table.logits(x), linear(x, integers, None))
        assert torch.equal(layer(x), linear(x, integers, bias))


def test_steps_launch_two_kernels_and_no_operation_of_torch() -> None:
    names, launches = list[str](), list[gpu.Launch]()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            names.append(func.__name__.partition(".")[0])
            return func(*args, **(kwargs or {}))

    for name, run in CASES:
        names.clear()
        launches.clear()
        with gpu.watched(launches.append), Counting():
            run()
        assert 1 <= len(launches) <= 2
        assert set(names) == {"empty"}, name
        config = launches[0].config
        if "BLOCK_OUT" in config.blocks:
            assert config.blocks["BLOCK_OUT"] >= 64 and config.warps >= 4


@pytest.mark.parametrize("dtype", [F32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 17, 64, 65])
def test_the_default_configuration_is_one_of_the_candidates(rows: int, dtype: torch.dtype) -> None:
    x = torch.empty(rows, 4096, dtype=dtype, device="meta")
    data = torch.empty(triton.data_shape(4096, 4096, 4), dtype=torch.uint8, device="meta")
    tried, launches = triton.candidates(rows, dtype), list[gpu.Launch]()
    with gpu.watched(launches.append):
        triton.linear(x, data, 4, 4096, None)
    assert launches[0].config in tried
    assert all(config.blocks["BLOCK_OUT"] >= 64 and config.warps >= 4 for config in tried)


@pytest.mark.parametrize("family", ["mamba2", "nemotron_h"])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_model_computes_the_same_as_with_torch(family: str, bits: int) -> None:
    config = {**MODELS[family], "vocab_size": 256}
    by_torch = random_model(config, F32, torch.device("cpu"), seed=1, bits=bits)
    with gpu.computes_for("cpu"):
        by_triton = random_model(config, F32, torch.device("cpu"), seed=1, bits=bits)
    layouts = {
        module.integers.layout for _, module in modules(by_triton) if isinstance(module, Linear) and module.integers
    }
    assert layouts == {"triton"}
    torch.testing.assert_close(logits(by_triton), logits(by_torch), rtol=1e-4, atol=1e-4)
