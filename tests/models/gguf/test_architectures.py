"""GGUF files of every architecture: the same model as from the checkpoint that they were converted from."""

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from baton.models.config import ModelError
from baton.models.gguf.header import GgufHeader, read_gguf
from baton.models.loading.checkpoint import load_model
from baton.models.loading.fingerprint import fingerprint
from baton.models.loading.shards import read_headers
from tests.models.gguf import converting, describing
from tests.models.gguf.converting import convert
from tests.models.oracle import KIMI_MOE, Oracle
from tests.models.test_parity import assert_close, ids, make_pools, pages, prefill

CPU = torch.device("cpu")
ALL_EXPERTS = {"decoder_sparse_step": 1, "norm_topk_prob": True}
PLAIN = (
    "mamba2", "mamba2-groups", "granitemoehybrid", "granitemoehybrid-rope", "granitemoehybrid-moe", "falcon_h1",
    "nemotron_h", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "kimi_linear", "lfm2",
    "lfm2_moe",
)  # fmt: skip
NAMES: dict[str, dict[str, Any]] = {
    **{name: {} for name in PLAIN},
    "qwen3_next-moe": ALL_EXPERTS,
    # KDA with as many heads as attention has.
    "kimi_linear-moe": {"linear_attn_config": KIMI_MOE["linear_attn_config"] | {"num_heads": 4}},
    "nemotron_h-moe": {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]},
    "falcon_h1-gate-first": {"mamba_conv_bias": True},  # llama.cpp crashes without
}  # fmt: skip
TOKENS = 24
ROTATED = "granitehybrid.rope.dimension_count"
QUANTIZED = ("ssm_in.weight", "attn_q.weight", "ffn_up.weight", "ffn_down.weight", "token_embd.weight")


@pytest.mark.parametrize("name", NAMES)
def test_the_logits_are_those_of_the_checkpoint(oracle: Oracle, name: str, tmp_path: Path) -> None:
    folder = oracle.checkpoint(name, **NAMES[name])
    file = convert(folder, tmp_path / "model.gguf")
    assert_close(logits_of(file), logits_of(folder))


def logits_of(source: Path) -> Tensor:
    """Return the logits after each of some tokens."""
    model = load_model(source, torch.float32, CPU)
    hidden = model.forward(prefill(ids(TOKENS), 0, 1, pages(1)), make_pools(model, 2, 1))
    return model.logits(hidden)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q5_1"])
def test_quantized_weights_are_those_that_the_file_stands_for(oracle: Oracle, kind: str, tmp_path: Path) -> None:
    """The logits are exactly those of a file with the dequantized weights."""
    folder, chosen = oracle.checkpoint("granitemoehybrid"), Type[kind]

    def choose(name: str) -> Type:
        return chosen if name.endswith((*QUANTIZED, "ssm_out.weight")) else Type.F32

    def rounded(values: np.ndarray, kind: Type) -> tuple[np.ndarray, Type]:
        return gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind), Type.F32

    quantized = convert(folder, tmp_path / "quantized.gguf", choose)
    assert {stored.dtype for stored in read_headers([quantized])} == {"F32", kind}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(converting, "written_as", rounded)
        wide = convert(folder, tmp_path / "wide.gguf", choose)
    assert torch.equal(logits_of(quantized), logits_of(wide))


def test_layers_that_predict_further_tokens_are_left_out(oracle: Oracle, tmp_path: Path) -> None:
    """They follow the others in the file, and their number is in the metadata."""
    folder = oracle.checkpoint("qwen3_5_text")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(describing.METADATA, "qwen3_5_text", with_one_more_layer)
        file = convert(folder, tmp_path / "m.gguf")
    assert any(name.startswith("blk.4.") for name in read_gguf(file).tensors)
    assert load_model(file, torch.float32, CPU).state_specs() == load_model(folder, torch.float32, CPU).state_specs()


def with_one_more_layer(writer: gguf.GGUFWriter, config: dict[str, Any], layers: int) -> None:
    describing.of_qwen(writer, config, layers)
    writer.add_block_count(layers + 1)
    writer.add_nextn_predict_layers(1)
    writer.add_tensor(f"blk.{layers}.nextn.eh_proj.weight", np.zeros((4, 8), np.float32))


def test_unknown_architectures_and_missing_metadata_are_refused(oracle: Oracle, tmp_path: Path) -> None:
    file = convert(oracle.checkpoint("mamba2"), tmp_path / "m.gguf")
    data = file.read_bytes()
    file.write_bytes(data.replace(b"mamba2.ssm.inner_size", b"mamba2.ssm.outer_size"))
    with pytest.raises(ModelError, match=r"lacks mamba2\.ssm\.inner_size"):
        load_model(file, None, CPU)
    key = b"general.architecture" + (8).to_bytes(4, "little") + (6).to_bytes(8, "little")
    file.write_bytes(data.replace(key + b"mamba2", key + b"llamas"))
    with pytest.raises(ModelError, match="the architecture 'llamas' is not supported"):
        load_model(file, None, CPU)


def test_bamba_is_refused(oracle: Oracle, tmp_path: Path) -> None:
    """Its files have Granite's architecture. llama.cpp's permutation of rows does not fit rotations of half a head."""
    folder = oracle.checkpoint("granitemoehybrid-rope")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_rope_dimension_count", lambda writer, count: writer.add_uint32(ROTATED, 8))
        file = convert(folder, tmp_path / "m.gguf")
    with pytest.raises(ModelError, match="files of Bamba, which rotates a part of each head, are not read"):
        load_model(file, None, CPU)


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("ssm.time_step_rank", 0, "does not describe a model of mamba2"),
        ("ssm.inner_size", "many", "does not describe a model of mamba2"),
        ("ssm.inner_size", 40, "wrong shapes"),
        ("block_count", 9, r"layer|missing tensors"),
        ("rope.scaling.type", "yarn", r"mamba2\.rope\.scaling\.type = 'yarn' is not supported"),
        ("attention.causal", False, r"mamba2\.attention\.causal = False is not supported"),
    ],
)
def test_metadata_that_does_not_fit_is_refused(
    oracle: Oracle, tmp_path: Path, key: str, value: Any, error: str
) -> None:
    file = convert(oracle.checkpoint("mamba2"), tmp_path / "m.gguf")
    header = read_gguf(file)
    changed = GgufHeader(header.metadata | {f"mamba2.{key}": value}, header.tensors)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("baton.models.loading.source.read_gguf", lambda path: changed)
        with pytest.raises(ModelError, match=error):
            load_model(file, None, CPU)


def test_the_fingerprint_tells_files_with_other_metadata_apart(oracle: Oracle, tmp_path: Path) -> None:
    file = convert(oracle.checkpoint("granitemoehybrid"), tmp_path / "m.gguf")
    before, key = fingerprint(file), b"granitehybrid.residual_scale" + (6).to_bytes(4, "little")
    data = file.read_bytes()
    at = data.index(key) + len(key)
    file.write_bytes(data[:at] + struct.pack("<f", 0.5) + data[at + 4 :])
    assert load_model(file, None, CPU) and fingerprint(file) != before


def test_experts_that_another_function_chooses_are_refused(oracle: Oracle, tmp_path: Path) -> None:
    file = convert(oracle.checkpoint("lfm2_moe"), tmp_path / "m.gguf")
    key = b"lfm2moe.expert_gating_func" + (4).to_bytes(4, "little")
    file.write_bytes(file.read_bytes().replace(key + b"\x02", key + b"\x01"))
    with pytest.raises(ModelError, match=r"lfm2moe\.expert_gating_func = 1 is not supported"):
        load_model(file, None, CPU)
