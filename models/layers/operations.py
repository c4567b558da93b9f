"""The kernel operations that a model needs: only these are compiled when a server first starts with that model."""

from torch import nn

from baton.models.batch import Model
from baton.models.layers.attention import Attention
from baton.models.layers.delta import DeltaMixer
from baton.models.layers.experts import Experts
from baton.models.layers.kda import KdaMixer
from baton.models.layers.mamba2 import Mamba2Mixer
from baton.models.layers.mla import LatentAttention
from baton.models.layers.mlp import GatedMLP, SquaredReluMLP
from baton.models.layers.prediction import PredictionHead

COMMON = frozenset({"linear.dense", "runtime.cpu_graph", "norm.rms", "sampling"})
BY_LAYER: dict[type[nn.Module], frozenset[str]] = {
    Attention: frozenset({"activations", "attention.paged", "attention.rotary"}),
    DeltaMixer: frozenset({"delta_net.decode", "delta_net.prefill"}),
    Experts: frozenset({"moe.experts", "moe.routing", "moe.shared_expert"}),
    GatedMLP: frozenset({"activations"}),
    KdaMixer: frozenset({"delta_net.decode", "delta_net.prefill"}),
    LatentAttention: frozenset({"attention.paged", "linear.per_head", "attention.mla_cache"}),
    Mamba2Mixer: frozenset({"mamba2.decode", "mamba2.prefill"}),
    PredictionHead: frozenset({"prediction"}),
    SquaredReluMLP: frozenset({"activations"}),
}


def operations(model: Model, bits: int | None) -> frozenset[str]:
    """Return the operations that a model needs, as names of folders in kernels/. bits: see load_model."""
    layers = {type(layer) for layer in model.modules()} if isinstance(model, nn.Module) else set()
    return COMMON.union(*(BY_LAYER.get(layer, ()) for layer in layers), () if bits is None else {"linear.quantized"})
