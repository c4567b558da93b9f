"""The model that a path names: a folder with config.json and weights, or a GGUF file."""

from pathlib import Path

from baton.models.config import ModelConfig, ModelError, read_config
from baton.models.gguf.architectures import config_values
from baton.models.gguf.header import SUFFIX, GgufHeader, read_gguf
from baton.models.loading.shards import find_shards


def check_source(path: Path) -> None:
    """Raise ModelError unless `path` is a folder or a GGUF file. The message for a hub id says how to download it."""
    if path.is_dir() or (path.suffix == SUFFIX and path.is_file()):
        return
    if len(path.parts) == 2 and not path.is_absolute() and path.parts[0] not in (".", ".."):
        raise ModelError(
            f"{path} is not a folder. If it is the id of a model on the hub, download it first "
            f"(hf download {path} --local-dir {path.name}) and pass that folder."
        )
    raise ModelError(f"{path} is not a folder with a checkpoint, and not a GGUF file")


def read_source_config(path: Path) -> ModelConfig:
    """Read the config of a folder or GGUF file. Raises ModelError."""
    return ModelConfig(config_values(read_whole_gguf(path))) if path.suffix == SUFFIX else read_config(path)


def read_whole_gguf(path: Path) -> GgufHeader:
    """Return the metadata of a GGUF file, and the tensors of all parts into which it was split. Raises ModelError."""
    headers = [read_gguf(file) for file in find_shards(path)]
    tensors = {name: tensor for header in headers for name, tensor in header.tensors.items()}
    return GgufHeader(headers[0].metadata, tensors)
