"""GGUF files of every architecture: the same model as from the checkpoint that they were converted from."""

from pathlib import Path
from typing import Any

import pytest
import torch

from baton.models.loading.checkpoint import load_model
from tests.models.gguf.converting import convert
from tests.models.oracle import KIMI_MOE, Oracle
from tests.models.test_parity import assert_close, ids, make_pools, pages, prefill

CPU = torch.device("cpu")
ALL_EXPERTS = {"decoder_sparse_step": 1, "norm_topk_prob": True}
PLAIN = (
    "mamba2", "mamba2-groups", "granitemoehybrid", "granitemoehybrid-rope", "granitemoehybrid-moe", "falcon_h1",
    "nemotron_h", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "kimi_linear",
)  # fmt: skip
NAMES: dict[str, dict[str, Any]] = {
    **{name: {} for name in PLAIN},
    "qwen3_next-moe": ALL_EXPERTS,
    "kimi_linear-moe": {"linear_attn_config": KIMI_MOE["linear_attn_config"] | {"num_heads": 4}},  # as many as others
    "nemotron_h-moe": {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]},
    "falcon_h1-gate-first": {"mamba_conv_bias": True},  # llama.cpp crashes without
}  # fmt: skip
TOKENS = 24


@pytest.mark.parametrize("name", NAMES)
def test_the_logits_are_those_of_the_checkpoint(oracle: Oracle, name: str, tmp_path: Path) -> None:
    folder = oracle.checkpoint(name, **NAMES[name])
    file = convert(folder, tmp_path / "model.gguf")
    tokens, table = ids(TOKENS), pages(1)
    found = []
    for source in (folder, file):
        model = load_model(source, torch.float32, CPU)
        hidden = model.forward(prefill(tokens, 0, 1, table), make_pools(model, 2, 1))
        found.append(model.logits(hidden))
    assert_close(found[1], found[0])
