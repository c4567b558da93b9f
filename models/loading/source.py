"""The model that a path names: a folder with config.json and weights, or a GGUF file."""

from pathlib import Path

from baton.models.config import ModelConfig, ModelError, read_config
from baton.models.gguf.header import SUFFIX, GgufHeader, read_gguf
from baton.models.loading.architectures.translation import config_values
from baton.models.loading.shards import find_shards


def check_source(path: Path) -> None:
    """Raise ModelError unless `path` is a folder or a GGUF file."""
    if not path.is_dir() and not (path.suffix == SUFFIX and path.is_file()):
        raise ModelError(
            f"{path} is not a folder with a checkpoint, not a GGUF file, and not a name on the hub such as ORG/NAME or "
            "ORG/NAME@REVISION"
        )


def read_source_config(path: Path) -> ModelConfig:
    """Read the config of a folder or GGUF file. Raises ModelError."""
    return ModelConfig(config_values(read_whole_gguf(path))) if path.suffix == SUFFIX else read_config(path)


def read_whole_gguf(path: Path) -> GgufHeader:
    """Return the metadata of a GGUF file, and the tensors of all parts into which it was split. Raises ModelError."""
    headers = [read_gguf(file) for file in find_shards(path)]
    tensors = {name: tensor for header in headers for name, tensor in header.tensors.items()}
    return GgufHeader(headers[0].metadata, tensors)
