"""The metadata of a GGUF file, and which tensors it has."""

from array import array
from typing import Any

from baton.models.config import MOST_LAYERS, ModelError
from baton.models.gguf.header import GgufHeader

MISSING = object()


class Metadata:
    """The metadata of a GGUF file about its architecture."""

    def __init__(self, architecture: str, header: GgufHeader) -> None:
        self.architecture = architecture
        self._header = header

    def value(self, name: str, default: Any = MISSING) -> Any:
        """Return the value of a key, without the architecture before it. Raises ModelError if there is none."""
        key = f"{self.architecture}.{name}"
        found = self._header.metadata.get(key, default)
        if found is MISSING:
            raise ModelError(f"GGUF: the metadata lacks {key}")
        if isinstance(found, array):
            if len(found) > MOST_LAYERS:
                raise ModelError(f"GGUF: {key} has {len(found)} entries, but there are at most {MOST_LAYERS} layers")
            return found.tolist()
        return found

    def require(self, name: str, *supported: Any) -> None:
        """Raise ModelError unless a value is in `supported`, or there is none."""
        value = self.value(name, supported[0])
        if value not in supported:
            raise ModelError(f"GGUF: {self.architecture}.{name} = {value!r} is not supported (only {supported[0]!r})")

    def largest(self, name: str) -> Any:
        """Return a value that may be a list with one entry for each layer: its largest entry then."""
        found = self.value(name)
        return max(found, default=0) if isinstance(found, list) else found

    @property
    def eps(self) -> Any:
        """The epsilon of RMS norms. Some files store it under the name for layer norms."""
        of_other = self._header.metadata.get(f"{self.architecture}.attention.layer_norm_epsilon", MISSING)
        return self.value("attention.layer_norm_rms_epsilon", of_other)

    @property
    def layers(self) -> int:
        """The number of layers, without those that predict further tokens."""
        blocks, more = self.value("block_count"), self.value("nextn_predict_layers", 0)
        if not isinstance(blocks, int) or not isinstance(more, int):
            raise ModelError(f"GGUF: {self.architecture}.block_count should be an integer, not {blocks!r}")
        if not 0 <= more < blocks <= len(self._header.tensors):
            raise ModelError(f"GGUF: {blocks} layers do not fit {len(self._header.tensors)} tensors")
        return blocks - more

    def has(self, tensor: str) -> bool:
        return tensor in self._header.tensors

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Return a tensor's shape. Raises ModelError if there is no such tensor."""
        if tensor not in self._header.tensors:
            raise ModelError(f"GGUF: the file lacks {tensor}")
        return self._header.tensors[tensor].shape

    def kinds(self, **kinds: str) -> list[str]:
        """Return the kind of each layer: the first whose tensor the layer has. kinds: a tensor's name for each kind.

        Raises ModelError for a layer that has none of them.
        """
        found = []
        for layer in range(self.layers):
            kind = next((kind for kind, leaf in kinds.items() if self.has(f"blk.{layer}.{leaf}")), None)
            if kind is None:
                raise ModelError(f"GGUF: layer {layer} has none of {', '.join(kinds.values())}")
            found.append(kind)
        return found

    def any_has(self, leaf: str) -> bool:
        """Return whether any layer has a tensor."""
        return any(self.has(f"blk.{layer}.{leaf}") for layer in range(self.layers))

    def first_shape(self, leaf: str) -> tuple[int, ...]:
        """Return the shape of a tensor in the first layer that has it. Raises ModelError if none has it."""
        name = next((f"blk.{n}.{leaf}" for n in range(self.layers) if self.has(f"blk.{n}.{leaf}")), f"blk.0.{leaf}")
        return self.shape(name)
