"""Drawing tokens on the device, and what is done to the logits before. reference.py defines the draw."""

from torch import Tensor

from kernels.sampling import cpu, reference
from kernels.sampling.adjust import TokenCounts, apply_bias, apply_penalties
from kernels.sampling.reference import Sampled, SamplingTensors, log_probabilities, log_probabilities_of

__all__ = [
    "Sampled",
    "SamplingTensors",
    "TokenCounts",
    "apply_bias",
    "apply_penalties",
    "log_probabilities",
    "log_probabilities_of",
    "sample",
]


def sample(logits: Tensor, params: SamplingTensors) -> Sampled:
    """One token for each row of logits, float32 [R, V]. The draw of a row depends on nothing but that row.

    On an accelerator a full sort is cheaper than waiting to learn whether it was needed.
    """
    if logits.is_cpu:
        return cpu.sample(logits, params)
    return reference.sample(logits, params)
