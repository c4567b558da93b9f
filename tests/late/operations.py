"""Operations of torch and Triton kernels, enqueued on the active stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from baton.kernels.runtime.triton import Launch
from tests.late.log import Fault, where
from tests.late.tensors import Cell, LateTensor, leaves, mapped, spoil

if TYPE_CHECKING:
    from tests.late.device import LateDevice

aten = torch.ops.aten
META, CPU = torch.device("meta"), torch.device("cpu")
EMPTY = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.empty_permuted.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
COPIES = {aten._to_copy.default, aten.copy_.default}
# Operations that first make a device tensor of a number on the host.
COPY_NUMBERS = {*COPIES, aten.where.self}
LAUNCHES_NOTHING = {*EMPTY, aten._unsafe_view.default, aten.lift_fresh.default}
MASKABLE = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}


class Operations:
    """The handler that enqueues every operation with a late tensor as an argument or a result."""

    def __init__(self, late: LateDevice) -> None:
        self._late = late

    def __call__(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if func._can_decompose():
            with InterceptOperations(self):
                return func.decompose(*args, **kwargs)
        if torch.Tag.inplace_view in func.tags:
            raise NotImplementedError(f"the late device has no {func}")
        site = where()
        if reads(func, args, kwargs):
            self._late.note("host read", str(func), site)
            return self._at_once(func, args, kwargs)
        for argument, operand in zip(func._schema.arguments, args, strict=False):
            if isinstance(operand, LateTensor) and argument.alias_info and argument.alias_info.is_write:
                operand.memory.check_change()
        args, kwargs = self._take_host_values(func, args, kwargs, site)
        return self._enqueue(func, args, kwargs, site)

    def launch(self, launch: Launch) -> None:
        """Enqueue a kernel, which runs in Triton's interpreter, or run it at once if its tensors are on the host.

        This is the callback of kernels.runtime.triton.watched.
        """
        tensors = [argument for argument in launch.arguments if isinstance(argument, Tensor)]
        if not any(isinstance(tensor, LateTensor) for tensor in tensors):
            launch.run()
            return
        name, site = launch.kernel.fn.__name__, where()
        if not all(isinstance(tensor, LateTensor) for tensor in tensors):
            raise Fault(f"{name} was given a tensor of the host, at {site}")
        if any(tensor.storage_offset() * tensor.itemsize % 16 for tensor in tensors):
            self._late.note("misaligned", name, site)
        self._late.note("launch", name, site)
        arguments = as_cells(launch.arguments)

        def run() -> None:
            replace(launch, arguments=self._values(arguments, name, site)).run()

        self._late.current.enqueue(lambda: run)

    @contextmanager
    def intercepting(self) -> Iterator[None]:
        with InterceptFunctions(), InterceptOperations(self):
            yield

    def _enqueue(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], site: str) -> Any:
        """Enqueue an operation, and return its results, whose layouts the meta device computes at once."""
        known = {id(t.cell.layout): t for t in leaves((args, kwargs)) if isinstance(t, LateTensor)}
        with torch.inference_mode(False), torch.no_grad():
            results = func(*as_layouts(args), **as_layouts(kwargs))
        cells = [Cell(leaf) if isinstance(leaf, Tensor) and id(leaf) not in known else None for leaf in leaves(results)]
        if is_launch(func, args, results):
            self._late.note("launch", str(func), site)
        args, kwargs = as_cells(args), on_host(as_cells(kwargs))

        def run() -> None:
            operands = self._values((args, kwargs), str(func), site)
            found = func(*operands[0], **operands[1])
            for cell, values in zip(cells, leaves(found), strict=True):
                if cell is not None:
                    cell.store(spoil(values) if func in EMPTY else values)

        self._late.current.enqueue(lambda: run)
        known.update((id(cell.layout), self._late.wrap(cell)) for cell in cells if cell is not None)
        return mapped(lambda leaf: known.get(id(leaf), leaf), results)

    def _take_host_values(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], site: str
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        """Copy the host tensors among the operands.

        A number is part of the launch; a host tensor is an implicit upload.
        """

        def take(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or isinstance(leaf, LateTensor):
                return leaf
            if leaf.is_meta:
                raise Fault(f"{func} was given a tensor that was made while no stream was active, at {site}")
            if leaf.numel() and (leaf.dim() or func in COPY_NUMBERS):
                self._late.note("implicit upload", f"{list(leaf.shape)} for {func}", site)
            return leaf.detach().clone()

        return mapped(take, args), mapped(take, kwargs)

    def _at_once(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Execute an operation now, after everything enqueued before it, because its caller needs the values."""
        self._late.finish(self._late.current.record())
        operands = self._values((as_cells(args), on_host(as_cells(kwargs))), str(func), "")
        with torch.inference_mode():
            found = func(*operands[0], **operands[1])
        if func in COPIES:
            return found
        if torch.Tag.inplace_view in func.tags or func is aten.index_put_.default:
            return args[0]
        return mapped(lambda leaf: self._late.of(leaf) if isinstance(leaf, Tensor) else leaf, found)

    def _values(self, tree: Any, what: str, site: str) -> Any:
        """Replace each cell in nested arguments by its values."""
        return mapped(lambda leaf: self._late.values(leaf, what, site) if isinstance(leaf, Cell) else leaf, tree)


