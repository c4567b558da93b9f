"""The warm-up launches every variant that prompts of any size need: found on meta tensors, without a GPU."""

import random
from collections.abc import Iterator
from functools import cache
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton.actors.forward.device import Work
from baton.actors.forward.warming import step_sizes, warm_up
from baton.kernels.moe.experts import PARTS, PackedExperts, pack
from baton.kernels.runtime import triton
from baton.kernels.runtime.triton.selection import HAS_TRITON
from baton.models.batch import Batch, Prefill, allocate
from baton.models.config import ModelConfig
from baton.models.layers.experts import Experts
from baton.models.loading.checkpoint import build_model, find_family
from baton.models.loading.filling import PACKED
from scripts.benchmarks.common.shapes import config_of
from tests.actors.forward.test_late_device import variant
from tests.models.oracle import settings_of

if not HAS_TRITON:
    pytest.skip("there is no Triton", allow_module_level=True)

META, PAGE, STEP_TOKENS = torch.device("meta"), 16, 2048
FAMILIES = [
    "mamba2",
    "nemotron_h-moe-latent",
    "granitemoehybrid-rope",
    "granitemoehybrid-moe",
    "bamba",
    "falcon_h1",
    "qwen3_next-moe",
    "qwen3_5_moe",
    "kimi_linear-moe",
    "lfm2_moe",
    "olmo_hybrid",
    "bailing_hybrid",
    "granite-moe-153m",
    "nemotron_h-moe-162m",
    "qwen3_next-152m",
    "kimi_linear-153m",
]


@pytest.fixture(autouse=True)
def on_meta() -> Iterator[None]:
    with triton.computes_for("meta"):
        yield


EXPERTS: dict[str, dict[str, Any]] = {
    "granite-moe-153m": config_of("granite-moe-153m", 2) | {"num_local_experts": 72, "num_experts_per_tok": 10},
    "nemotron_h-moe-162m": config_of("nemotron_h-moe-162m")
    | {"hybrid_override_pattern": "ME*", "num_hidden_layers": 3, "n_routed_experts": 64, "num_experts_per_tok": 6},
    "qwen3_next-152m": config_of("qwen3_next-152m", 4) | {"num_experts": 64, "num_experts_per_tok": 4},
    "kimi_linear-153m": config_of("kimi_linear-153m", 2) | {"num_experts": 64, "num_experts_per_token": 8},
}
"""Models whose mixtures are wide enough, and have enough experts, for all sizes of tiles."""


