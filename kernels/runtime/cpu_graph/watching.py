"""What a computation does with tensors, seen while its native functions are not run."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
MAKES = {aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default, aten.empty_strided.default}


class NotRecordable(Exception):
    """The computation has an operation that a replay would not do again."""


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps each tensor that is made, and lets none be computed, copied or looked at: NotRecordable names what does."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[Tensor] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is traced by it, and to skip it torch would import it first: a second of every start."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in MAKES:
            self.made.append(func(*args, **(kwargs or {})))
            return self.made[-1]
        if not func.is_view:
            raise NotRecordable(f"{func} is not native code")
        return func(*args, **(kwargs or {}))
