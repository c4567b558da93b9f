"""Conversion of checkpoints to GGUF as llama.cpp's converter does it, with the names of the `gguf` package."""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file
from torch import Tensor

from tests.models.gguf.describing import write_metadata, write_vocabulary

Named = Iterator[tuple[str, Tensor]]
ARCHITECTURES = {
    "mamba2": gguf.MODEL_ARCH.MAMBA2,
    "granitemoehybrid": gguf.MODEL_ARCH.GRANITE_HYBRID,
    "falcon_h1": gguf.MODEL_ARCH.FALCON_H1,
    "nemotron_h": gguf.MODEL_ARCH.NEMOTRON_H,
    "qwen3_next": gguf.MODEL_ARCH.QWEN3NEXT,
    "qwen3_5_text": gguf.MODEL_ARCH.QWEN35,
    "qwen3_5_moe_text": gguf.MODEL_ARCH.QWEN35MOE,
    "kimi_linear": gguf.MODEL_ARCH.KIMI_LINEAR,
    "lfm2": gguf.MODEL_ARCH.LFM2,
    "lfm2_moe": gguf.MODEL_ARCH.LFM2MOE,
}
Choose = Callable[[str], Type]
Vocabulary = Callable[[gguf.GGUFWriter], None]
EXPERT = re.compile(r".*\.experts\.(\d+)\.(\w+?)(?:_proj)?\.weight")
PARTS = {"w1": "gate", "w2": "down", "w3": "up"}


def everything_f32(name: str) -> Type:
    return Type.F32


