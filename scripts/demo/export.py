"""Export of the trained model as a Hugging Face checkpoint folder."""

import json
from pathlib import Path

from safetensors.torch import save_file
from tokenizers import Tokenizer

from scripts.demo.model import DemoModel, Size
from scripts.demo.text import END_OF_TEXT, IM_END, TEMPLATE

LONGEST = 8192  # most tokens of a chat


def export(model: DemoModel, tokenizer: Tokenizer, folder: Path) -> None:
    """Write config.json, model.safetensors, and the files of the tokenizer and chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    files: dict[str, dict[str, object]] = {
        "config.json": config(model.size),
        "generation_config.json": {
            "bos_token_id": END_OF_TEXT,
            "eos_token_id": [IM_END, END_OF_TEXT],
            "pad_token_id": END_OF_TEXT,
            "do_sample": False,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
            "clean_up_tokenization_spaces": False,
            "model_max_length": LONGEST,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def config(size: Size) -> dict[str, object]:
    """Return the content of config.json for a model of this size."""
    return {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "dtype": "float32",
        "vocab_size": size.vocab,
        "hidden_size": size.hidden,
        "num_hidden_layers": len(size.layers),
        "layer_types": list(size.layers),
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_multiplier": size.head**-0.5,
        "position_embedding_type": "nope",
        "rope_theta": 10000.0,
        "intermediate_size": size.intermediate,
        "shared_intermediate_size": size.intermediate,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "hidden_act": "silu",
        "mamba_n_heads": size.mamba_heads,
        "mamba_d_head": size.mamba_head,
        "mamba_d_state": size.mamba_state,
        "mamba_n_groups": 1,
        "mamba_d_conv": size.conv,
        "mamba_expand": size.mamba_inner // size.hidden,
        "mamba_chunk_size": size.chunk,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "embedding_multiplier": size.embedding_multiplier,
        "residual_multiplier": size.residual_multiplier,
        "logits_scaling": 1.0,
        "rms_norm_eps": size.eps,
        "initializer_range": 0.02,
        "max_position_embeddings": LONGEST,
        "tie_word_embeddings": True,
        "bos_token_id": END_OF_TEXT,
        "eos_token_id": IM_END,
        "pad_token_id": END_OF_TEXT,
        "use_cache": True,
    }


def count_parameters(model: DemoModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
