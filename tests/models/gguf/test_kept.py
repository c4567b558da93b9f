"""GGUF files whose integers stay integers: the same logits as from the dequantized weights, in less memory."""

from itertools import cycle
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor, nn

from baton.kernels.linear.quantized import Form
from baton.models.batch import Model
from baton.models.config import ModelError
from baton.models.family import Piece
from baton.models.gguf.blocks import BLOCKS
from baton.models.layers.linear import Linear
from baton.models.loading.checkpoint import build_model, find_family, load_model, read_stored
from baton.models.loading.filling import parts_of
from baton.models.loading.formats.composed import MixedGroups
from baton.models.loading.kept import sizes_kept, take_part
from baton.models.loading.matching import match
from baton.models.loading.shards import read_headers
from baton.models.loading.source import read_source_config
from tests.kernels.installed import installed
from tests.models.gguf import converting
from tests.models.gguf.converting import convert
from tests.models.gguf.test_architectures import NAMES
from tests.models.oracle import Oracle
from tests.models.test_parity import ids, make_pools, pages, prefill

CPU = torch.device("cpu")
LIMIT = 1e-3  # of the difference of logits, as a share of the largest one
TOKENS = 24
FLOATS = ("norm", "conv1d", "shortconv.conv", "ssm_a", "ssm_d", "ssm_dt", "gate_inp", "exp_probs")
"""Parts of names of tensors that llama.cpp never quantizes."""
WIDE: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {
        "hidden_size": 256, "shared_intermediate_size": 512, "mamba_n_heads": 32, "num_attention_heads": 4,
    },
    "qwen3_5_text": {
        "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 64,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 128,
    },
    "lfm2_moe": {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256},
}  # fmt: skip
"""Sizes for blocks of 256 numbers."""


