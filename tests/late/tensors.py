"""Tensors of the late device: shape, strides and dtype (the layout) are known at once, values are computed later."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class Cell:
    """A holder of a tensor's layout and of its values, which are None until they have been computed."""

    __slots__ = ("layout", "values")

    def __init__(self, layout: Tensor, values: Tensor | None = None) -> None:
        self.layout = layout  # a meta tensor with the shape, strides and dtype
        self.values = values

    def store(self, values: Tensor) -> None:
        """Store the result of an operation. A replayed operation overwrites its values in place, as a graph would."""
        if self.values is None:
            self.values = self._laid_out(values)
        elif self.values.untyped_storage().data_ptr() != values.untyped_storage().data_ptr():
            self.values.copy_(values)

    def _laid_out(self, values: Tensor) -> Tensor:
        """Return the values with this cell's strides. The CPU's result may have other strides."""
        layout = self.layout
        assert (values.shape, values.dtype) == (layout.shape, layout.dtype)
        if values.stride() == layout.stride() or values.numel() == 0:
            return values
        return torch.empty_strided(layout.shape, layout.stride(), dtype=layout.dtype, device="cpu").copy_(values)


class Memory:
    """A block of device memory, alive as long as the program holds a tensor in it."""

    __slots__ = ("__weakref__", "for_inference")

    def __init__(self) -> None:
        # Torch refuses to change a tensor made in inference mode outside of inference mode. This class repeats that
        # rule.
        self.for_inference = torch.is_inference_mode_enabled()

    def check_change(self) -> None:
        if self.for_inference and not torch.is_inference_mode_enabled():
            raise RuntimeError("a tensor made in inference mode is changed outside of inference mode")


class LateTensor(Tensor):
    """A tensor that the program holds instead of a real one: a cell and the memory that it is in."""

    cell: Cell
    memory: Memory
    # The late device's handler, for code in which no stream is active.
    dispatch: Callable[..., Any]

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, cell: Cell, memory: Memory, dispatch: Callable[..., Any]) -> LateTensor:
        layout = cell.layout
        with torch.inference_mode(False):
            tensor: LateTensor = Tensor._make_wrapper_subclass(
                cls,
                layout.shape,
                strides=layout.stride(),
                storage_offset=layout.storage_offset(),
                dtype=layout.dtype,
                device=layout.device,
            )
        tensor.cell, tensor.memory, tensor.dispatch = cell, memory, dispatch
        return tensor

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"LateTensor({list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        tensor = next(leaf for leaf in leaves((args, kwargs or {})) if isinstance(leaf, LateTensor))
        return tensor.dispatch(func, args, dict(kwargs or {}))


def spoil(tensor: Tensor) -> Tensor:
    """Fill a tensor's memory with values that make any use visible: NaN, or integers that are no valid index."""
    byte = 1 if tensor.dtype == torch.bool else 0xFF if tensor.is_floating_point() else 0x7F
    memory = torch.empty(0, dtype=torch.uint8, device="cpu")
    memory.set_(tensor.untyped_storage())
    memory.fill_(byte)
    return tensor


def leaves(tree: Any) -> Iterator[Any]:
    """Yield the leaves of an operation's nested arguments or results."""
    if isinstance(tree, list | tuple | dict):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from leaves(part)
    else:
        yield tree


def mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """Return a copy of nested arguments with `change` applied to each leaf."""
    if isinstance(tree, list | tuple):
        return type(tree)([mapped(change, part) for part in tree])
    if isinstance(tree, dict):
        return {name: mapped(change, part) for name, part in tree.items()}
    return change(tree)
