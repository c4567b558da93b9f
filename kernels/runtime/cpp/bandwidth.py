"""How fast memory is read: the floor of decoding, which reads every weight for each step."""

import time

import torch

NUMBERS = 2**25
PASSES = 8


def read_bandwidth(threads: int) -> float:
    """Bytes a second, the best of a few passes over 128 MiB. Sets torch's threads for as long as it runs."""
    numbers, before = torch.ones(NUMBERS), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return max(_one_pass(numbers) for _ in range(PASSES))
    finally:
        torch.set_num_threads(before)


def _one_pass(numbers: torch.Tensor) -> float:
    began = time.perf_counter()
    numbers.sum()
    return numbers.nbytes / (time.perf_counter() - began)
