"""Models of about 150M parameters, one of each family, as their config.json would have them."""

from typing import Any

Config = dict[str, Any]
WITHOUT_ENDS: Config = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
COMMON: Config = {"torch_dtype": "bfloat16", "vocab_size": 50288, "hidden_size": 768, **WITHOUT_ENDS}
ATTENTION: Config = {"num_attention_heads": 12, "num_key_value_heads": 4, "max_position_embeddings": 32768}
MAMBA: Config = {"mamba_n_heads": 24, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_chunk_size": 64}

MAMBA2: Config = {
    **COMMON,
    "architectures": ["Mamba2ForCausalLM"],
    "model_type": "mamba2",
    "num_hidden_layers": 24,
    "num_heads": 24,
    "head_dim": 64,
    "state_size": 128,
    "n_groups": 1,
    "expand": 2,
    "conv_kernel": 4,
    "chunk_size": 64,
    "tie_word_embeddings": True,
}
GRANITE: Config = {
    **COMMON,
    **ATTENTION,
    **MAMBA,
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "num_hidden_layers": 16,
    "layer_types": ["mamba"] * 5 + ["attention"] + ["mamba"] * 7 + ["attention"] + ["mamba"] * 2,
    "attention_multiplier": 0.125,
    "position_embedding_type": "nope",
    "shared_intermediate_size": 1536,
    "intermediate_size": 1536,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
GRANITE_MOE: Config = {
    **GRANITE,
    "num_hidden_layers": 12,
    "layer_types": ["mamba"] * 5 + ["attention"] + ["mamba"] * 6,
    "shared_intermediate_size": 512,
    "intermediate_size": 128,
    "num_local_experts": 16,
    "num_experts_per_tok": 4,
}
NEMOTRON_H: Config = {
    **COMMON,
    **ATTENTION,
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M-M-M*-M-M-M-M-M*-M-M-M-",
    "num_hidden_layers": 24,
    "head_dim": 64,
    "intermediate_size": 2304,
    "mamba_num_heads": 24,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 1,
    "chunk_size": 64,
    "tie_word_embeddings": False,
}
NEMOTRON_H_MOE: Config = {
    **NEMOTRON_H,
    "hybrid_override_pattern": "MEMEM*EMEMEMEM*EMEME",
    "num_hidden_layers": 20,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 192,
    "moe_shared_expert_intermediate_size": 384,
}
BAMBA: Config = {
    **COMMON,
    **ATTENTION,
    **MAMBA,
    "architectures": ["BambaForCausalLM"],
    "model_type": "bamba",
    "num_hidden_layers": 16,
    "attn_layer_indices": [5, 13],
    "intermediate_size": 1536,
    "tie_word_embeddings": True,
}
FALCON_H1: Config = {
    **COMMON,
    **ATTENTION,
    **MAMBA,
    "architectures": ["FalconH1ForCausalLM"],
    "model_type": "falcon_h1",
    "num_hidden_layers": 12,
    "intermediate_size": 1536,
    "mamba_d_ssm": 1536,
    "mamba_rms_norm": True,
    "mamba_norm_before_gate": False,
    "tie_word_embeddings": True,
}
QWEN3_NEXT: Config = {
    **COMMON,
    **ATTENTION,
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "num_hidden_layers": 12,
    "full_attention_interval": 4,
    "head_dim": 64,
    "linear_num_key_heads": 6,
    "linear_num_value_heads": 12,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "intermediate_size": 1536,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 256,
    "tie_word_embeddings": True,
}
QWEN3_5: Config = {
    **{key: value for key, value in QWEN3_NEXT.items() if "expert" not in key},
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 16,
}
