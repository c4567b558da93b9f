"""Write a checkpoint's weights as a GGUF file for llama.cpp. Runs in llama.cpp's environment, which has gguf.

    write_gguf.py CHECKPOINT FILE f32|bf16|q8_0|q4_0

The last argument is the type of all matrices, including the embedding, which is also the head. Norms, convolutions and
decays stay float32, as llama.cpp requires. The vocabulary is that of the checkpoint's tokenizer: t0, t1, ...
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors import safe_open

TYPES = {
    "f32": gguf.GGMLQuantizationType.F32,
    "bf16": gguf.GGMLQuantizationType.BF16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
}
TOP = {
    "backbone.embeddings.weight": "token_embd.weight",
    "backbone.norm_f.weight": "output_norm.weight",
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "model.embedding_norm.weight": "token_embd_norm.weight",
}
# Names of a layer's tensors in checkpoints of these families and in llama.cpp, without the layer's prefix and number.
IN_LAYER = {
    "norm.weight": "attn_norm.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "in_proj.weight": "ssm_in.weight",
    "out_proj.weight": "ssm_out.weight",
    "conv1d.weight": "ssm_conv1d.weight",
    "conv1d.bias": "ssm_conv1d.bias",
    "dt_bias": "ssm_dt.bias",
    "A_log": "ssm_a",
    "D": "ssm_d",
    "mixer.norm.weight": "ssm_norm.weight",
    "mamba.norm.weight": "ssm_norm.weight",
    "q_proj.weight": "attn_q.weight",
    "k_proj.weight": "attn_k.weight",
    "v_proj.weight": "attn_v.weight",
    "o_proj.weight": "attn_output.weight",
    "output_linear.weight": "ffn_down.weight",
    "operator_norm.weight": "attn_norm.weight",
    "ffn_norm.weight": "ffn_norm.weight",
    "conv.in_proj.weight": "shortconv.in_proj.weight",
    "conv.out_proj.weight": "shortconv.out_proj.weight",
    "conv.conv.weight": "shortconv.conv.weight",
    "self_attn.out_proj.weight": "attn_output.weight",
    "q_layernorm.weight": "attn_q_norm.weight",
    "k_layernorm.weight": "attn_k_norm.weight",
    "w1.weight": "ffn_gate.weight",
    "w2.weight": "ffn_down.weight",
    "w3.weight": "ffn_up.weight",
}


def main(checkpoint: Path, file: Path, kind: str) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    architecture, describe = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(file, architecture)
    describe(writer, config)
    add_vocabulary(writer, config["vocab_size"])
    for name, weights in tensors(checkpoint / "model.safetensors"):
        quantized = TYPES[kind] if weights.ndim == 2 and is_matrix(name) else TYPES["f32"]
        writer.add_tensor(name, gguf.quants.quantize(weights, quantized), raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def describe_mamba2(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    describe_mamba(writer, config, heads=config["num_heads"], state=config["state_size"], kernel=config["conv_kernel"])
    writer.add_ssm_group_count(config["n_groups"])
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_layer_norm_rms_eps(config.get("layer_norm_epsilon", 1e-5))


def describe_granite(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    describe_mamba(
        writer, config, heads=config["mamba_n_heads"], state=config["mamba_d_state"], kernel=config["mamba_d_conv"]
    )
    writer.add_ssm_group_count(config["mamba_n_groups"])
    writer.add_feed_forward_length(config["shared_intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    keys = {"attention": config["num_key_value_heads"], "mamba": 0}
    writer.add_head_count_kv([keys[kind] for kind in config["layer_types"]])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])
    writer.add_rope_scaling_finetuned(False)


def describe_lfm2(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    describe_any(writer, config, context=config["max_position_embeddings"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    keys = {"full_attention": config["num_key_value_heads"], "conv": 0}
    writer.add_head_count_kv([keys[kind] for kind in config["layer_types"]])
    writer.add_layer_norm_rms_eps(config["norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_shortconv_l_cache(config["conv_L_cache"])


def describe_mamba(writer: gguf.GGUFWriter, config: dict[str, Any], heads: int, state: int, kernel: int) -> None:
    describe_any(writer, config, context=2**20)
    writer.add_ssm_conv_kernel(kernel)
    writer.add_ssm_inner_size(2 * config["hidden_size"])
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(heads)


def describe_any(writer: gguf.GGUFWriter, config: dict[str, Any], context: int) -> None:
    writer.add_context_length(context)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])


def add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """Add a SentencePiece vocabulary of words t0, t1, ....

    Merges build a word from "▁t" digit by digit, so "▁t" must be a token too. "▁t" has the id of the last word.
    """
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"▁t{id}" for id in range(size - 1)] + ["▁t"])
    writer.add_token_scores([0.0] * size)
    writer.add_token_types([gguf.TokenType.NORMAL] * size)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_unk_token_id):
        add(size - 1)


def tensors(file: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield all tensors with llama.cpp's names and shapes, as float32."""
    with safe_open(file, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118
            weights = opened.get_tensor(name).float().numpy()
            if name in TOP:
                yield TOP[name], weights
                continue
            _, _, rest = name.partition(".layers.")
            layer, _, rest = rest.partition(".")
            yield from ((f"blk.{layer}.{new}", shaped) for new, shaped in in_layer(rest, weights))


def in_layer(name: str, weights: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield a tensor of a layer with its name in llama.cpp, or two tensors if llama.cpp splits the tensor."""
    if name.endswith("input_linear.weight"):
        gate, up = np.split(weights, 2)
        yield from (("ffn_gate.weight", gate), ("ffn_up.weight", up))
        return
    new = IN_LAYER.get(name) or IN_LAYER[name.partition(".")[2]]
    if new == "ssm_a":
        weights = -np.exp(weights)
    if new in ("ssm_a", "ssm_d"):
        weights = weights.reshape(-1, 1)
    elif new == "ssm_norm.weight":
        weights = weights.reshape(1, -1)
    elif new in ("ssm_conv1d.weight", "shortconv.conv.weight"):
        weights = weights.reshape(len(weights), -1)
    yield new, np.ascontiguousarray(weights)


def is_matrix(name: str) -> bool:
    return name.endswith(".weight") and not any(part in name for part in ("norm", "conv1d", "conv.conv"))


ARCHITECTURES = {
    "mamba2": ("mamba2", describe_mamba2),
    "granitemoehybrid": ("granitehybrid", describe_granite),
    "lfm2": ("lfm2", describe_lfm2),
}
"""The name in llama.cpp of each family of checkpoints, and the function that writes its metadata."""


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
