"""Weights of bfloat16 in 12 bits: products and rows with the bits of linear.dense, whatever the weights are."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from baton.kernels.linear import compressed, dense
from baton.kernels.linear.compressed import native, reference
from baton.kernels.linear.dense import native as dense_native
from baton.kernels.runtime import cpp
from baton.kernels.runtime.cpp.targets import Target
from baton.models.layers.linear import Embedding, Linear
from tests.kernels.installed import library_for
from tests.kernels.linear.test_quantized import assert_writes_columns

BF16 = torch.bfloat16
INF, NAN = float("inf"), float("nan")
SIZES = st.integers(1, 100)
FAR = (1e-38, 3e38, INF, -INF, NAN, -0.0, 1e-40, -9e-41, 0.0)
"""Numbers whose upper bytes are not in the tables of `drawn` weights, so their units are kept whole."""


def drawn(outputs: int, inputs: int, seed: int = 0) -> Tensor:
    """Return a weight without units that are kept whole, except those within which the inputs end."""
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))
    return torch.where(weight.abs() < 0.01, 0.01, weight).bfloat16()


def with_far(weight: Tensor) -> Tensor:
    """Return the weight with some units that must be kept whole: the first, the last, neighbours, and single ones."""
    weight, (outputs, inputs) = weight.clone(), weight.shape
    for number, far in enumerate(FAR):
        weight[number * 7 % outputs, (number * 97 + 41) % inputs] = far
    weight[0, 0] = weight[outputs - 1, inputs - 1] = FAR[0]
    weight[5 % outputs, 200 % inputs] = weight[9 % outputs, 204 % inputs] = FAR[1]
    return weight


def bits(x: Tensor) -> Tensor:
    """Return the bits of numbers, so that NaNs can be compared, and 0 and -0 differ."""
    return x.contiguous().view(torch.int16)


def data_of(weight: Tensor) -> Tensor:
    data = native.compressed(weight)
    assert data is not None
    return data


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize(("outputs", "inputs"), [(70, 517), (64, 1028), (33, 1030), (97, 1027)])
@pytest.mark.parametrize("has_far", [False, True])
def test_products_have_the_bits_of_dense_ones(outputs: int, inputs: int, has_far: bool) -> None:
    weight = with_far(drawn(outputs, inputs)) if has_far else drawn(outputs, inputs)
    data, packed, shape = data_of(weight), dense_native.packed(weight), (outputs, inputs)
    g = torch.Generator().manual_seed(1)
    x, bias = torch.randn(100, inputs, generator=g).bfloat16(), torch.randn(outputs, generator=g).bfloat16()
    for rows in (*range(1, 35), 64, 97, 100):
        added = bias if rows % 2 else None
        found = native.linear(x[:rows], data, shape, added)
        assert torch.equal(bits(found), bits(dense_native.linear(x[:rows], packed, outputs, added))), rows
    wide = torch.full((9, inputs + 3), torch.nan, dtype=BF16)
    wide[:, :inputs] = x[:9]
    assert torch.equal(
        bits(native.linear(wide[:, :inputs], data, shape, bias)), bits(native.linear(x[:9], data, shape, bias))
    )


@pytest.mark.usefixtures("target")
@settings(max_examples=60, deadline=None)
@given(
    seed=SIZES,
    rows=st.integers(1, 40),
    outputs=SIZES,
    units=st.integers(25, 150),
    far=st.lists(st.tuples(st.integers(0, 999), st.integers(0, 999), st.sampled_from(FAR)), max_size=3),
)
def test_any_weight_has_the_bits_of_the_dense_one(
    seed: int, rows: int, outputs: int, units: int, far: list[tuple[int, int, float]]
) -> None:
    inputs = units * 4
    weight = drawn(outputs, inputs, seed)
    for output, input, number in far:
        weight[output % outputs, input % inputs] = number
    data = native.compressed(weight)
    if data is None:
        return
    shape = (outputs, inputs)
    assert torch.equal(bits(reference.plain(data, shape)), bits(weight))
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed)).bfloat16()
    expected = dense_native.linear(x, dense_native.packed(weight), outputs, None)
    assert torch.equal(bits(native.linear(x, data, shape, None)), bits(expected))
    tokens = torch.randint(outputs, (rows,))
    assert torch.equal(bits(native.look_up(tokens, data, shape)), bits(weight[tokens]))


@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize("rows", [1, 5, 20, 100, 300])
def test_threads_change_no_bit(rows: int) -> None:
    weight, x = with_far(drawn(1000, 900)), torch.randn(rows, 900).bfloat16()
    for threads in (1, 2, 3):
        cpp.use_threads(threads)
        data = data_of(weight)
        expected = dense_native.linear(x, dense_native.packed(weight), 1000, None)
        assert torch.equal(bits(native.linear(x, data, (1000, 900), None)), bits(expected))


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize(("vocab", "hidden"), [(1, 80), (33, 517), (64, 1028)])
def test_rows_are_looked_up(vocab: int, hidden: int) -> None:
    weight = with_far(drawn(vocab, hidden)) if vocab > 1 else drawn(vocab, hidden)
    data, tokens, shape = data_of(weight), torch.randint(vocab, (40,)), (vocab, hidden)
    assert torch.equal(bits(native.look_up(tokens, data, shape)), bits(weight[tokens]))
    assert torch.equal(bits(compressed.CompressedWeight(data, *shape).plain()), bits(weight))
    for outside in (-1, vocab):
        with pytest.raises(IndexError, match=f"not in a table of {vocab}"):
            native.look_up(torch.tensor([0, outside]), data, shape)


@pytest.mark.usefixtures("target")
def test_a_weight_is_smaller_by_a_quarter() -> None:
    weight = torch.randn(320, 2048, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert data_of(weight).nbytes < 0.765 * weight.nbytes
    assert torch.equal(data_of(weight.t().contiguous().t()), data_of(weight))


@pytest.mark.usefixtures("target")
def test_a_weight_that_does_not_shrink_stays_as_it_is() -> None:
    """Every twelfth unit has an upper byte that is not in the table, so too many units would be kept whole."""
    weight = drawn(32, 960)
    weight[3, ::48] = torch.tensor([1e-30 * 8.0**power for power in range(20)])
    assert native.compressed(weight) is None
    layer = Linear(960, 32, False, BF16)
    layer.weight.data.copy_(weight)
    layer.pack()
    assert isinstance(layer.packed, dense.PackedWeight)
    assert torch.equal(layer.packed.plain(), weight)
    assert compressed.compress(weight.float()) is None


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("rows", [1, 5, 20, 100])
def test_results_are_written_to_columns_of_a_wider_tensor(rows: int) -> None:
    weight, x = with_far(drawn(45, 517)), torch.randn(rows, 517).bfloat16()
    weight = torch.where(weight.isfinite(), weight, 1e-30)
    for bias in (torch.randn(45).bfloat16(), None):
        assert_writes_columns(partial(native.linear, x, data_of(weight), (45, 517), bias), rows, 45, BF16)
    with pytest.raises(ValueError, match="out is"):
        native.linear(x, data_of(weight), (45, 517), None, x)


@pytest.mark.usefixtures("native_kernels")
def test_other_inputs_are_refused() -> None:
    data, x = data_of(drawn(40, 120)), torch.randn(3, 120).bfloat16()
    with pytest.raises(ValueError, match=r"x is \(3, 119\)"):
        native.linear(x[:, :119], data, (40, 120), None)
    with pytest.raises(ValueError, match=r"x is .* of torch\.float32"):
        native.linear(x.float(), data, (40, 120), None)
    with pytest.raises(ValueError, match="bias is"):
        native.linear(x, data, (40, 120), torch.zeros(5).bfloat16())


def test_targets_with_avx512_and_without_amx_use_it(target: Target) -> None:
    assert native.pays() == (target.name in ("x86-64-v4-bf16", "x86-64-v4-vnni", "x86-64-v4"))
    layer, table = Linear(128, 96, False, BF16), Embedding(96, 128, True, BF16)
    for module in (layer, table):
        module.weight.data.copy_(drawn(96, 128))
        module.pack()
        kind = compressed.CompressedWeight if native.pays() else dense.PackedWeight
        assert isinstance(module.packed, kind)
    x, tokens = torch.randn(5, 128).bfloat16(), torch.tensor([95, 0, 7])
    assert torch.equal(layer(x), table.logits(x))
    assert torch.equal(table(tokens), drawn(96, 128)[tokens])


def test_without_native_code_nothing_is_compressed() -> None:
    assert compressed.compress(drawn(96, 128)) is None


@pytest.mark.parametrize("name", [native.LINEAR, native.LOOK_UP])
def test_a_fault_in_the_decoding_is_noticed_when_a_library_is_loaded(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One code in the data is changed, in the unit before the last whole one, as if it was decoded wrongly."""
    honest = native.compressed

    def changed(weight: Tensor) -> Tensor | None:
        data = honest(weight)
        if data is not None:
            data[-reference.WHOLE_BYTES - reference.UNIT_BYTES] ^= 1
        return data

    monkeypatch.setattr(native, "compressed", changed)
    left_out = cpp.install(library_for(), threads=1)
    cpp.uninstall()
    assert name in left_out
