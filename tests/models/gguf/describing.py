"""The metadata of GGUF files, as llama.cpp's converter writes it, and the tokenizer of the tests' checkpoints."""

from collections.abc import Callable
from typing import Any

import gguf

from tests.models.oracle import END_OF_TURN, SPECIAL_TOKENS, TEMPLATE, VOCABULARY, byte_characters


def write_vocabulary(writer: gguf.GGUFWriter) -> None:
    """Write the tokenizer of the tests' checkpoints: each byte is a token, and special tokens follow."""
    bytes_ = [character for _, character in sorted(byte_characters().items())]
    special = [*SPECIAL_TOKENS, *(f"[PAD{n}]" for n in range(256 + len(SPECIAL_TOKENS), VOCABULARY))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*bytes_, *special])
    unused = VOCABULARY - 256 - len(SPECIAL_TOKENS)
    writer.add_token_types([1] * 256 + [3] * len(SPECIAL_TOKENS) + [5] * unused)
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(END_OF_TURN)
    writer.add_bos_token_id(256)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def write_metadata(writer: gguf.GGUFWriter, family: str, config: dict[str, Any], layers: int) -> None:
    writer.add_block_count(layers)
    writer.add_context_length(config.get("max_position_embeddings") or config.get("model_max_length") or 4096)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_vocab_size(config["vocab_size"])
    eps = config.get("rms_norm_eps") or config.get("layer_norm_epsilon") or config.get("norm_eps")
    writer.add_layer_norm_rms_eps(eps)
    writer.add_layer_norm_eps(eps)
    rope = config.get("rope_parameters") or {}
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    METADATA[family](writer, config, layers)


def mamba_metadata(writer: gguf.GGUFWriter, kernel: int, heads: int, width: int, state: int, groups: int) -> None:
    writer.add_ssm_conv_kernel(kernel)
    writer.add_ssm_inner_size(heads * width)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_group_count(groups)


def of_mamba2(writer: gguf.GGUFWriter, config: dict[str, Any], layers: int) -> None:
    names = ("conv_kernel", "num_heads", "head_dim", "state_size", "n_groups")
    mamba_metadata(writer, *(config[name] for name in names))
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)


def of_hybrid(writer: gguf.GGUFWriter, config: dict[str, Any], layers: int) -> None:
    heads = config["mamba_n_heads"]
    inner = config.get("mamba_d_ssm") or config["mamba_expand"] * config["hidden_size"]
    names = ("mamba_d_state", "mamba_n_groups")
    mamba_metadata(writer, config["mamba_d_conv"], heads, inner // heads, *(config[name] for name in names))
    writer.add_head_count(config["num_attention_heads"])


def of_granite(writer: gguf.GGUFWriter, config: dict[str, Any], layers: int) -> None:
    of_hybrid(writer, config, layers)
    kinds = config["layer_types"]
    kv_heads = config["num_key_value_heads"]
    writer.add_head_count_kv([kv_heads if kind in ("attention", "full_attention") else 0 for kind in kinds])
    experts = config["num_local_experts"]
    writer.add_feed_forward_length(config["intermediate_size" if experts else "shared_intermediate_size"])
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])
    writer.add_rope_scaling_finetuned(config["position_embedding_type"] == "rope")
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])


def of_falcon_h1(writer: gguf.GGUFWriter, config: dict[str, Any], layers: int) -> None:
    of_hybrid(writer, config, layers)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_feed_forward_length(config["intermediate_size"])
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_key_length(width)
    writer.add_value_length(width)


def of_nemotron_h(writer: gguf.GGUFWriter, config: dict[str, Any], layers: int) -> None:
    kinds = config["layers_block_type"]
    names = ("conv_kernel", "mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups")
    mamba_metadata(writer, *(config[name] for name in names))
    attends = ("attention", "full_attention")
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv([config["num_key_value_heads"] if kind in attends else 0 for kind in kinds])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    inner = {"mlp": config["intermediate_size"], "moe": config.get("moe_intermediate_size", 0)}
    writer.add_feed_forward_length([inner.get(kind, 0) for kind in kinds])
    if "moe" in kinds:
        writer.add_expert_count(config["n_routed_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])


def of_qwen(writer: gguf.GGUFWriter, config: dict[str, Any], layers: int) -> None:
    names = ("linear_conv_kernel_dim", "linear_num_value_heads", "linear_value_head_dim", "linear_key_head_dim")
    mamba_metadata(writer, *(config[name] for name in names), config["linear_num_key_heads"])
    width = config["head_dim"]
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_feed_forward_length(config.get("intermediate_size") or 0)
    share = (config.get("rope_parameters") or {}).get("partial_rotary_factor", 0.25)
    writer.add_rope_dimension_count(int(width * share))
    writer.add_rope_dimension_sections([1, 1, 0, 0])
    writer.add_full_attention_interval(1 + config["layer_types"].index("full_attention"))
    if experts := config.get("num_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def of_kimi(writer: gguf.GGUFWriter, config: dict[str, Any], layers: int) -> None:
    linear = config.get("linear_attn_config") or {}
    rotated, heads = config["qk_rope_head_dim"], config["num_attention_heads"]
    full = [kind == "full_attention" for kind in config["layer_types"]]
    writer.add_head_count(heads)
    writer.add_head_count_kv([int(attends) for attends in full])
    writer.add_ssm_conv_kernel(linear.get("short_conv_kernel_size") or config["linear_conv_kernel_dim"])
    writer.add_kda_head_dim(linear.get("head_dim") or config["linear_head_dim"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    if config.get("q_lora_rank"):
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_rope_dimension_count(rotated)
    writer.add_key_length(config["kv_lora_rank"] + rotated)
    writer.add_value_length(config["kv_lora_rank"])
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rotated)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_leading_dense_block_count(config["mlp_layer_types"].count("dense"))
    writer.add_expert_shared_count(config.get("n_shared_experts") or config.get("num_shared_experts") or 1)
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if "sparse" in config["mlp_layer_types"]:
        writer.add_expert_count(config.get("num_local_experts") or config["num_experts"])
        writer.add_expert_used_count(config.get("num_experts_per_tok") or config["num_experts_per_token"])


def of_lfm2(writer: gguf.GGUFWriter, config: dict[str, Any], layers: int) -> None:
    attends = [kind == "full_attention" for kind in config["layer_types"]]
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv([config["num_key_value_heads"] * each for each in attends])
    writer.add_shortconv_l_cache(config["conv_L_cache"])
    inner = config["intermediate_size"]
    if config.get("block_auto_adjust_ff_dim"):
        multiple = config["block_multiple_of"]
        inner = int(config["block_ffn_dim_multiplier"] * int(2 * inner / 3))
        inner = multiple * -(-inner // multiple)
    writer.add_feed_forward_length(inner)
    if experts := config.get("num_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_leading_dense_block_count(config["num_dense_layers"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])


METADATA: dict[str, Callable[[gguf.GGUFWriter, dict[str, Any], int], None]] = {
    "mamba2": of_mamba2,
    "granitemoehybrid": of_granite,
    "falcon_h1": of_falcon_h1,
    "nemotron_h": of_nemotron_h,
    "qwen3_next": of_qwen,
    "qwen3_5_text": of_qwen,
    "qwen3_5_moe_text": of_qwen,
    "kimi_linear": of_kimi,
    "lfm2": of_lfm2,
    "lfm2_moe": of_lfm2,
}
