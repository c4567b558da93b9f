"""Tensors of the late device: their layout is known at once, their values when they have been executed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class Cell:
    """Where values will be. layout: a meta tensor; views of one memory share its storage."""

    __slots__ = ("layout", "values")

    def __init__(self, layout: Tensor, values: Tensor | None = None) -> None:
        self.layout, self.values = layout, values

    def keep(self, values: Tensor) -> None:
        """What an operation gave. Memory stays where it is when a captured one runs again."""
        if self.values is None:
            self.values = self._laid_out(values)
        elif self.values.untyped_storage().data_ptr() != values.untyped_storage().data_ptr():
            self.values.copy_(values)

    def _laid_out(self, values: Tensor) -> Tensor:
        """In the layout that was foretold, which a CPU's operation may not give."""
        layout = self.layout
        assert (values.shape, values.dtype) == (layout.shape, layout.dtype)
        if values.stride() == layout.stride() or values.numel() == 0:
            return values
        return torch.empty_strided(layout.shape, layout.stride(), dtype=layout.dtype, device="cpu").copy_(values)


class Memory:
    """Lives as long as the program holds a tensor of it. for_inference: torch refuses to change it out of that mode."""

    __slots__ = ("__weakref__", "for_inference")

    def __init__(self) -> None:
        self.for_inference = torch.is_inference_mode_enabled()

    def check_change(self) -> None:
        if self.for_inference and not torch.is_inference_mode_enabled():
            raise RuntimeError("what was made in inference mode is changed out of it")


class LateTensor(Tensor):
    """What the program holds. dispatch: of the device that it is on, for code in which no stream is active."""

    cell: Cell
    memory: Memory
    dispatch: Callable[..., Any]

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, cell: Cell, memory: Memory, dispatch: Callable[..., Any]) -> LateTensor:
        layout = cell.layout
        with torch.inference_mode(False):
            made: LateTensor = Tensor._make_wrapper_subclass(
                cls,
                layout.shape,
                strides=layout.stride(),
                storage_offset=layout.storage_offset(),
                dtype=layout.dtype,
                device=layout.device,
            )
        made.cell, made.memory, made.dispatch = cell, memory, dispatch
        return made

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"LateTensor({list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        tensor = next(leaf for leaf in leaves((args, kwargs or {})) if isinstance(leaf, LateTensor))
        return tensor.dispatch(func, args, dict(kwargs or {}))


def spoil(tensor: Tensor) -> Tensor:
    """Fill all memory of a tensor with what nobody means: NaN, numbers that are no index."""
    byte = 1 if tensor.dtype == torch.bool else 0xFF if tensor.is_floating_point() else 0x7F
    memory = torch.empty(0, dtype=torch.uint8, device="cpu")
    memory.set_(tensor.untyped_storage())
    memory.fill_(byte)
    return tensor


def leaves(tree: Any) -> Iterator[Any]:
    """Of the arguments or results of an operation."""
    if isinstance(tree, list | tuple | dict):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from leaves(part)
    else:
        yield tree


def mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """The same with each leaf changed."""
    if isinstance(tree, list | tuple):
        return type(tree)([mapped(change, part) for part in tree])
    if isinstance(tree, dict):
        return {name: mapped(change, part) for name, part in tree.items()}
    return change(tree)
