"""The numbers of tokens for which a model's Triton kernels differ: each class of numbers needs compiling of its own."""

from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from baton.kernels.attention.latents.sizes import is_long
from baton.kernels.moe.experts import PARTS
from baton.models.layers.experts import Experts, SigmoidRouter, SoftmaxRouter
from baton.models.layers.linear import Embedding, Linear
from baton.models.layers.mla import LatentAttention

ClassOf = Callable[[int], Hashable]


def row_classes(model: nn.Module, most: int) -> list[int]:
    """Return the largest number of tokens in each class, up to `most`, in ascending order.

    For two numbers of one class, a step's prompts launch the same kernels with the same configurations.
    """
    functions = _functions(model)
    largest = {tuple(class_of(rows) for class_of in functions): rows for rows in range(1, most + 1)}
    return sorted(largest.values())


def _functions(model: nn.Module) -> list[ClassOf]:
    """Return a function from a number of tokens to its class for each different operation that has classes."""
    different = {(each.func, each.args): each for module in model.modules() for each in _functions_of(module)}
    return list(different.values())


def _functions_of(module: nn.Module) -> Iterator[partial[Any]]:
    """Yield the functions of a module's own operations. The number of tokens is the argument that is left."""
    from baton.kernels.linear.quantized import triton as linear
    from baton.kernels.moe.experts import triton as experts
    from baton.kernels.moe.routing import triton as routing

    if isinstance(module, Linear | Embedding) and module.integers is not None:
        yield partial(linear.row_class, module.integers.dtype)
    if isinstance(module, LatentAttention) and (forms := module.settings.forms()):
        yield partial(is_long, forms.shortest)
    routers = [child for child in module.children() if isinstance(child, SoftmaxRouter | SigmoidRouter)]
    stacks = [child for child in module.children() if isinstance(child, Experts)]
    for router, stack in zip(routers, stacks, strict=True):
        yield partial(routing.row_class, _sizes(stack)[4])
        yield partial(experts.row_class, *_sizes(stack), router.rule.top_k)


def _sizes(stack: Experts) -> tuple[int, int, int, int, torch.dtype]:
    """Return the number of experts, their outer and inner size, the bits of their integers (0: floats), and the dtype
    of hidden states.
    """
    packed = stack.packed.get("input_linear")
    if packed is not None:
        return stack.count, packed.inputs, packed.outputs, packed.bits or 0, packed.dtype
    _, rows, wide = stack.input_linear.shape
    return stack.count, wide, rows // PARTS[stack.activation], 0, stack.input_linear.dtype
