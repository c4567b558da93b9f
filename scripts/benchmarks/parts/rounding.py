"""The error that integers cause in each part of a model: its weights are rounded, one part at a time."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from baton.kernels.linear.quantized import reference
from baton.models.batch import Model
from baton.models.decoder import Decoder
from baton.models.layers.attention import Attention
from baton.models.layers.delta import DeltaMixer
from baton.models.layers.experts import Experts
from baton.models.layers.kda import KdaMixer
from baton.models.layers.linear import Embedding, Linear
from baton.models.layers.mamba2 import Mamba2Mixer
from baton.models.layers.mla import LatentAttention
from baton.models.layers.short_conv import ShortConv

DECAY, GATE = "decay, dt, beta", "gates"
MIXER, ATTENTION, MLP, HEAD = "mixer in, out", "attention", "MLP, experts", "embedding, head"
FLOATS = (DECAY, GATE)
"""The parts that --quantize leaves in floats."""
PARTS = (*FLOATS, MIXER, ATTENTION, MLP, HEAD)
ALL, INTEGERS = "everything", "all but decay and gates"
ROWS_AT_ONCE = 4096
Parts = dict[str, list[Tensor]]


def parts_of(model: Model) -> Parts:
    """Return the matrices of each part, as views of an unpacked model's weights: [.., outputs, inputs] each."""
    assert isinstance(model, nn.Module)
    parts: Parts = defaultdict(list)
    for owner in model.modules():
        for name, layer in owner.named_children():
            for part, matrix in matrices_of(owner, name, layer):
                if matrix.numel():
                    parts[part].append(matrix.detach())
    return {part: parts[part] for part in PARTS if part in parts}


def matrices_of(owner: nn.Module, name: str, layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (part, matrix) for a layer's weights, which its owner holds under a name."""
    if isinstance(layer, Experts):
        yield MLP, layer.input_linear
        yield MLP, layer.output_linear
    elif isinstance(layer, Embedding) and layer.tied:
        yield HEAD, layer.weight
    elif isinstance(layer, Linear):
        integers = layer.outputs - layer.floats
        yield part_of(owner), layer.weight[:integers]
        floats = layer.weight[integers:]
        narrow = owner.settings.width if isinstance(owner, KdaMixer) and name == "in_proj" else 0
        yield (GATE if name in GATES else DECAY), floats[: len(floats) - narrow]
        yield GATE, floats[len(floats) - narrow :]


GATES = ("gate_proj", "shared_expert_gate", "g_b_proj")
"""Names of projections whose float rows are a gate. In KDA's in_proj, the last `width` rows are one too."""


def part_of(owner: nn.Module) -> str:
    """Return the part of the model that the quantizable rows of a layer's projections belong to."""
    if isinstance(owner, Mamba2Mixer | DeltaMixer | KdaMixer | ShortConv):
        return MIXER
    if isinstance(owner, Attention | LatentAttention):
        return ATTENTION
    return HEAD if isinstance(owner, Decoder) else MLP


@contextmanager
def rounded(matrices: Sequence[Tensor], bits: int) -> Iterator[None]:
    """Round matrices to integers of `bits` bits and back, in place; restore them at the end."""
    originals = [matrix.clone() for matrix in matrices]
    for matrix in matrices:
        for rows in torch.split(matrix.reshape(-1, matrix.shape[-1]), ROWS_AT_ONCE):
            assert rows.untyped_storage().data_ptr() == matrix.untyped_storage().data_ptr()
            codes, scales = reference.quantize(rows, bits)
            rows.copy_(reference.dequantize(codes, scales)[:, : rows.shape[1]])
    try:
        yield
    finally:
        for matrix, original in zip(matrices, originals, strict=True):
            matrix.copy_(original)


@torch.inference_mode()
def errors_by_part(model: Model, bits: int, predict: Callable[[Model], Tensor]) -> dict[str, float]:
    """Return the mean divergence KL(exact ‖ rounded), in nats, if one part of the model is rounded: for each part, and
    for ALL and INTEGERS.

    predict: returns log probabilities, [positions, vocabulary].
    """
    parts, exact = parts_of(model), predict(model)
    groups = {name: [matrices] for name, matrices in parts.items()}
    groups[ALL] = list(parts.values())
    groups[INTEGERS] = [matrices for name, matrices in parts.items() if name not in FLOATS]
    errors = dict[str, float]()
    for name, group in groups.items():
        with rounded([matrix for matrices in group for matrix in matrices], bits):
            found = predict(model)
        errors[name] = float((exact.exp() * (exact - found)).sum(1).mean())
    return errors