def model_of(family: str, bits: int | None, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return a model on the meta device, quantized unless `bits` is None."""
    config = EXPERTS[family] if family in EXPERTS else settings_of(family)
    parsed = ModelConfig({**config, "vocab_size": 256})
    model: Any = build_model(find_family(parsed), parsed, dtype, torch.float32)
    for module in model.modules() if bits else ():
        if isinstance(module, Experts):
            parts = (("input_linear", PARTS[module.activation]), ("output_linear", 1))
            module.packed = {name: packed(getattr(module, name).shape, dtype, count, bits) for name, count in parts}
        elif isinstance(module, PACKED):
            module.pack(bits)
    return model


@cache
def packed(shape: torch.Size, dtype: torch.dtype, parts: int, bits: int) -> PackedExperts | None:
    return pack(torch.empty(shape, dtype=dtype, device=META), parts, bits)


class Watched:
    """A device on meta tensors that records how many prompt tokens each step has, and how many slots were copied."""

    def __init__(self, model: Any, slots: int, pages: int, max_running: int) -> None:
        self.model, self.max_running = model, max_running
        self.pools = allocate(model, slots, pages if model.kv_specs() else 0, PAGE, META)
        self.sizes, self.copies = set[int](), list[str]()

    def launch(self, work: Work) -> Any:
        self.sizes.add(sum(chunk.stop - chunk.start for chunk in work.chunks))
        return SimpleNamespace(collect=lambda: None)

    def export(self, *_: Any) -> Any:
        self.copies.append("export")
        return SimpleNamespace(collect=lambda: None)

    def fill(self, *_: Any) -> Any:
        self.copies.append("fill")
        return SimpleNamespace(collect=lambda: None)

    def clear(self, slot: int) -> None: ...

    def drop(self, key: int) -> None: ...

    def open_row(self, *_: Any) -> None: ...


def variants(model: Any, *lengths: int, start: int = 0) -> set[tuple[Any, ...]]:
    """Return the variants that a step launches for prompts of these lengths, with the head for all tokens.

    start: the position at which each prompt begins.
    """
    tokens, pages, count = sum(lengths), -(-(start + max(lengths)) // PAGE), len(lengths)
    pools = allocate(model, count + 1, pages, PAGE, META)
    table = torch.zeros(count, pages, dtype=torch.int32, device=META)
    positions, found = torch.zeros(tokens, dtype=torch.int64, device=META), list[triton.Launch]()
    offsets = [0, *accumulate(lengths)]
    with triton.watched(found.append), torch.inference_mode():
        batch = Batch(positions, positions, Prefill(offsets, [start] * count, [*range(count)], [], table), None)
        model.logits(model.forward(batch, pools)[:128])
    return {variant(launch) for launch in found}


def edges(model: Any) -> set[int]:
    """Return numbers of tokens on both sides of every number at which a kernel may change its tiles.

    Tiles of projections change at powers of two, and tiles of experts where each expert gets a power of two of tokens
    on average, rounded up or down. Latent attention of segments changes its form at the shortest long one.
    """
    powers = [2**power for power in range(12)]
    routers = [module for module in model.modules() if hasattr(module, "rule")]
    shares = {len(router.weight) / router.rule.top_k for router in routers}
    found = {int(power * share) + more for power in powers for share in {1.0, *shares} for more in (0, 1)}
    if forms := model.outline.forms:
        found |= {forms.shortest - 1, forms.shortest}
    return {tokens for tokens in found if 0 < tokens <= STEP_TOKENS} | {STEP_TOKENS}


def warmed(model: Any, max_running: int = 1, longest: int = STEP_TOKENS) -> set[int]:
    """Return the numbers of prompt tokens in the steps of a warm-up."""
    device: Any = Watched(model, 300, 1000, max_running)
    warm_up(device, longest, STEP_TOKENS)
    assert device.copies == ["export", "fill"]
    return device.sizes - {0}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bits", [None, pytest.param(8, marks=pytest.mark.soak), 4])
def test_a_prompt_of_any_size_needs_only_warmed_variants(family: str, bits: int | None) -> None:
    model = model_of(family, bits)
    known = set[Any]().union(*(variants(model, tokens) for tokens in warmed(model)))
    drawn = random.Random(0).sample(range(1, STEP_TOKENS + 1), 4)
    for tokens in sorted(edges(model) | {*drawn}):
        assert variants(model, tokens) <= known, tokens


@pytest.mark.parametrize("family", ["kimi_linear-moe", "kimi_linear-153m"])
def test_long_and_short_segments_of_latents_need_only_warmed_variants(family: str) -> None:
    """Long segments are computed by heads: at the beginning, in the middle of a prompt, and after short ones."""
    model = model_of(family, None)
    known = set[Any]().union(*(variants(model, tokens) for tokens in warmed(model)))
    shortest = model.outline.forms.shortest
    assert {name for name, *_ in known} >= {"_attend_block", "_prefill"}
    assert "_attend_block" not in {name for name, *_ in variants(model, shortest - 1)}
    assert variants(model, STEP_TOKENS, start=20_000) <= known
    assert variants(model, 1, shortest - 1, shortest, shortest + 7, 3, 5, start=77) <= known


@pytest.mark.parametrize("bits", [None, 8])
def test_float32_needs_only_warmed_variants(bits: int | None) -> None:
    model = model_of("granite-moe-153m", bits, torch.float32)
    known = set[Any]().union(*(variants(model, tokens) for tokens in warmed(model)))
    for tokens in sorted(edges(model)):
        assert variants(model, tokens) <= known, tokens


@pytest.mark.parametrize("family", ["granitemoehybrid-moe", "mamba2"])
def test_sizes_beyond_the_longest_prompt_are_warmed_by_several_prompts(family: str) -> None:
    """A step may have more tokens than a sequence: the limit of a sequence does not limit what is warmed."""
    model = model_of(family, 8)
    assert warmed(model, 256, longest=90) >= {*step_sizes(Watched(model, 3, 3, 1), STEP_TOKENS)}  # type: ignore[arg-type]


def test_only_few_sizes_are_warmed() -> None:
    assert len(warmed(model_of("mamba2", None))) <= 5
    assert len(warmed(model_of("granite-moe-153m", 4))) <= 12