class InterceptOperations(TorchDispatchMode):
    """A mode that passes to Operations each operation that has a late tensor or would make a meta tensor."""

    def __init__(self, operations: Operations) -> None:
        super().__init__()
        self._operations = operations

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if any(isinstance(leaf, LateTensor) or is_meta(leaf) for leaf in leaves((args, kwargs))):
            return self._operations(func, args, kwargs)
        return func(*args, **kwargs)


class InterceptFunctions(TorchFunctionMode):
    """A mode in which functions that get Python numbers first make a host tensor of them, as on an accelerator.

    On the meta device torch would drop the numbers.
    """

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        replacement, kwargs = REPLACEMENTS.get(func), kwargs or {}
        return replacement(func, *args, **kwargs) if replacement else func(*args, **kwargs)


def _from_numbers(func: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
    if device is None or torch.device(device) != META:
        return func(*args, device=device, **kwargs)
    return func(*args, device=CPU, **kwargs).to(META)


def _new_from_numbers(func: Any, like: Tensor, numbers: Any, *, dtype: Any = None, device: Any = None) -> Any:
    return torch.tensor(numbers, dtype=dtype or like.dtype).to(device or like.device)


def _with_lists(func: Any, tensor: Tensor, index: Any, *value: Any) -> Any:
    parts = index if isinstance(index, tuple) else (index,)
    parts = tuple(torch.tensor(part) if isinstance(part, list) else part for part in parts)
    return func(tensor, parts, *value)


def _through_host(func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    return func(tensor.cpu(), *args, **kwargs)


REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    torch.tensor: _from_numbers,
    torch.as_tensor: _from_numbers,
    torch.asarray: _from_numbers,
    Tensor.new_tensor: _new_from_numbers,
    Tensor.__getitem__: _with_lists,
    Tensor.__setitem__: _with_lists,
    Tensor.tolist: _through_host,
    Tensor.numpy: _through_host,
}


def reads(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether the host must wait for values, because it needs them or because the result's shape does."""
    if func in MASKABLE:
        masks = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        return masks and (func is aten.index.Tensor or args[2].numel() != 1)
    if func is aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    if func in COPIES:
        return kwargs.get("device", META) == CPU or (func is aten.copy_.default and not isinstance(args[0], LateTensor))
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def is_launch(func: Any, args: Sequence[Any], results: Any) -> bool:
    """Return whether a GPU would run a kernel for this operation."""
    is_upload = func in COPIES and any(isinstance(leaf, Tensor) and leaf.is_cpu for leaf in args)
    if func.is_view or func in LAUNCHES_NOTHING or is_upload:
        return False
    return any(not isinstance(leaf, Tensor) or leaf.numel() for leaf in leaves(results))


def as_cells(tree: Any) -> Any:
    return mapped(lambda leaf: leaf.cell if isinstance(leaf, LateTensor) else leaf, tree)


def as_layouts(tree: Any) -> Any:
    """Replace each tensor in nested arguments by its layout, a meta tensor. A number on the host stays."""

    def layout(leaf: Any) -> Any:
        if isinstance(leaf, LateTensor):
            return leaf.cell.layout
        return leaf.to(META) if isinstance(leaf, Tensor) and leaf.dim() else leaf

    return mapped(layout, tree)


def on_host(tree: Any) -> Any:
    return mapped(lambda leaf: CPU if is_meta(leaf) else leaf, tree)


def is_meta(leaf: Any) -> bool:
    return isinstance(leaf, torch.device) and leaf.type == "meta"
