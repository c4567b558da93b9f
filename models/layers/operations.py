"""The compiled code that a model needs: its operations, and the numbers of tokens for which its Triton kernels differ.

Only these operations are compiled when a server first starts with the model.
"""

from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from baton.kernels.attention.latents.sizes import is_long
from baton.kernels.moe.experts import PARTS
from baton.models.batch import Model
from baton.models.layers.attention import Attention
from baton.models.layers.delta import DeltaMixer
from baton.models.layers.experts import Experts, SigmoidRouter, SoftmaxRouter
from baton.models.layers.kda import KdaMixer
from baton.models.layers.linear import Embedding, Linear
from baton.models.layers.mamba2 import Mamba2Mixer
from baton.models.layers.mla import LatentAttention
from baton.models.layers.mlp import GatedMLP, SquaredReluMLP
from baton.models.layers.prediction import PredictionHead
from baton.models.layers.short_conv import ShortConv

ClassOf = Callable[[int], Hashable]
COMMON = frozenset({"linear.compressed", "linear.dense", "runtime.cpu_graph", "norm.rms", "sampling"})
BY_LAYER: dict[type[nn.Module], frozenset[str]] = {
    Attention: frozenset({"activations", "attention.paged", "attention.rotary"}),
    DeltaMixer: frozenset({"delta_net.decode", "delta_net.prefill"}),
    Experts: frozenset({"moe.experts", "moe.routing", "moe.shared_expert"}),
    GatedMLP: frozenset({"activations"}),
    KdaMixer: frozenset({"delta_net.decode", "delta_net.prefill"}),
    LatentAttention: frozenset(
        {"activations", "attention.paged", "attention.rotary", "attention.mla_cache", "linear.per_head"}
    ),
    Mamba2Mixer: frozenset({"mamba2.decode", "mamba2.prefill"}),
    PredictionHead: frozenset({"prediction"}),
    ShortConv: frozenset({"short_conv"}),
    SquaredReluMLP: frozenset({"activations"}),
}


def operations(model: Model, is_quantized: bool, rounds_inputs: bool = False) -> frozenset[str]:
    """Return the operations that a model needs, as names of folders in kernels/.

    rounds_inputs: whether the inputs of quantized weights are rounded to integers.
    """
    layers = {type(layer) for layer in model.modules()} if isinstance(model, nn.Module) else set()
    integers = {"linear.quantized": is_quantized, "linear.int8_activations": is_quantized and rounds_inputs}
    names = (name for name, is_needed in integers.items() if is_needed)
    return COMMON.union(*(BY_LAYER.get(layer, ()) for layer in layers), names)


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
        return stack.count, packed.inputs, packed.outputs, packed.form.bits if packed.form else 0, packed.dtype
    _, rows, wide = stack.input_linear.shape
    return stack.count, wide, rows // PARTS[stack.activation], 0, stack.input_linear.dtype
