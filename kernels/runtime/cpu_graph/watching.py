"""Observation of a computation's torch operations while its native functions are recorded instead of run."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
MAKES = {aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default, aten.empty_strided.default}


class NotRecordable(Exception):
    """The computation contains an operation that a replay would not repeat."""


class Allocations(TorchDispatchMode):
    """A mode that lists the tensors that are allocated while it is active.

    Raises NotRecordable with the operation's name for any torch operation except allocations and views.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch declares no types for it
        self.made: list[Tensor] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, so that torch does not import dynamo for this mode, which would take a second at each start."""
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
