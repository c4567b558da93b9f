"""Reader of config.json, both in the forms found on the hub and in the form that transformers saves today.

read_json reads every JSON file of a checkpoint.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16")
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
UNLIMITED = 2**31 - 1
"""The largest integer that is accepted in config.json, and the max_position of a model that has no limit."""
MOST_BYTES = 1 << 26
"""The most bytes of a file that is read as a whole. The largest published tokenizers have about 35 MB."""
MOST_LAYERS = 1000
"""Deeper models are refused before anything is built. The deepest published models have about 130 layers."""
LAYER_LISTS = ("layer_types", "layers_block_type", "hybrid_override_pattern", "mlp_layer_types")
"""Keys with one entry for each layer: a list, or a string of one letter for each layer."""


class ModelError(ValueError):
    """The reason why a checkpoint cannot be served."""


HEAD_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Keys with the number of heads for multi-token prediction."""


class ModelConfig:
    """The values of a config.json.

    has_head: whether the head for multi-token prediction (MTP) is part of the model to build.

    Each getter takes a key and its older names. It raises ModelError, with the key, for a missing or wrong value.
    """

    def __init__(self, values: Mapping[str, Any], has_head: bool = False) -> None:
        self.values = dict(values)
        self.has_head = has_head

    def integer(self, *names: str, default: int | None = None, least: int = 1) -> int:
        name, value = self._find(names, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ModelError(f"config.json: {name} should be an integer, not {value!r}")
        if not least <= value <= UNLIMITED:
            raise ModelError(f"config.json: {name} should be from {least} to {UNLIMITED}, not {value}")
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        """Return a finite number above 0, such as an epsilon, a scale or a multiplier."""
        name, value = self._find(names, default)
        read = _number(value)
        if read is None:
            raise ModelError(f"config.json: {name} should be a number, not {value!r}")
        if not (math.isfinite(read) and read > 0):
            raise ModelError(f"config.json: {name} should be finite and above 0, not {read}")
        return read

    def flag(self, *names: str, default: bool | None = None) -> bool:
        name, value = self._find(names, default)
        if not isinstance(value, bool):
            raise ModelError(f"config.json: {name} should be true or false, not {value!r}")
        return value

    def limits(self, *names: str) -> tuple[float, float]:
        """Return a pair of numbers from 0 to ∞, the smaller one first; (0, ∞) if no key is set."""
        name, value = self._find(names, (0.0, float("inf")))
        low, high = (_number(v) for v in value) if isinstance(value, Sequence) and len(value) == 2 else (None, None)
        if low is None or high is None:
            raise ModelError(f"config.json: {name} should be a pair of numbers, not {value!r}")
        if not 0 <= low < high:
            raise ModelError(
                f"config.json: {name} should be two numbers from 0 up, the first below the second, not {value!r}"
            )
        return low, high

    def strings(self, *names: str) -> list[str] | None:
        """Return a list of strings; None if none of the keys is set."""
        name = next((n for n in names if self.values.get(n) is not None), None)
        if name is None:
            return None
        value = self.values[name]
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise ModelError(f"config.json: {name} should be a list of strings, not {value!r}")
        return value

    def check_depth(self) -> None:
        """Raise ModelError if any key says that the model has more than MOST_LAYERS layers."""
        counts = {name: len(value) for name in LAYER_LISTS if isinstance(value := self.values.get(name), list | str)}
        counts["num_hidden_layers"] = self.integer("num_hidden_layers", default=1)
        for name, count in counts.items():
            if count > MOST_LAYERS:
                raise ModelError(f"config.json: {name} says {count} layers: at most {MOST_LAYERS} are supported")

    def check_layers(self) -> None:
        """Raise ModelError unless num_hidden_layers and all LAYER_LISTS have the same number of layers."""
        found = {name: self.values.get(name) for name in LAYER_LISTS}
        counts = {name: len(value) for name, value in found.items() if isinstance(value, list | str)}
        if self.values.get("num_hidden_layers") is not None:
            named, layers = "num_hidden_layers", self.integer("num_hidden_layers")
        else:
            named, layers = next(iter(counts.items()), ("", 0))
        for name, count in counts.items():
            if count != layers:
                whole = f"{named} = {layers}" if named == "num_hidden_layers" else f"the {layers} of {named}"
                raise ModelError(f"config.json: {name} names {count} layers, not {whole}")

    def check_causal(self) -> None:
        """Raise ModelError for an encoder, whose layers see later tokens too."""
        self.require("is_causal", True)
        self.require("use_bidirectional_attention", False)
        encoders = [name for name in self.strings("architectures") or [] if "Bidirectional" in name]
        if encoders:
            raise ModelError(f"config.json: {encoders[0]} is bidirectional, and only causal models are supported")

    def with_head(self) -> "ModelConfig":
        """Return the config of a model whose head for multi-token prediction is to be loaded too.

        Raises ModelError unless it has one layer.
        """
        if (count := self.integer(*HEAD_KEYS, default=1, least=0)) != 1:
            raise ModelError(f"config.json: {count} layers for multi-token prediction are not supported, only one is")
        return ModelConfig(self.values, True)

    def with_defaults(self, defaults: Mapping[str, Any]) -> "ModelConfig":
        """Return the config with these values where keys are missing or null."""
        named = {key: value for key, value in self.values.items() if value is not None or key not in defaults}
        return ModelConfig({**defaults, **named}, self.has_head)

    def numbers(self, name: str, count: int) -> list[float]:
        """Return a list of `count` finite numbers above 0; all 1 if the key is not set."""
        value = self.values.get(name)
        if value is None:
            return [1.0] * count
        read = [_number(v) for v in value] if isinstance(value, list) else []
        found = [v for v in read if v is not None and math.isfinite(v) and v > 0]
        if not len(found) == len(read) == count:
            raise ModelError(f"config.json: {name} should be {count} finite numbers above 0, not {value!r}")
        return found

    def indices(self, name: str, count: int) -> list[int]:
        """Return a list of integers in range(count); [] if the key is not set."""
        value = self.values.get(name) or []
        if not isinstance(value, list) or not all(type(v) is int and 0 <= v < count for v in value):
            raise ModelError(f"config.json: {name} should be a list of integers from 0 to {count - 1}, not {value!r}")
        return value

    def require(self, name: str, *supported: object) -> None:
        """Raise ModelError unless the value of `name` is in `supported`. A missing or null key means supported[0]."""
        value = self.values.get(name)
        if value is not None and value not in supported:
            raise ModelError(
                f"config.json: {name} = {value!r} is not supported (only {', '.join(map(repr, supported))})"
            )

    def dtype(self) -> "torch.dtype | None":
        """Return the dtype that config.json names; None if it names none.

        A dtype other than float32 and bfloat16, such as float16, becomes float32, because bfloat16 would round it.
        """
        import torch  # here, because commands that load no model import this module too

        name = str(self.values.get("dtype") or self.values.get("torch_dtype") or "").removeprefix("torch.")
        found: torch.dtype = getattr(torch, name if name in DTYPES else "float32")
        return found if name else None

    def _find(self, names: Sequence[str], default: object) -> tuple[str, Any]:
        for name in names:
            if self.values.get(name) is not None:
                return name, self.values[name]
        if default is None:
            raise ModelError(f"config.json lacks {names[0]}")
        return names[0], default


def _number(value: object) -> float | None:
    """Return the number that a value of config.json stands for; None if it is not a number.

    JSON has no infinity: transformers writes {"__float__": "Infinity"}, other tools a bare word or a string.
    """
    if isinstance(value, dict):
        value = value.get("__float__")
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None
    except OverflowError:  # An integer beyond the largest float.
        return math.inf if isinstance(value, int) and value > 0 else -math.inf


def is_file(file: Path) -> bool:
    """Return whether a checkpoint has the file. Raises ModelError for anything that is not a regular file.

    Reading a pipe or a device such as /dev/zero might never end.
    """
    if file.is_file():
        return True
    if file.exists():
        raise ModelError(f"{file} should be a regular file, not a folder, a pipe or a device")
    return False


def read_whole(file: Path) -> bytes:
    """Return the content of a checkpoint's file. Raises ModelError if it is no regular file, or too large to read."""
    if not is_file(file):
        raise ModelError(f"{file}: there is no such file")
    with file.open("rb") as opened:
        data = opened.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ModelError(f"{file} has more than {MOST_BYTES} bytes, which are too many for a file of its kind")
    return data


def read_json(file: Path) -> Any:
    """Return the content of a JSON file of a checkpoint. Raises ModelError if it is not a JSON file, or too large."""
    return parse_json(read_whole(file), f"{file} is not JSON")


def parse_json(text: bytes, message: str) -> Any:
    """Return the content of a JSON text. Raises ModelError, which begins with `message`, if it is not JSON.

    A lone surrogate is refused: it is no character, and could be neither printed nor sent to a client.
    """
    try:
        content = json.loads(text.decode("utf-8-sig"))
        if SURROGATE.search(text):  # Only escapes can make surrogates.
            json.dumps(content, ensure_ascii=False).encode()
        return content
    except UnicodeEncodeError:
        raise ModelError(f"{message}: it holds half of a surrogate pair") from None
    except RecursionError:
        raise ModelError(f"{message}: it is nested too deeply") from None
    except ValueError as error:
        raise ModelError(f"{message}: {error}") from None


def read_config(path: Path) -> ModelConfig:
    """Read the configuration in the folder `path`. Raises ModelError if there is none."""
    file = config_file(path)
    values = read_json(file)
    if not isinstance(values, dict):
        raise ModelError(f"{file} should hold an object")
    return ModelConfig(_native_mamba2(values) if _is_native_mamba2(values) else _with_text_config(file, values))


def config_file(path: Path) -> Path:
    """Return config.json, else Mistral's params.json, in the folder `path`. Raises ModelError if both are missing."""
    for name in ("config.json", "params.json"):
        if is_file(path / name):
            return path / name
    raise ModelError(f"{path} holds no config.json")


def _with_text_config(file: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Move the values of text_config, where vision-language models keep the text model's values, to the top level.

    Values at the top level take precedence unless they are null. Without a text_config, null values are kept, because a
    null key may differ in meaning from a missing key.
    """
    text = values.get("text_config") or {}
    if not isinstance(text, dict):
        raise ModelError(f"{file}: text_config should hold an object")
    return {**text, **{key: value for key, value in values.items() if value is not None}} if text else values


def _is_native_mamba2(values: Mapping[str, Any]) -> bool:
    """Return whether the keys are those of mamba_ssm (d_model, n_layer) or of Mistral (dim, n_layers) for Mamba-2."""
    ssm = values.get("ssm_cfg")
    layer = ssm.get("layer") if isinstance(ssm, dict) else "Mamba1"
    return ("d_model" in values and layer == "Mamba2") or ("dim" in values and values.get("model_type") == "mamba")


def _native_mamba2(values: Mapping[str, Any]) -> dict[str, Any]:
    """Translate a configuration of mamba_ssm or Mistral to transformers' keys, with mamba_ssm's defaults.

    Raises ModelError for layers other than Mamba-2's.
    """
    ssm = values.get("ssm_cfg") or {}
    config, ssm_config = ModelConfig(values), ModelConfig(ssm)
    for key in ("attn_layer_idx", "d_intermediate"):
        if values.get(key):
            raise ModelError(f"config.json: {key} = {values[key]!r} is not supported")
    config.require("rms_norm", True)
    for key, supported in (("rmsnorm", True), ("norm_before_gate", False), ("D_has_hdim", False), ("d_ssm", None)):
        ssm_config.require(key, supported)
    hidden, multiple = config.integer("d_model", "dim"), config.integer("pad_vocab_size_multiple", default=8)
    width, expand = ssm_config.integer("headdim", default=64), ssm_config.integer("expand", default=2)
    return {
        "model_type": "mamba2",
        "hidden_size": hidden,
        "num_hidden_layers": config.integer("n_layer", "n_layers"),
        "vocab_size": -(-config.integer("vocab_size") // multiple) * multiple,
        "state_size": ssm.get("d_state", 128),
        "head_dim": width,
        "num_heads": expand * hidden // width,
        "expand": expand,
        "n_groups": ssm.get("ngroups", values.get("n_groups", 1)),
        "conv_kernel": ssm.get("d_conv", 4),
        "chunk_size": ssm.get("chunk_size", 256),
        "use_bias": ssm.get("bias", False),
        "use_conv_bias": ssm.get("conv_bias", True),
        "time_step_limit": ssm.get("dt_limit"),
        "residual_in_fp32": values.get("residual_in_fp32", True),
        "tie_word_embeddings": values.get("tie_embeddings", True),
        "layer_norm_epsilon": 1e-5,
    }
