"""Codestral Mamba in both config styles, state-spaces' models in their own, and one of these for transformers."""

from typing import Any

from tests.models.configurations.published import Published, Shapes, mamba2_mixer, mamba2_state


def tensors(hidden: int, layers: int, heads: int, groups: int, vocabulary: int, head: bool) -> Shapes:
    found: Shapes = {"backbone.embeddings.weight": (vocabulary, hidden), "backbone.norm_f.weight": (hidden,)}
    for layer in range(layers):
        path = f"backbone.layers.{layer}"
        found |= {f"{path}.norm.weight": (hidden,)} | mamba2_mixer(f"{path}.mixer", hidden, heads, 64, groups, 128)
    return found | ({"lm_head.weight": (vocabulary, hidden)} if head else {})


def config(hidden: int, layers: int, heads: int, groups: int, vocabulary: int, tied: bool) -> dict[str, Any]:
    return {
        "model_type": "mamba2", "hidden_size": hidden, "num_hidden_layers": layers, "num_heads": heads, "head_dim": 64,
        "n_groups": groups, "state_size": 128, "conv_kernel": 4, "expand": 2, "chunk_size": 256, "hidden_act": "silu",
        "vocab_size": vocabulary, "tie_word_embeddings": tied, "use_bias": False, "use_conv_bias": True,
        "layer_norm_epsilon": 1e-5, "residual_in_fp32": True, "norm_before_gate": True, "rms_norm": True,
        "time_step_limit": [0.0, float("inf")], "torch_dtype": "bfloat16",
    }  # fmt: skip


CODESTRAL = tensors(4096, 64, 128, 8, 32768, head=True)
CODESTRAL_STATE = 64 * mamba2_state(128, 64, 8, 128)
NATIVE = {"dim": 4096, "n_layers": 64, "vocab_size": 32768, "n_groups": 8, "tie_embeddings": False}


def state_spaces(size: str, hidden: int, layers: int) -> Published:
    """Describe a model in state-spaces' own style; its files repeat the head, which converted files leave out."""
    heads = 2 * hidden // 64
    config = {
        "d_model": hidden, "d_intermediate": 0, "n_layer": layers, "vocab_size": 50277, "ssm_cfg": {"layer": "Mamba2"},
        "attn_layer_idx": [], "attn_cfg": {}, "rms_norm": True, "residual_in_fp32": True, "fused_add_norm": True,
        "pad_vocab_size_multiple": 16, "tie_embeddings": True,
    }  # fmt: skip
    found = tensors(hidden, layers, heads, 1, 50288, head=False)
    found["backbone.embedding.weight"] = found.pop("backbone.embeddings.weight")
    return Published(config, size, found, layers * mamba2_state(heads, 64, 1, 128), kv=0)


PUBLISHED = {
    "Mamba-Codestral-7B-v0.1": Published(
        config(4096, 64, 128, 8, 32768, tied=False), "7285403648", CODESTRAL, CODESTRAL_STATE, kv=0
    ),
    "Mamba-Codestral-7B-v0.1 (consolidated)": Published(
        {**NATIVE, "model_type": "mamba", "pad_vocab_size_multiple": 1, "residual_in_fp32": True},
        "7285403648",
        {"model." + name.replace(".embeddings.", ".embedding."): shape for name, shape in CODESTRAL.items()},
        CODESTRAL_STATE,
        kv=0,
    ),
    "mamba2-130m-hf": Published(
        config(768, 24, 24, 1, 50288, tied=True),
        "129M",
        tensors(768, 24, 24, 1, 50288, head=False),
        24 * mamba2_state(24, 64, 1, 128),
        kv=0,
    ),
    "mamba2-130m": state_spaces("129M", 768, 24),
    "mamba2-370m": state_spaces("368M", 1024, 48),
    "mamba2-780m": state_spaces("780M", 1536, 48),
    "mamba2-1.3b": state_spaces("1.34B", 2048, 48),
    "mamba2-2.7b": state_spaces("2.70B", 2560, 64),
}
