"""Names of models on the hub. This module does not import huggingface_hub, so that a start with a folder is quick."""

import re
from dataclasses import dataclass
from pathlib import Path

NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@((?!.*\.\.)\w[\w./-]*))?(?::(\w[\w.-]*))?", re.ASCII)


@dataclass(frozen=True)
class HubName:
    """The name of a model on the hub."""

    repository: str  # as ORG/NAME
    revision: str | None = None  # a branch, a tag or a commit; None for the default branch
    quantization: str | None = None  # quantization of a GGUF file in the repository, such as Q4_K_M

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision is not None else ""
        return self.repository + revision + self.suffix

    @property
    def suffix(self) -> str:
        """The quantization as it is written after the name; empty if there is none."""
        return f":{self.quantization}" if self.quantization is not None else ""


def hub_name(model: str | None) -> HubName | None:
    """Return the hub name that the option MODEL states; None if it is a path. A path that exists wins over a name."""
    match = NAME.fullmatch(model or "")
    if match is None or model is None or Path(model).exists():
        return None
    return HubName(match[1], match[2], match[3])


def default_served_name(model: str | None) -> str:
    """Return the name of the model in the API, unless --served-model-name states another one."""
    if (name := hub_name(model)) is not None:
        return name.repository + name.suffix
    if not model:
        return "baton"
    # In the hub's cache a GGUF file is a link to a blob, which has no name.
    path = Path(model)
    return path.name.removesuffix(".gguf") if path.suffix == ".gguf" else path.resolve().name
