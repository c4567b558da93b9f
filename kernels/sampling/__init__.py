"""Drawing tokens on the device, and what is done to the logits before. reference.py defines the draw."""

from torch import Tensor

from baton.kernels.runtime import triton as gpu
from baton.kernels.sampling import cpu, native, reference
from baton.kernels.sampling.adjust import TokenCounts, apply_bias, apply_penalties
from baton.kernels.sampling.reference import ALL_GREEDY, Sampled, SamplingTensors, log_probabilities_of

__all__ = [
    "ALL_GREEDY",
    "Sampled",
    "SamplingTensors",
    "TokenCounts",
    "apply_bias",
    "apply_masks",
    "apply_penalties",
    "log_probabilities",
    "log_probabilities_of",
    "sample",
]


def sample(logits: Tensor, params: SamplingTensors) -> Sampled:
    """One token for each row of logits, float32 [R, V]. The draw of a row depends on nothing but that row."""
    if gpu.takes(logits):
        from baton.kernels.sampling import triton

        return triton.sample(logits, params)
    if native.takes(logits):
        return native.sample(logits, params)
    if logits.is_cpu:
        return cpu.sample(logits, params)
    return reference.sample(logits, params)


def apply_masks(logits: Tensor, rows: Tensor, words: Tensor) -> Tensor:
    """See reference.apply_masks. ValueError for words that are too few."""
    if 32 * words.shape[1] < logits.shape[1]:
        raise ValueError(f"{words.shape[1]} words of mask for {logits.shape[1]} tokens")
    if gpu.takes(logits):
        from baton.kernels.sampling import triton_adjust

        return triton_adjust.apply_masks(logits, rows, words)
    if native.masks(logits):
        return native.apply_masks(logits, rows, words)
    return reference.apply_masks(logits, rows, words)


def log_probabilities(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """See reference.log_probabilities."""
    if gpu.takes(logits):
        from baton.kernels.sampling import triton_log_probabilities

        if top <= triton_log_probabilities.MOST:
            return triton_log_probabilities.log_probabilities(logits, tokens, top)
    return reference.log_probabilities(logits, tokens, top)
