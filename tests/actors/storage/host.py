"""Host memory for the states of a small model."""

import torch
from torch import Tensor

from baton.actors.storage.arena import Arena
from baton.actors.storage.host_memory import HostStates
from baton.actors.storage.lines import HostLines
from baton.models.batch import Pools, TensorSpec, stretches

PAGE = 2


def host_states(state_bytes: int, *kv: TensorSpec) -> HostStates:
    """Return host memory for a pool of one slot and one page. kv: one spec for each page tensor."""
    cpu = torch.device("cpu")
    blocks, pages = stretches(1, [TensorSpec((PAGE, *spec.shape), spec.dtype) for spec in kv], cpu)
    states = HostStates()
    states.use(Pools(torch.zeros(1, state_bytes, dtype=torch.uint8), blocks, [], pages, PAGE), buffer)
    return states


def buffer(nbytes: int) -> Tensor:
    return torch.full((nbytes,), 0xA5, dtype=torch.uint8)


def arena_of(lines: HostLines, *counts: int) -> Arena:
    """Return an arena with one chunk for each count of lines."""
    return Arena(lines, [buffer(count * lines.nbytes) for count in counts])