def convert(
    folder: Path,
    file: Path,
    choose: Choose = everything_f32,
    vocabulary: Vocabulary | None = None,
) -> Path:
    """Write the checkpoint in a folder as a GGUF file.

    choose: returns the type of a tensor's numbers, given its name; called for tensors with at least two dimensions.
    vocabulary: writes the tokenizer; None: write_vocabulary, for the tests' checkpoints.
    """
    config = json.loads((folder / "config.json").read_text())
    config = {**config, **config.get("text_config", {})}
    family = config["model_type"]
    architecture = ARCHITECTURES[family]
    if family == "nemotron_h" and "moe" in config["layers_block_type"]:
        architecture = gguf.MODEL_ARCH.NEMOTRON_H_MOE
    layers = config.get("num_hidden_layers") or len(config["layers_block_type"])
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[architecture])
    write_metadata(writer, family, config, layers)
    (vocabulary or write_vocabulary)(writer)
    names = gguf.get_tensor_name_map(architecture, layers)
    for stored, values in stacked(load_file(folder / "model.safetensors")).items():
        if "visual" in stored:
            continue
        for name, tensor in changed(family, config, stored.replace("language_model.", ""), values.float()):
            mapped = name if name.startswith("blk.") else names.get_name(name, (".weight", ".bias"))
            assert mapped is not None, name
            write(writer, mapped, tensor, choose(mapped) if tensor.ndim > 1 else Type.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors in which the weights of a layer's experts are one tensor."""
    found, experts = dict[str, Tensor](), defaultdict[str, dict[int, Tensor]](dict)
    for name, tensor in sorted(tensors.items()):
        if match := EXPERT.fullmatch(name):
            layer = layer_of(name.replace("language_model.", ""))
            experts[f"{layer}.ffn_{PARTS.get(match[2], match[2])}_exps.weight"][int(match[1])] = tensor
        else:
            found[name] = tensor
    return found | {name: torch.stack([some[n] for n in range(len(some))]) for name, some in experts.items()}


def write(writer: gguf.GGUFWriter, name: str, tensor: Tensor, kind: Type) -> None:
    values = tensor.contiguous().numpy()
    if kind is Type.F32:
        writer.add_tensor(name, values)
    else:
        data, kind = written_as(values, kind)
        writer.add_tensor(name, data, raw_dtype=kind)


def written_as(values: np.ndarray, kind: Type) -> tuple[np.ndarray, Type]:
    """Return the data of a tensor that is written as another type, and the type."""
    return gguf.quants.quantize(values, kind), kind


def changed(family: str, config: dict[str, Any], name: str, tensor: Tensor) -> Named:
    """Yield what the converter makes of a tensor: names that the `gguf` package maps, or final ones (blk. …)."""
    if name.endswith(".A_log"):
        tensor = -torch.exp(tensor)
    if name.endswith(".dt_bias"):
        name = name.removesuffix(".dt_bias") + ".dt_proj.bias"
    if "conv1d.weight" in name and family != "kimi_linear":
        tensor = tensor.squeeze()
    yield from OF_FAMILY[family](config, name, tensor)


def with_groups(config: dict[str, Any], name: str, tensor: Tensor) -> Named:
    """Mamba-2: A and D have a dimension more, and the norm's weight is split by group."""
    if name.endswith((".A_log", ".D")):
        tensor = tensor.unsqueeze(1)
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        groups = config.get("mamba_n_groups") or config["n_groups"]
        tensor = tensor.view(groups, -1)
    yield name, tensor


def layer_of(name: str) -> str:
    return "blk." + name.partition(".layers.")[2].partition(".")[0]


def granite(config: dict[str, Any], name: str, tensor: Tensor) -> Named:
    """Rows of q and k are permuted for rotations of neighbouring numbers; gate and up are two tensors."""
    for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if f"self_attn.{part}" in name:
            shape = tensor.shape
            tensor = tensor.view(config[heads], 2, -1, *shape[1:]).transpose(1, 2).reshape(shape)
    experts = config.get("num_local_experts")
    if name.endswith("block_sparse_moe.input_linear.weight"):
        gate, up = tensor.chunk(2, dim=1)
        yield f"{layer_of(name)}.ffn_gate_exps.weight", gate
        yield f"{layer_of(name)}.ffn_up_exps.weight", up
    elif name.endswith("shared_mlp.input_linear.weight"):
        gate, up = tensor.chunk(2)
        suffix = "_shexp" if experts else ""
        yield f"{layer_of(name)}.ffn_gate{suffix}.weight", gate
        yield f"{layer_of(name)}.ffn_up{suffix}.weight", up
    elif name.endswith("shared_mlp.output_linear.weight"):
        yield f"{layer_of(name)}.ffn_down{'_shexp' if experts else ''}.weight", tensor
    else:
        yield from with_groups(config, name, tensor)


def falcon_h1(config: dict[str, Any], name: str, tensor: Tensor) -> Named:
    """All multipliers are multiplied into the weights."""
    inner, state = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    factors = {
        "down_proj": config["mlp_multipliers"][1],
        "gate_proj": config["mlp_multipliers"][0],
        "k_proj": config["key_multiplier"] * config["attention_in_multiplier"],
        "q_proj": config["attention_in_multiplier"],
        "v_proj": config["attention_in_multiplier"],
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    projection = name.split(".")[-2]
    if projection == "in_proj":
        rows = [inner, inner, state, state, config["mamba_n_heads"]]
        ssm = [torch.full((n,), factor) for n, factor in zip(rows, config["ssm_multipliers"], strict=True)]
        tensor = tensor * config["ssm_in_multiplier"] * torch.cat(ssm).unsqueeze(1)
    yield from with_groups(config, name, tensor * factors.get(projection, 1.0))


def nemotron_h(config: dict[str, Any], name: str, tensor: Tensor) -> Named:
    if "latent_proj" in name:
        yield f"{layer_of(name)}.ffn_latent_{'down' if 'fc1' in name else 'up'}.weight", tensor
    elif "shared_experts" in name:
        yield f"{layer_of(name)}.ffn_{'up' if 'up_proj' in name else 'down'}_shexp.weight", tensor
    elif name.endswith("e_score_correction_bias"):
        yield f"{layer_of(name)}.exp_probs_b.bias", tensor
    else:
        yield from with_groups(config, name.replace("model.", "backbone.", 1), tensor)


def qwen(config: dict[str, Any], name: str, tensor: Tensor) -> Named:
    """Norms but one have 1 added to their weights; qkvz is split."""
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        tensor = tensor + 1
    if "in_proj_qkvz" in name:
        keys, shared = (
            config["linear_num_key_heads"],
            config["linear_num_value_heads"] // config["linear_num_key_heads"],
        )
        own, value = config["linear_key_head_dim"], shared * config["linear_value_head_dim"]
        parts = torch.split(tensor.view(keys, -1, tensor.shape[1]), [own, own, value, value], dim=1)
        query, key, values, gate = (part.reshape(-1, tensor.shape[1]) for part in parts)
        yield f"{layer_of(name)}.attn_qkv.weight", torch.cat([query, key, values])
        yield f"{layer_of(name)}.attn_gate.weight", gate
    elif name.endswith("shared_expert_gate.weight"):
        yield f"{layer_of(name)}.ffn_gate_inp_shexp.weight", tensor.squeeze(0)
    else:
        yield name, tensor


def qwen3_5(config: dict[str, Any], name: str, tensor: Tensor) -> Named:
    """Value heads are tiled: the first one of each key head, then the second one of each, and so on."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    width, untouched = config["linear_value_head_dim"], 2 * keys * config["linear_key_head_dim"]

    def tiled(part: Tensor, width: int, dim: int = 0) -> Tensor:
        heads = part.unflatten(dim, (keys, values // keys, width))
        return heads.transpose(dim, dim + 1).flatten(dim, dim + 2)

    if "in_proj_qkv." in name or "linear_attn.conv1d" in name:
        tensor = torch.cat([tensor[:untouched], tiled(tensor[untouched:], width)])
    elif "in_proj_z." in name:
        tensor = tiled(tensor, width)
    elif name.endswith(("in_proj_a.weight", "in_proj_b.weight", "linear_attn.A_log", "linear_attn.dt_proj.bias")):
        tensor = tiled(tensor, 1)
    elif "linear_attn.out_proj" in name:
        tensor = tiled(tensor, width, 1)
    yield from qwen(config, name, tensor)


def kimi(config: dict[str, Any], name: str, tensor: Tensor) -> Named:
    """Convolutions have four dimensions; kv_b_proj is split, and the keys' part transposed."""
    layer, name = layer_of(name), name.replace(".block_sparse_moe.", ".mlp.")
    if "_conv1d." in name:
        part = name[name.index("_conv1d") - 1]
        yield f"{layer}.ssm_conv1d_{part}.weight", tensor.reshape(1, tensor.shape[0], 1, -1)
    elif name.endswith("kv_b_proj.weight"):
        own, value = config["qk_nope_head_dim"], config["v_head_dim"]
        heads = tensor.view(config["num_attention_heads"], own + value, -1)
        yield f"{layer}.attn_k_b.weight", heads[:, :own].mT
        yield f"{layer}.attn_v_b.weight", heads[:, own:]
    elif name.endswith("e_score_correction_bias"):
        yield f"{layer}.exp_probs_b.bias", tensor
    elif name.endswith(".A_log"):
        yield f"{layer}.ssm_a", tensor.reshape(1, 1, -1, 1)
    else:
        yield name, tensor


def lfm2(config: dict[str, Any], name: str, tensor: Tensor) -> Named:
    if name.endswith("expert_bias"):
        yield f"{layer_of(name)}.exp_probs_b.bias", tensor
    else:
        yield name, tensor.squeeze(1) if name.endswith("conv.conv.weight") else tensor


OF_FAMILY: dict[str, Callable[[dict[str, Any], str, Tensor], Named]] = {
    "mamba2": with_groups,
    "granitemoehybrid": granite,
    "falcon_h1": falcon_h1,
    "nemotron_h": nemotron_h,
    "qwen3_next": qwen,
    "qwen3_5_text": qwen3_5,
    "qwen3_5_moe_text": qwen3_5,
    "kimi_linear": kimi,
    "lfm2": lfm2,
    "lfm2_moe": lfm2,
}
