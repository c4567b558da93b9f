"""A repository of the hub at one commit, and which of its files a server needs."""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from baton.api.hub.names import HubName

SETTINGS = (
    "config.json", "params.json", "generation_config.json", "hf_quant_config.json", "tokenizer_config.json",
    "special_tokens_map.json", "chat_template.jinja", "additional_chat_templates/*.jinja",
    "modules.json", "*_Pooling/config.json", "config_sentence_transformers.json",
)  # fmt: skip
TOKENIZERS = ("tokenizer.json", "tiktoken.model")
WEIGHTS = (("model.safetensors", "*.safetensors"), ("pytorch_model.bin", "pytorch_model*.bin"))
"""The weights that a server reads, in the order of models/loading/shards.py:find_shards."""
UNREAD_WEIGHTS = ("*.gguf", "*.pt", "*.pth", "*.bin", "*.h5", "*.msgpack")


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository, as the hub states it."""

    name: str
    size: int
    digest: str  # SHA-256 if the file is in LFS, else the id of its Git blob
    in_lfs: bool


@dataclass(frozen=True)
class Repository:
    """A repository at one commit."""

    name: HubName
    commit: str
    files: Mapping[str, RemoteFile]

    def matching(self, patterns: Collection[str]) -> list[RemoteFile]:
        """Return the files whose names match one of the patterns."""
        return [self.files[name] for name in sorted(self.files) if matches(name, patterns)]

    def settings(self) -> list[RemoteFile]:
        """Return the small files that describe the model: all but weights and the tokenizer's vocabulary."""
        indexes = {f"{stem}.index.json": pattern for stem, pattern in WEIGHTS}
        index = next((name for name, pattern in indexes.items() if self.matching([name, pattern])), "")
        return self.matching([*SETTINGS, index])

    def tokenizers(self) -> list[RemoteFile]:
        """Return the files with the tokenizer's vocabulary."""
        return self.matching(TOKENIZERS)

    def weights(self, read: Callable[[str], bytes]) -> list[RemoteFile]:
        """Return the weight files that a server reads. `read` returns the content of the index."""
        return [self.files[name] for name in weight_names(self.files, read) if name in self.files]

    def unread_weights(self) -> list[RemoteFile]:
        """Return the weight files in formats that no server reads."""
        return self.matching(UNREAD_WEIGHTS)


def matches(name: str, patterns: Collection[str]) -> bool:
    """Return whether a file's name matches one of the patterns. Only a pattern with a folder matches in folders."""
    return any(fnmatchcase(name, pattern) and name.count("/") == pattern.count("/") for pattern in patterns)


def weight_names(names: Collection[str], read: Callable[[str], bytes]) -> list[str]:
    """Return the names of the weight files to read, as models/loading/shards.py:find_shards chooses among `names`.

    Names from an index are returned even if `names` lacks them.
    """
    for stem, pattern in WEIGHTS:
        if stem in names:
            return [stem]
        index = f"{stem}.index.json"
        if index in names and (shards := indexed(read(index))):
            return shards
        if found := [name for name in sorted(names) if matches(name, [pattern])]:
            return found
    return []


def indexed(index: bytes) -> list[str]:
    """Return the names that an index of weights lists; [] if it is broken, which loading reports."""
    try:
        return sorted({str(name) for name in json.loads(index)["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError):
        return []
