"""Models with quantized projections: which weights become integers, and that native code and torch agree."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from baton.actors.runtime.sizing import count_parameters, weight_bytes
from baton.kernels.linear.quantized import QuantizedWeight
from baton.models.batch import Batch, Model, Prefill, allocate
from baton.models.layers.attention import Attention
from baton.models.layers.delta import DeltaMixer
from baton.models.layers.experts import Experts
from baton.models.layers.kda import KdaMixer
from baton.models.layers.linear import Embedding, Linear
from baton.models.layers.mamba2 import Mamba2Mixer
from baton.models.layers.mla import LatentAttention
from baton.models.loading import filling
from baton.models.loading.checkpoint import load_model
from baton.models.text.tokenizer import load_text
from tests.kernels.installed import installed
from tests.models.oracle import Oracle
from tests.models.test_bundled import BUNDLED, greedy

CPU = torch.device("cpu")
NAMES = [
    "mamba2",
    "mamba2-groups",
    "nemotron_h",
    "granitemoehybrid-rope",
    "granitemoehybrid-moe",
    "nemotron_h-moe-latent",
]
OTHER_FAMILIES = [
    "bamba",
    "falcon_h1",
    "qwen3_next-moe",
    "qwen3_5_text",
    "kimi_linear-moe",
    "lfm2_moe",
    "olmo_hybrid",
    "bailing_hybrid",
]
FAMILIES = pytest.mark.parametrize("name", [*NAMES, *OTHER_FAMILIES])


def load(path: Path, bits: int | None, dtype: torch.dtype = torch.float32) -> Model:
    return load_model(path, dtype, CPU, bits=bits)


@torch.inference_mode()
def logits(model: Model) -> Tensor:
    tokens = torch.arange(48) * 5
    pools = allocate(model, 1, 3, 16, CPU)
    table = torch.tensor([[2, 1, 0]], dtype=torch.int32)
    hidden = model.forward(Batch(tokens, torch.arange(48), Prefill([0, 48], [0], [0], [], table), None), pools)
    return model.logits(hidden)


def modules(model: Model) -> Iterator[tuple[str, nn.Module]]:
    assert isinstance(model, nn.Module)
    return model.named_modules()


def floats_of(module: nn.Module) -> dict[str, int]:
    """Return how many last outputs of a layer's projections must stay floats, by the projection's name."""
    if isinstance(module, Mamba2Mixer):
        return {"in_proj": module.settings.heads}  # dt
    if isinstance(module, DeltaMixer):
        return {"in_proj": 2 * module.settings.value_heads}  # β and the decay
    if isinstance(module, KdaMixer):
        inner, narrow = module.settings.inner, module.settings.heads + 2 * module.settings.width
        if module.settings.full_rank:
            return {"in_proj": module.settings.heads, "f_proj": inner}  # β and the decay
        return {"in_proj": narrow, "f_b_proj": inner, "g_b_proj": inner}  # β, and both parts of the decay and the gate
    if isinstance(module, LatentAttention) and module.settings.gated:
        return {"g_proj": module.settings.heads}
    if isinstance(module, Attention) and module.settings.gates:
        return {"gate_proj": module.settings.gates}
    return {name: 1 for name, _ in module.named_children() if name == "shared_expert_gate"}


@FAMILIES
@pytest.mark.parametrize("bits", [8, 4])
def test_projections_are_integers_and_nothing_else(oracle: Oracle, name: str, bits: int) -> None:
    model, plain = load(oracle.checkpoint(name), bits), load(oracle.checkpoint(name), None)
    assert isinstance(plain, nn.Module) and isinstance(model, nn.Module)
    originals = dict(plain.named_parameters())
    floats = {f"{path}.{leaf}": rows for path, part in modules(model) for leaf, rows in floats_of(part).items()}
    for path, module in modules(model):
        original, rows = originals.get(f"{path}.weight"), floats.get(path, 0)
        integers = isinstance(module, Embedding) and module.tied
        if isinstance(module, Linear):
            assert original is not None
            integers = rows < len(original)
        if integers:
            packed = module.integers if isinstance(module, Linear) else module.packed
            assert original is not None and isinstance(packed, QuantizedWeight)
            assert (packed.form.bits, packed.dtype, packed.outputs) == (bits, torch.float32, len(original) - rows)
        for leaf, parameter in module.named_parameters(recurse=False):
            if (leaf == "weight" and integers) or isinstance(module, Experts):
                assert parameter.dtype == torch.uint8
            elif leaf == "float_weight":
                assert original is not None and torch.equal(parameter, original[-rows:])
            else:
                assert torch.equal(parameter, originals[f"{path}.{leaf}"])
    assert count_parameters(model) == count_parameters(plain)
    assert weight_bytes(model) < weight_bytes(plain)


# The last checkpoint is left out: with quantized weights, its routers soon choose different ones of their 36 experts.
@pytest.mark.parametrize("name", NAMES[:-1])
def test_more_bits_are_nearer(oracle: Oracle, name: str) -> None:
    exact, eight, four = (logits(load(oracle.checkpoint(name), bits)) for bits in (None, 8, 4))
    size = exact.square().mean().sqrt()
    errors = [float((found - exact).square().mean().sqrt() / size) for found in (eight, four)]
    assert errors[0] < 0.05 < errors[1] < 0.7


TERMS = 256


@FAMILIES
@pytest.mark.parametrize("bits", [8, 4])
def test_native_code_and_torch_compute_the_same(oracle: Oracle, name: str, bits: int) -> None:
    by_torch = logits(load(oracle.checkpoint(name), bits))
    with installed():
        by_native = logits(load(oracle.checkpoint(name), bits))
    # Rounding errors add up along sums of at most TERMS terms; single logits near 0 may have a larger relative error.
    assert (by_native - by_torch).norm() < TERMS * torch.finfo(torch.float32).eps * by_torch.norm()


def test_the_quantized_bundled_model_gives_the_same_tokens() -> None:
    text = load_text(BUNDLED)
    ids, _ = text.encode_chat([{"role": "user", "content": "What is 12 plus 7?"}])
    by_torch = list(islice(greedy(load(BUNDLED, 8), ids), 30))
    with installed():
        by_native = list(islice(greedy(load(BUNDLED, 8), ids), 30))
    assert by_native == by_torch
    assert text.decode(by_native).startswith("12 plus 7 is 19.")


def test_tensors_are_quantized_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading needs no more memory than the integers and one weight: each is quantized before the next is read."""
    assign, steps = filling.assign, list[str]()

    def watched(model: nn.Module, name: str, tensor: Tensor, bits: int | None, at_once: bool) -> None:
        assign(model, name, tensor, bits, at_once)
        steps.append("read")
        for path, module in model.named_modules():
            if isinstance(module, Linear) and not module.weight.is_meta:
                assert module.weight.dtype == torch.uint8, path
                assert module.integers is not None
                assert module.weight.data_ptr() == module.integers.data.data_ptr()
                floats = module.float_weight
                assert floats is None or floats.untyped_storage().nbytes() == floats.nbytes, "the rest is not kept"

    monkeypatch.setattr(filling, "assign", watched)
    model = load_model(BUNDLED, None, CPU, before_packing=lambda: steps.append("kernels"), bits=8)
    assert steps == ["kernels", *["read"] * len(steps[1:])]
    assert all(not parameter.is_meta for _, module in modules(model) for parameter in module.parameters())


def test_without_bits_kernels_may_compile_while_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assign, steps = filling.assign, list[str]()

    def watched(*arguments: Any) -> None:
        assign(*arguments)
        steps.append("read")

    monkeypatch.setattr(filling, "assign", watched)
    load_model(BUNDLED, None, CPU, before_packing=lambda: steps.append("kernels"))
    assert steps.index("kernels") == len(steps) - 1 > 0
