"""Measurement of the memory's read bandwidth, which bounds decoding: each step reads every weight."""

import time

import torch

from baton.kernels.runtime.memory import empty

NUMBERS = 2**25
PASSES = 8


def read_bandwidth(threads: int) -> float:
    """Measure the read bandwidth in bytes per second: the best of PASSES passes over 128 MiB.

    threads: how many threads read. Torch's number of threads is changed while this runs, and restored.
    """
    numbers, before = empty(NUMBERS, dtype=torch.float32).fill_(1), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return max(_one_pass(numbers) for _ in range(PASSES))
    finally:
        torch.set_num_threads(before)


def _one_pass(numbers: torch.Tensor) -> float:
    """Read all numbers once, and return bytes per second."""
    began = time.perf_counter()
    numbers.sum()
    return numbers.nbytes / (time.perf_counter() - began)
