"""Tiny random checkpoints made by transformers, and transformers' results for them."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_OF_TURN = 258
VOCABULARY = 272
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

MAMBA2 = {
    "hidden_size": 64, "num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "num_hidden_layers": 2,
    "chunk_size": 16, "tie_word_embeddings": True,
}  # fmt: skip
NEMOTRON_H = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "intermediate_size": 96,
    "mamba_num_heads": 6, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1, "chunk_size": 32,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"],
    "time_step_min": 1e-30, "max_position_embeddings": 4096,
}  # fmt: skip
GRANITE = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "shared_intermediate_size": 96,
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 16, "num_local_experts": 0,
    "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "position_embedding_type": None, "tie_word_embeddings": True, "embedding_multiplier": 6.0,
    "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 2.0, "max_position_embeddings": 4096,
}  # fmt: skip
NEMOTRON_H_MOE = {
    **NEMOTRON_H, "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "mlp"],
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 56, "routed_scaling_factor": 2.5,
}  # fmt: skip
GRANITE_MOE = {**GRANITE, "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 48}

BAMBA = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 16, "num_hidden_layers": 3,
    "attn_layer_indices": [1], "tie_word_embeddings": True, "max_position_embeddings": 4096,
}  # fmt: skip
FALCON_H1 = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "mamba_d_ssm": 80,
    "mamba_n_heads": 5, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 16, "num_hidden_layers": 2,
    "max_position_embeddings": 4096, "embedding_multiplier": 5.0, "lm_head_multiplier": 0.4, "key_multiplier": 0.7,
    "attention_in_multiplier": 1.3, "attention_out_multiplier": 0.9, "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.6, "ssm_multipliers": [0.35, 0.8, 1.5, 0.5, 0.7], "mlp_multipliers": [0.9, 0.6],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e11},
}  # fmt: skip

QWEN3_NEXT = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "num_hidden_layers": 4, "num_experts": 0, "max_position_embeddings": 4096,
}  # fmt: skip
QWEN3_NEXT_MOE = {
    **QWEN3_NEXT, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}  # fmt: skip
VISION = {
    "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 64, "patch_size": 4,
    "num_position_embeddings": 16,
}  # fmt: skip

KIMI = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 96, "kv_lora_rank": 24,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "linear_num_heads": 4, "linear_head_dim": 16,
    "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mlp_layer_types": ["dense"] * 3, "max_position_embeddings": 4096,
}  # fmt: skip
KIMI_MOE = {
    **KIMI, "num_local_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "layer_types": None,
    "mlp_layer_types": None,
    "linear_attn_config": {
        "kda_layers": [1, 3], "full_attn_layers": [2], "num_heads": 5, "head_dim": 12, "short_conv_kernel_size": 3,
    },
}  # fmt: skip

BAILING = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "intermediate_size": 96,
    "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "num_hidden_layers": 3,
    "layer_group_size": 3, "kda_lower_bound": -3.0, "rope_theta": 500.0, "first_k_dense_replace": 1,
    "num_local_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_group": 4, "topk_group": 2,
    "max_position_embeddings": 4096,
}  # fmt: skip

OLMO_HYBRID = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
    "num_hidden_layers": 4, "max_position_embeddings": 4096, "rope_parameters": {"rope_theta": None},
}  # fmt: skip

LFM2 = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
    "block_auto_adjust_ff_dim": False, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"],
    "max_position_embeddings": 4096,
}  # fmt: skip
LFM2_MOE = {
    **{key: value for key, value in LFM2.items() if key != "block_auto_adjust_ff_dim"}, "num_experts": 6,
    "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_dense_layers": 1,
}  # fmt: skip

LFM3 = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "intermediate_size": 96,
    "num_hidden_layers": 5, "layer_types": ["conv", "sliding_attention", "full_attention", "conv", "sliding_attention"],
    "sliding_window": 7, "max_position_embeddings": 4096,
}  # fmt: skip

# The part of a name before the hyphen is the model_type.
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": ("Mamba2ForCausalLM", MAMBA2),
    "mamba2-groups": (
        "Mamba2ForCausalLM",
        {**MAMBA2, "hidden_size": 96, "num_heads": 6, "head_dim": 32, "n_groups": 3, "tie_word_embeddings": False},
    ),
    "mamba2-odd": (
        "Mamba2ForCausalLM",
        {**MAMBA2, "hidden_size": 40, "num_heads": 5, "num_hidden_layers": 3, "chunk_size": 256, "use_bias": True,
         "use_conv_bias": False, "conv_kernel": 3, "time_step_limit": (0.05, 0.5)},
    ),
    "nemotron_h": ("NemotronHForCausalLM", NEMOTRON_H),
    "nemotron_h-groups": (
        "NemotronHForCausalLM",
        {**NEMOTRON_H, "hidden_size": 72, "n_groups": 3, "mamba_head_dim": 8, "num_key_value_heads": 1, "head_dim": 16,
         "mlp_bias": True, "layers_block_type": ["full_attention", "linear_attention", "full_attention", "mlp"]},
    ),
    "granitemoehybrid": ("GraniteMoeHybridForCausalLM", GRANITE),
    "granitemoehybrid-rope": (
        "GraniteMoeHybridForCausalLM",
        {**GRANITE, "hidden_size": 96, "mamba_n_heads": 12, "mamba_n_groups": 2, "position_embedding_type": "rope",
         "num_attention_heads": 6, "num_key_value_heads": 3, "tie_word_embeddings": False, "mamba_chunk_size": 256,
         "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
    "bamba": ("BambaForCausalLM", BAMBA),
    "bamba-groups": (
        "BambaForCausalLM",
        {**BAMBA, "hidden_size": 96, "mamba_n_heads": 12, "mamba_n_groups": 3, "mamba_d_state": 20,
         "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 24, "attn_layer_indices": [0, 2],
         "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True,
         "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
    "falcon_h1": ("FalconH1ForCausalLM", FALCON_H1),
    "falcon_h1-norm": (
        "FalconH1ForCausalLM",
        {**FALCON_H1, "hidden_size": 96, "mamba_d_ssm": None, "mamba_n_heads": 6, "mamba_d_head": "auto",
         "mamba_n_groups": 3, "mamba_rms_norm": True, "head_dim": 20, "tie_word_embeddings": True,
         "projectors_bias": True, "attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True},
    ),
    "falcon_h1-gate-first": (
        "FalconH1ForCausalLM",
        {**FALCON_H1, "mamba_d_ssm": 48, "mamba_n_heads": 3, "mamba_d_state": 24, "mamba_rms_norm": True,
         "mamba_norm_before_gate": False, "mamba_conv_bias": False, "num_key_value_heads": 1},
    ),
    "qwen3_next": ("Qwen3NextForCausalLM", QWEN3_NEXT),
    "qwen3_next-groups": (
        "Qwen3NextForCausalLM",
        {**QWEN3_NEXT, "hidden_size": 96, "linear_num_value_heads": 6, "linear_value_head_dim": 8, "head_dim": 32,
         "num_key_value_heads": 1, "attention_bias": True, "tie_word_embeddings": True, "num_hidden_layers": 3,
         "layer_types": ["full_attention", "linear_attention", "full_attention"]},
    ),
    "qwen3_next-odd": (
        "Qwen3NextForCausalLM",
        {**QWEN3_NEXT, "hidden_size": 40, "linear_num_key_heads": 3, "linear_num_value_heads": 3,
         "num_hidden_layers": 2, "linear_key_head_dim": 7, "linear_value_head_dim": 9, "linear_conv_kernel_dim": 3,
         "head_dim": 20, "num_attention_heads": 3, "num_key_value_heads": 3, "full_attention_interval": 2,
         "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}},
    ),
    "qwen3_next-moe": (
        "Qwen3NextForCausalLM",
        {**QWEN3_NEXT_MOE, "decoder_sparse_step": 2, "norm_topk_prob": False, "full_attention_interval": 2},
    ),
    "qwen3_next-experts": ("Qwen3NextForCausalLM", {**QWEN3_NEXT_MOE, "mlp_only_layers": [1], "num_hidden_layers": 2}),
    "qwen3_5": (
        "Qwen3_5ForConditionalGeneration",
        {"text_config": {**QWEN3_NEXT, "full_attention_interval": 2}, "vision_config": VISION},
    ),
    "qwen3_5_text": ("Qwen3_5ForCausalLM", {**QWEN3_NEXT, "tie_word_embeddings": True, "linear_num_value_heads": 2}),
    "qwen3_5_moe": (
        "Qwen3_5MoeForConditionalGeneration",
        {"text_config": {**QWEN3_NEXT_MOE, "full_attention_interval": 2}, "vision_config": VISION},
    ),
    "granitemoehybrid-moe": ("GraniteMoeHybridForCausalLM", GRANITE_MOE),
    "granitemoehybrid-moe-alone": (
        "GraniteMoeHybridForCausalLM",
        {**GRANITE_MOE, "hidden_size": 96, "mamba_n_heads": 12, "shared_intermediate_size": 0, "num_local_experts": 35,
         "num_experts_per_tok": 5, "intermediate_size": 17, "tie_word_embeddings": False},
    ),
    "nemotron_h-moe": ("NemotronHForCausalLM", NEMOTRON_H_MOE),
    "nemotron_h-moe-latent": (
        "NemotronHForCausalLM",
        {**NEMOTRON_H_MOE, "hidden_size": 72, "moe_latent_size": 36, "n_routed_experts": 36, "num_experts_per_tok": 7,
         "n_group": 6, "topk_group": 3, "mlp_bias": True, "norm_topk_prob": False, "moe_intermediate_size": 19,
         "routed_scaling_factor": 1.5},
    ),
    "kimi_linear": ("KimiLinearForCausalLM", KIMI),
    "kimi_linear-odd": (
        "KimiLinearForCausalLM",
        {**KIMI, "hidden_size": 40, "num_attention_heads": 3, "num_key_value_heads": 3, "kv_lora_rank": 13,
         "q_lora_rank": 20, "qk_nope_head_dim": 7, "qk_rope_head_dim": 2, "v_head_dim": 9, "attention_bias": True,
         "linear_num_heads": 3, "linear_head_dim": 7, "num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"],
         "layer_types": ["full_attention", "linear_attention"], "num_local_experts": 5, "num_experts_per_tok": 2,
         "n_shared_experts": 2, "moe_intermediate_size": 16, "norm_topk_prob": False, "routed_scaling_factor": 1.5},
    ),
    "kimi_linear-moe": ("KimiLinearForCausalLM", KIMI_MOE),
    "kimi_linear-groups": ("KimiLinearForCausalLM", {**KIMI_MOE, "n_group": 4, "topk_group": 2}),
    "olmo_hybrid": ("OlmoHybridForCausalLM", OLMO_HYBRID),
    "olmo_hybrid-odd": (
        "OlmoHybridForCausalLM",
        {**OLMO_HYBRID, "hidden_size": 60, "num_attention_heads": 3, "num_key_value_heads": 1, "num_hidden_layers": 3,
         "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 7, "linear_value_head_dim": 9,
         "linear_conv_kernel_dim": 3, "linear_allow_neg_eigval": False, "attention_bias": True,
         "tie_word_embeddings": True,
         "layer_types": ["full_attention", "linear_attention", "full_attention"], "rms_norm_eps": 1e-3,
         "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
    "bailing_hybrid": ("BailingHybridForCausalLM", BAILING),
    "bailing_hybrid-odd": (
        "BailingHybridForCausalLM",
        {**BAILING, "hidden_size": 40, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 7,
         "kv_lora_rank": 13, "qk_nope_head_dim": 7, "qk_rope_head_dim": 6, "v_head_dim": 9, "attention_bias": True,
         "num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"], "kda_safe_gate": False,
         "short_conv_kernel_size": 3, "mlp_layer_types": ["sparse", "dense"], "num_local_experts": 5,
         "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 2, "norm_topk_prob": False,
         "routed_scaling_factor": 1.5, "rms_norm_eps": 1e-3},
    ),
    "lfm2": ("Lfm2ForCausalLM", LFM2),
    "lfm2-odd": (
        "Lfm2ForCausalLM",
        {**LFM2, "hidden_size": 60, "num_attention_heads": 3, "num_key_value_heads": 1, "conv_L_cache": 5,
         "conv_bias": True, "block_auto_adjust_ff_dim": True, "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.3,
         "layer_types": None, "full_attn_idxs": [0], "tie_word_embeddings": False, "norm_eps": 1e-3,
         "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
    "lfm2_moe": ("Lfm2MoeForCausalLM", LFM2_MOE),
    "lfm2_moe-unbiased": (
        "Lfm2MoeForCausalLM",
        {**LFM2_MOE, "num_dense_layers": 0, "use_expert_bias": False, "norm_topk_prob": False, "num_experts": 5,
         "num_experts_per_tok": 3, "routed_scaling_factor": 1.5, "tie_word_embeddings": False},
    ),
    "lfm3": ("Lfm3ForCausalLM", LFM3),
    "lfm3-odd": (
        "Lfm3ForCausalLM",
        {**LFM3, "hidden_size": 60, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 14,
         "conv_L_cache": 4, "conv_bias": True, "attention_bias": True, "use_sandwich_norm": False, "norm_eps": 1e-3,
         "num_hidden_layers": 3, "layer_types": ["sliding_attention", "conv", "full_attention"], "sliding_window": 17,
         "tie_word_embeddings": False,
         "rope_parameters": {
             "sliding_attention": {"rope_type": "proportional", "rope_theta": 100.0, "partial_rotary_factor": 0.75},
             "full_attention": {"rope_type": "default", "rope_theta": 500.0},
         }},
    ),
    "lfm3-ungated": ("Lfm3ForCausalLM", {**LFM3, "use_attention_gate": False, "layer_types": None}),
}  # fmt: skip


class Oracle:
    """A client of transformers in a separate process (see oracle_worker), which starts with the first request."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process: subprocess.Popen[str] | None = None

    def checkpoint(self, name: str, max_shard_size: str = "1GB", **changes: Any) -> Path:
        """Return the folder of a checkpoint in CHECKPOINTS, with tokenizer and chat template; make it only once.

        changes: settings that differ
        """
        architecture, config = CHECKPOINTS[name]
        config, changed = {**config, **changes}, "".join(f"-{key}" for key in changes)
        path = self.folder / f"{name}-{max_shard_size}{changed}"
        if not path.exists():
            self._ask(
                "make",
                architecture=architecture,
                config=with_tokens(config),
                path=str(path),
                shard=max_shard_size,
            )
            write_tokenizer(path)
        return path

    def logits(self, path: Path, ids: list[int]) -> Tensor:
        """Return the logits of a full forward, float32 [len(ids), vocab]."""
        return torch.tensor(self._ask("logits", path=str(path), ids=ids))

    def hidden(self, path: Path, ids: list[int]) -> Tensor:
        """Return the hidden states after the final norm, float32 [len(ids), hidden]."""
        return torch.tensor(self._ask("hidden", path=str(path), ids=ids))

    def greedy(self, path: Path, ids: list[int], count: int) -> list[int]:
        """Return the `count` greedy tokens after ids, each from a full forward; generation does not stop at EOS."""
        tokens: list[int] = self._ask("greedy", path=str(path), ids=ids, count=count)
        return tokens

    def continued(self, template: str, chat: list[dict[str, str]]) -> str | None:
        """Return the chat rendered with its final message left open; None if the template does not allow that."""
        text: str | None = self._ask("continued", template=template, chat=chat)
        return text

    def chat(self, path: Path, chat: list[dict[str, Any]], **options: Any) -> tuple[str, list[int]] | None:
        """Return the text and ids of the tokenizer's apply_chat_template for the chat; None if it refuses the chat."""
        answer = self._ask("chat", path=str(path), chat=chat, options=options)
        return None if answer is None else (answer[0], answer[1])

    def close(self) -> None:
        if self._process:
            self._process.communicate()

    def _ask(self, do: str, **request: Any) -> Any:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(Path(__file__).with_name("oracle_worker.py"))],
                cwd=self.folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps({"do": do, **request}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the oracle died with code {self._process.wait()}; its stderr says why")
        return json.loads(answer)


@contextmanager
def running_oracle(folder: Path) -> Iterator[Oracle]:
    oracle = Oracle(folder)
    try:
        yield oracle
    finally:
        oracle.close()


def settings_of(name: str, vocabulary: int = VOCABULARY) -> dict[str, Any]:
    """Return a checkpoint's config.json for random_model: the text model's settings that are not the default."""
    _, config = CHECKPOINTS[name]
    return {"model_type": name.partition("-")[0], "vocab_size": vocabulary, **config.get("text_config", config)}


def with_tokens(config: dict[str, Any]) -> dict[str, Any]:
    if "text_config" in config:
        return {**config, "text_config": with_tokens(config["text_config"])}
    tokens = {"vocab_size": VOCABULARY, "eos_token_id": END_OF_TURN, "bos_token_id": 256}
    return {**tokens, **config, "pad_token_id": 256}


def write_tokenizer(path: Path) -> None:
    """Write a tokenizer in which each byte is its own id and special tokens begin at 256, and tokenizer_config.json."""
    alphabet = [character for _, character in sorted(byte_characters().items())]
    tokenizer = Tokenizer(models.BPE(vocab={character: byte for byte, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"chat_template": TEMPLATE, "eos_token": "<|im_end|>", "add_bos_token": False}
    (path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def byte_characters() -> dict[int, str]:
    """Return the printable character that byte-level tokenizers write for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(hidden)}
