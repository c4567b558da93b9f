"""The recipe of a model's embeddings, in sentence-transformers' files: how hidden states become one vector."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from baton.models.config import is_file, read_json

PoolingOption: TypeAlias = Literal["auto", "mean", "last", "none"]
PoolingKind: TypeAlias = Literal["mean", "last", "cls"]
KINDS: dict[str, PoolingKind] = {
    "mean": "mean",
    "mean_tokens": "mean",
    "lasttoken": "last",
    "cls": "cls",
    "cls_token": "cls",
}
"""Names of pooling in 1_Pooling/config.json, in newer files and (after FLAG) in older ones."""
FLAG = "pooling_mode_"
NO_FILES = "the model's files name no pooling (modules.json): the option --pooling mean or last chooses one"
DISABLED = "embeddings are disabled (--pooling none)"


@dataclass(frozen=True)
class EmbeddingRecipe:
    """The steps from a text to its embedding."""

    pooling: PoolingKind = "last"  # the hidden states that are averaged: all, the last one, or the first one
    normalizes: bool = True  # whether embeddings have length 1
    prompts: Mapping[str, str] = field(default_factory=dict)  # texts that may be put before an input, by name
    default_prompt: str | None = None  # name of the prompt for inputs without one
    pools_prompt: bool = True  # whether the mean includes the tokens of the prompt
    refusal: str = ""  # why there are no embeddings; "" if there are


NO_EMBEDDINGS = EmbeddingRecipe(refusal=NO_FILES)


def read_recipe(path: Path, option: PoolingOption) -> EmbeddingRecipe:
    """Return the recipe of the checkpoint at `path`.

    option: mean and last replace the files' pooling, and embeddings then have length 1; none refuses embeddings.
    Raises ValueError for broken files.
    """
    if option == "none":
        return EmbeddingRecipe(refusal=DISABLED)
    prompts, default = _read_prompts(path / "config_sentence_transformers.json")
    if option in ("mean", "last"):
        return EmbeddingRecipe(option, prompts=prompts, default_prompt=default)
    modules = _read(path / "modules.json", list)
    if not modules:
        return NO_EMBEDDINGS
    return replace(_read_modules(path, modules), prompts=prompts, default_prompt=default)


def _read_modules(path: Path, modules: list[Any]) -> EmbeddingRecipe:
    """Return the recipe of modules.json, without its prompts."""
    kinds = [str(module.get("type")).rpartition(".")[2] for module in modules if isinstance(module, dict)]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        found = ", ".join(kinds)
        return EmbeddingRecipe(
            refusal=f"modules.json: only Transformer, Pooling and Normalize are supported, not {found}"
        )
    name = f"{modules[1].get('path')}/config.json"
    values = _read(path / name, dict)
    modes = [key.removeprefix(FLAG) for key, value in values.items() if key.startswith(FLAG) and value is True]
    modes = [values["pooling_mode"]] if isinstance(values.get("pooling_mode"), str) else modes
    if len(modes) != 1 or modes[0] not in KINDS:
        found = ", ".join(modes) or "none"
        return EmbeddingRecipe(refusal=f"{name}: only the mean, the last or the first token is supported, not {found}")
    return EmbeddingRecipe(
        KINDS[modes[0]], "Normalize" in kinds, pools_prompt=values.get("include_prompt") is not False
    )


def _read_prompts(file: Path) -> tuple[dict[str, str], str | None]:
    """Return the prompts by name, and the name of the default one. Raises ValueError for a broken file."""
    values = _read(file, dict)
    prompts, default = values.get("prompts") or {}, values.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ValueError(f"{file}: prompts should hold texts by name, not {prompts!r}")
    if default is not None and (not isinstance(default, str) or default not in prompts):
        raise ValueError(f"{file}: default_prompt_name = {default!r} is none of the prompts")
    return prompts, default


def _read(file: Path, kind: type[Any]) -> Any:
    """Return the content of a JSON file; an empty `kind` if there is no file. Raises ValueError for a broken file."""
    if not is_file(file):
        return kind()
    value = read_json(file)
    if not isinstance(value, kind):
        raise ValueError(f"{file} should hold {'a list' if kind is list else 'an object'}")
    return value