def random_blocks(kind: Type, shape: tuple[int, ...]) -> np.ndarray:
    """Return blocks of a format with weights of about the size of 1/16: uint8 [.., bytes of a row]."""
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    chance = np.random.default_rng(shape[-1] + shape[0])
    raw = chance.integers(0, 256, (*shape[:-1], shape[-1] // elements, size), dtype=np.uint8)
    places = {"Q6_K": [208], "Q4_1": [0, 2], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2]}.get(kind.name, [0])
    size_of = {"Q4_K": (2**-13, 2**-10), "Q5_K": (2**-14, 2**-10), "Q6_K": (2**-15,), "Q8_0": (2**-10,)}
    sizes = size_of.get(kind.name, (2**-7, -(2**-4)))
    for place, scale in zip(places, sizes, strict=False):
        numbers = (chance.uniform(0.5, 1, raw.shape[:-1]) * scale).astype(np.float16)
        raw[..., place : place + 2] = numbers[..., None].view(np.uint8)
    return raw.reshape(*shape[:-1], -1)


def written(folder: Path, file: Path, kinds: tuple[Type, ...]) -> Path:
    """Write a checkpoint with random weights in these formats, by turns, where a tensor's rows fit them."""
    turn = cycle(kinds)

    def choose(name: str) -> Type:
        return Type.F32 if any(part in name for part in FLOATS) else next(turn)

    def blocks(values: np.ndarray, kind: Type) -> tuple[np.ndarray, Type]:
        if values.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
            return values, Type.F32
        return random_blocks(kind, values.shape), kind

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(converting, "written_as", blocks)
        return convert(folder, file, choose)


def logits_of(model: Model) -> Tensor:
    hidden = model.forward(prefill(ids(TOKENS), 0, 1, pages(1)), make_pools(model, 2, 1))
    return model.logits(hidden)


def kept_and_dequantized(file: Path, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Tensor, Tensor]:
    """Load a file with native code and without. Return the former model and the logits of both."""
    plain = logits_of(load_model(file, dtype, CPU))
    with installed():
        model = load_model(file, dtype, CPU)
        assert isinstance(model, nn.Module)
        return model, logits_of(model), plain


MIXED = ("qwen3_5", "qwen3_5_moe")  # value heads of 16 numbers, which move, share scales with others


def assert_kept(file: Path, mixes: bool = False) -> nn.Module:
    """Check the logits, and that the memory is what is computed without reading the weights. Return the model.

    mixes: whether some weights have groups that do not stay together.
    """
    model, found, plain = kept_and_dequantized(file)
    assert (found - plain).abs().max() < LIMIT * plain.abs().max()
    config = read_source_config(file)
    family = find_family(config)
    empty = build_model(family, config, torch.float32, torch.float32)
    assert isinstance(empty, nn.Module)
    fillings, _ = match(read_stored(file, config), dict(empty.named_parameters()), family, config)
    expected, parameters = dict(sizes_kept(empty, parts_of(fillings))), dict(model.named_parameters())
    integers = {name for name, parameter in parameters.items() if parameter.dtype == torch.uint8}
    weights = {name.rpartition("weight_")[0] + "weight" if "weight_" in name else name for name in integers}
    assert weights and (weights < expected.keys() if mixes else weights == expected.keys())
    for name in integers - {name for name in integers if "weight_" in name}:
        others = [each for key, each in parameters.items() if key.startswith(f"{name}_")]
        if all(each.dtype == torch.uint8 for each in others):  # Floats that are packed are padded.
            assert parameters[name].nbytes + sum(each.nbytes for each in others) == expected[name]
    return model


@pytest.mark.parametrize("name", NAMES)
def test_every_architecture_with_its_own_mixture_of_formats(oracle: Oracle, name: str, tmp_path: Path) -> None:
    kinds = (Type.Q8_0, Type.Q4_0, Type.Q5_1, Type.F16, Type.Q5_0, Type.Q4_1)
    first = list(NAMES).index(name) % len(kinds)
    file = written(oracle.checkpoint(name, **NAMES[name]), tmp_path / "m.gguf", kinds[first:] + kinds[:first])
    assert_kept(file, mixes=name in MIXED)


@pytest.mark.parametrize("name", NAMES)
def test_every_architecture_in_one_format(oracle: Oracle, name: str, tmp_path: Path) -> None:
    file = written(oracle.checkpoint(name, **NAMES[name]), tmp_path / "m.gguf", (Type.Q4_0,))
    assert_kept(file, mixes=name in MIXED)


@pytest.mark.parametrize("kinds", [(Type.Q4_K,), (Type.Q4_K, Type.Q6_K), (Type.Q5_K, Type.Q5_K, Type.Q6_K)])
@pytest.mark.parametrize("name", WIDE)
def test_blocks_of_256_numbers(oracle: Oracle, name: str, kinds: tuple[Type, ...], tmp_path: Path) -> None:
    file = written(oracle.checkpoint(name, **WIDE[name]), tmp_path / "m.gguf", kinds)
    model, found, plain = kept_and_dequantized(file)
    assert (found - plain).abs().max() < LIMIT * plain.abs().max()
    assert all(layer.integers for layer in model.modules() if isinstance(layer, Linear) and not is_narrow(layer))


def is_narrow(layer: Linear) -> bool:
    """Return whether a layer is one that is never quantized: a gate of a shared expert."""
    return layer.outputs == 1


def test_columns_in_another_order_keep_their_scales() -> None:
    """Qwen3.5's value heads of 128 numbers are moved: a block of 256 becomes two, each with the block's scales."""
    block = BLOCKS["Q4_K"]
    raw = torch.from_numpy(random_blocks(Type.Q4_K, (3, 512))).flatten()
    groups, values = block.groups(raw, 512), block.dequantize(raw).view(3, 512)

    def swapped(weight: Tensor) -> Tensor:
        return weight.view(3, 2, 2, 128).transpose(1, 2).reshape(3, 512)

    found = take_part(groups, (3, 512), Piece("", take=swapped))
    assert found.form == Form(4, 32, span=4, has_minima=True, dtype=torch.float16)
    assert torch.equal(found.numbers(), swapped(values))
    rows = take_part(groups, (3, 512), Piece("", take=lambda weight: weight[1:]))
    assert rows.form == block.form and torch.equal(rows.numbers(), values[1:])


@pytest.mark.parametrize(
    "take", [lambda weight: weight.roll(5, 1), lambda weight: weight.float() - 1, lambda w: w[:, 5:37]]
)
def test_groups_that_do_not_stay_together_are_told_apart(take: Any) -> None:
    raw = torch.from_numpy(random_blocks(Type.Q8_0, (3, 64))).flatten()
    with pytest.raises(MixedGroups):
        take_part(BLOCKS["Q8_0"].groups(raw, 64), (3, 64), Piece("", take=take))


def test_a_scale_that_is_not_finite_is_refused(oracle: Oracle, tmp_path: Path) -> None:
    file = written(oracle.checkpoint("mamba2"), tmp_path / "m.gguf", (Type.Q8_0,))
    [stored] = [each for each in read_headers([file]) if each.name == "blk.0.ssm_in.weight"]
    data = bytearray(file.read_bytes())
    data[stored.start : stored.start + 2] = np.float16("inf").tobytes()
    file.write_bytes(data)
    with installed(), pytest.raises(ModelError, match=r"blk\.0\.ssm_in\.weight holds NaN or infinity"):
        load_model(file, torch.float32, CPU)
