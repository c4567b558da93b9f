"""Operations of torch and Triton's kernels, put into the queue of the active stream."""

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
# Which make a number of the host a tensor of the device before they compute.
COPY_NUMBERS = {*COPIES, aten.where.self}
LAUNCHES_NOTHING = {*EMPTY, aten._unsafe_view.default, aten.lift_fresh.default}
MASKABLE = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}


class Operations:
    """Calls of this are operations that have a late tensor among their arguments, or make one."""

    def __init__(self, late: LateDevice) -> None:
        self._late = late

    def __call__(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if func._can_decompose():
            with OnOperations(self):
                return func.decompose(*args, **kwargs)
        if torch.Tag.inplace_view in func.tags:
            raise NotImplementedError(f"the late device has no {func}")
        asked = where()
        if reads(func, args, kwargs):
            self._late.note("host read", str(func), asked)
            return self._at_once(func, args, kwargs)
        for argument, given in zip(func._schema.arguments, args, strict=False):
            if isinstance(given, LateTensor) and argument.alias_info and argument.alias_info.is_write:
                given.memory.check_change()
        args, kwargs = self._take_host_values(func, args, kwargs, asked)
        return self._enqueue(func, args, kwargs, asked)

    def launch(self, launch: Launch) -> None:
        """Run a kernel later, in Triton's interpreter, or at once if its tensors are the host's; for triton.watched."""
        tensors = [argument for argument in launch.arguments if isinstance(argument, Tensor)]
        if not any(isinstance(tensor, LateTensor) for tensor in tensors):
            launch.run()
            return
        name, asked = launch.kernel.fn.__name__, where()
        if not all(isinstance(tensor, LateTensor) for tensor in tensors):
            raise Fault(f"{name} was given a tensor of the host, at {asked}")
        if any(tensor.storage_offset() * tensor.itemsize % 16 for tensor in tensors):
            self._late.note("misaligned", name, asked)
        self._late.note("launch", name, asked)
        arguments = as_cells(launch.arguments)

        def run() -> None:
            replace(launch, arguments=self._values(arguments, name, asked)).run()

        self._late.current.enqueue(lambda: run)

    @contextmanager
    def watching(self) -> Iterator[None]:
        with OnFunctions(), OnOperations(self):
            yield

    def _enqueue(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], asked: str) -> Any:
        known = {id(t.cell.layout): t for t in leaves((args, kwargs)) if isinstance(t, LateTensor)}
        with torch.inference_mode(False), torch.no_grad():
            foretold = func(*as_layouts(args), **as_layouts(kwargs))
        made = [Cell(leaf) if isinstance(leaf, Tensor) and id(leaf) not in known else None for leaf in leaves(foretold)]
        if is_launch(func, args, foretold):
            self._late.note("launch", str(func), asked)
        args, kwargs = as_cells(args), on_host(as_cells(kwargs))

        def run() -> None:
            given = self._values((args, kwargs), str(func), asked)
            found = func(*given[0], **given[1])
            for cell, values in zip(made, leaves(found), strict=True):
                if cell is not None:
                    cell.keep(spoil(values) if func in EMPTY else values)

        self._late.current.enqueue(lambda: run)
        known.update((id(cell.layout), self._late.wrap(cell)) for cell in made if cell is not None)
        return mapped(lambda leaf: known.get(id(leaf), leaf), foretold)

    def _take_host_values(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], asked: str
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        """Numbers travel with a launch; all else that the host has would have to be uploaded first."""

        def take(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or isinstance(leaf, LateTensor):
                return leaf
            if leaf.is_meta:
                raise Fault(f"{func} was given a tensor that was made while no stream was active, at {asked}")
            if leaf.numel() and (leaf.dim() or func in COPY_NUMBERS):
                self._late.note("implicit upload", f"{list(leaf.shape)} for {func}", asked)
            return leaf.detach().clone()

        return mapped(take, args), mapped(take, kwargs)

    def _at_once(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """With values, which must be waited for."""
        self._late.finish(self._late.current.record())
        given = self._values((as_cells(args), on_host(as_cells(kwargs))), str(func), "")
        with torch.inference_mode():
            found = func(*given[0], **given[1])
        if func in COPIES:
            return found
        if torch.Tag.inplace_view in func.tags or func is aten.index_put_.default:
            return args[0]
        return mapped(lambda leaf: self._late.of(leaf) if isinstance(leaf, Tensor) else leaf, found)

    def _values(self, tree: Any, what: str, asked: str) -> Any:
        return mapped(lambda leaf: self._late.values(leaf, what, asked) if isinstance(leaf, Cell) else leaf, tree)


class OnOperations(TorchDispatchMode):
    """Brings each operation with a late tensor, or one that makes such, to Operations."""

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


class OnFunctions(TorchFunctionMode):
    """Functions that take their values from Python make a tensor on the host, as for an accelerator; for the meta
    device torch would leave the values away.
    """

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        seen, kwargs = SEEN.get(func), kwargs or {}
        return seen(func, *args, **kwargs) if seen else func(*args, **kwargs)


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


SEEN: dict[Any, Callable[..., Any]] = {
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
    """Whether the host must wait for values: for itself, or to know the result's shape."""
    if func in MASKABLE:
        masks = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        return masks and (func is aten.index.Tensor or args[2].numel() != 1)
    if func is aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    if func in COPIES:
        return kwargs.get("device", META) == CPU or (func is aten.copy_.default and not isinstance(args[0], LateTensor))
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def is_launch(func: Any, args: Sequence[Any], made: Any) -> bool:
    """Whether a GPU would run a kernel for it."""
    is_upload = func in COPIES and any(isinstance(leaf, Tensor) and leaf.is_cpu for leaf in args)
    if func.is_view or func in LAUNCHES_NOTHING or is_upload:
        return False
    return any(not isinstance(leaf, Tensor) or leaf.numel() for leaf in leaves(made))


def as_cells(tree: Any) -> Any:
    return mapped(lambda leaf: leaf.cell if isinstance(leaf, LateTensor) else leaf, tree)


def as_layouts(tree: Any) -> Any:
    """A host's number stays one."""

    def layout(leaf: Any) -> Any:
        if isinstance(leaf, LateTensor):
            return leaf.cell.layout
        return leaf.to(META) if isinstance(leaf, Tensor) and leaf.dim() else leaf

    return mapped(layout, tree)


def on_host(tree: Any) -> Any:
    return mapped(lambda leaf: CPU if is_meta(leaf) else leaf, tree)


def is_meta(leaf: Any) -> bool:
    return isinstance(leaf, torch.device) and leaf.type == "meta"
