"""Sampling of tokens on the device, and the changes of logits before it. reference.py defines the draw."""

from torch import Tensor

from baton.kernels.runtime.dispatch import dispatch, on_cpu
from baton.kernels.runtime.triton import takes
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
    "widen",
]


sample = dispatch(
    reference.sample, (native.takes, native.sample), (on_cpu, cpu.sample), triton="baton.kernels.sampling.triton"
)


widen = dispatch(reference.widen, (native.widens, native.widen))


def apply_masks(logits: Tensor, rows: Tensor, words: Tensor) -> Tensor:
    """Compute reference.apply_masks with the fastest form. Raise ValueError if masks are shorter than logits."""
    if 32 * words.shape[1] < logits.shape[1]:
        raise ValueError(f"{words.shape[1]} words of mask for {logits.shape[1]} tokens")
    if takes(logits):
        from baton.kernels.sampling import triton_adjust

        return triton_adjust.apply_masks(logits, rows, words)
    if native.masks(logits):
        return native.apply_masks(logits, rows, words)
    return reference.apply_masks(logits, rows, words)


def log_probabilities(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute reference.log_probabilities with the fastest form for the logits' device."""
    if takes(logits):
        from baton.kernels.sampling import triton_log_probabilities

        if top <= triton_log_probabilities.MOST:
            return triton_log_probabilities.log_probabilities(logits, tokens, top)
    return reference.log_probabilities(logits, tokens, top)
