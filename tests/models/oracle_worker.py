"""A process that runs transformers: it reads a JSON request per line from stdin, and writes an answer per line.

The separate process keeps transformers' memory, its warnings and its thread settings out of the tests.
It is started with `python -I`, so that this checkout's folder `kernels` does not hide the PyPI project of that name.
"""

import importlib
import json
import os
import sys
from typing import Any

OLMO_HYBRID_NORMS = {"input_layernorm": "attention_layer_norm", "post_attention_layernorm": "feedforward_layer_norm"}


def make(torch: Any, transformers: Any, architecture: str, config: dict[str, Any], path: str, shard: str) -> None:
    """Save a model of this architecture with random parameters, so that no two parameters can be mixed up unnoticed."""
    model_class = getattr(transformers, architecture)
    model = model_class(model_class.config_class(**config)).float()
    generator = torch.Generator().manual_seed(config.get("text_config", config)["hidden_size"])

    def normal(shape: Any, scale: float) -> Any:
        return torch.randn(shape, generator=generator) * scale

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            shape, leaf = parameter.shape, name.split(".")[-1]
            if leaf == "A_log":
                parameter.copy_(torch.rand(shape, generator=generator) * 2)
            elif leaf == "dt_bias":
                parameter.copy_(torch.rand(shape, generator=generator) * 4 - 4)
            elif len(shape) == 1:
                # Norms' weights are near 1, or near 0 in families that add 1 to them.
                parameter.copy_(normal(shape, 0.3) + (leaf == "weight" and bool(parameter.any())))
            elif "embed" in name:
                parameter.copy_(normal(shape, 0.3))
            else:
                parameter.copy_(normal(shape, (2 if "lm_head" in name else 1) * max(shape[-1], 1) ** -0.5))
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(normal(buffer.shape, 0.1))
    published = olmo_hybrid_tensors(model) if architecture == "OlmoHybridForCausalLM" else None
    model.save_pretrained(path, max_shard_size=shard, state_dict=published, save_original_format=published is None)


def olmo_hybrid_tensors(model: Any) -> dict[str, Any]:
    """Return an OLMo Hybrid's tensors as its published files have them.

    transformers would cut each convolution into equal parts, whatever the sizes of queries, keys and values are.
    """
    found = {}
    for name, tensor in model.state_dict().items():
        path, _, part = name.removesuffix(".weight").rpartition(".")
        layer = model.get_submodule(path.removesuffix(".linear_attn"))
        if part == "conv1d":
            sizes = [layer.linear_attn.key_dim, layer.linear_attn.key_dim, layer.linear_attn.value_dim]
            found |= {f"{path}.{key}_conv1d.weight": rows for key, rows in zip("qkv", tensor.split(sizes), strict=True)}
        elif part in OLMO_HYBRID_NORMS and hasattr(layer, "linear_attn"):
            found[f"{path}.{OLMO_HYBRID_NORMS[part]}.weight"] = tensor
        else:
            found[name] = tensor
    return {name: tensor.contiguous() for name, tensor in found.items()}


def continued(utils: Any, template: str, chat: list[dict[str, str]]) -> str | None:
    """Return the chat rendered with its final message left open; None if the template does not allow that."""
    try:
        [text], _ = utils.render_jinja_template([chat], chat_template=template, continue_final_message=True)
    except ValueError:
        return None
    return str(text)


def chat(tokenizer: Any, chat: list[dict[str, Any]], options: dict[str, Any]) -> Any:
    """Return the chat's text and ids; None if the template refuses the chat for any reason."""
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False, **options)
    except Exception as error:
        print(f"refused: {error!r}", file=sys.stderr)
        return None
    return text, tokenizer.apply_chat_template(chat, return_dict=False, **options)


def main() -> None:
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    models: dict[str, Any] = {}
    tokenizers: dict[str, Any] = {}

    def logits(path: str, ids: list[int]) -> Any:
        """Return the logits of a full forward without a cache: the cache of transformers is wrong in some families."""
        if path not in models:
            from_pretrained = transformers.AutoModelForCausalLM.from_pretrained
            # Implementations other than eager take only sizes that are multiples of 16 bytes.
            models[path] = from_pretrained(path, experts_implementation="eager").float().eval()
        with torch.no_grad():
            return models[path](torch.tensor([ids]), use_cache=False).logits[0]

    def hidden(path: str, ids: list[int]) -> Any:
        """Return the hidden states after the final norm, [len(ids), hidden]."""
        logits(path, ids[:1])
        with torch.no_grad():
            return models[path].base_model(torch.tensor([ids]), use_cache=False).last_hidden_state[0]

    def tokenizer(path: str) -> Any:
        if path not in tokenizers:
            tokenizers[path] = transformers.PreTrainedTokenizerFast.from_pretrained(path)
        return tokenizers[path]

    for line in sys.stdin:
        request = json.loads(line)
        match request.pop("do"):
            case "make":
                make(torch, transformers, **request)
                answer: Any = None
            case "logits":
                answer = logits(**request).tolist()
            case "hidden":
                answer = hidden(**request).tolist()
            case "greedy":
                ids, answer = list(request["ids"]), []
                for _ in range(request["count"]):
                    answer.append(int(logits(request["path"], ids + answer)[-1].argmax()))
            case "chat":
                answer = chat(tokenizer(request["path"]), request["chat"], request["options"])
            case "continued":
                answer = continued(importlib.import_module("transformers.utils.chat_template_utils"), **request)
        print(json.dumps(answer), file=replies, flush=True)


main()
