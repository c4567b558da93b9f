"""Class of random layers that the gated delta net and Kimi Delta Attention share, and comparisons of two layers."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from baton.kernels.delta_net.constants import DeltaConstants, KdaConstants
from baton.kernels.prefill.plan import plan_prefill
from tests.kernels import prefills
from tests.kernels.packing import Packed

F32, BF16 = torch.float32, torch.bfloat16
DTYPES = st.sampled_from([F32, BF16])
LAYERS = 3


@dataclass(frozen=True)
class Net:
    """A layer whose pools are views of pools that hold all layers of a slot together."""

    kernel: int  # tokens of the convolution
    constants: DeltaConstants | KdaConstants
    inputs: tuple[Tensor, ...]  # the rows of the projections, as the kernels take them
    conv_pools: Tensor
    state_pools: Tensor

    @property
    def projected(self) -> Tensor:
        return self.inputs[0]

    @property
    def pools(self) -> tuple[Tensor, Tensor]:
        """The pools of the one layer that is computed."""
        return self.conv_pools[:, 1], self.state_pools[:, 1]

    def prefill(self, packed: Packed, form: Callable[..., Tensor], rows: slice = slice(None)) -> Tensor:
        p, cpu = packed, torch.device("cpu")
        plan = plan_prefill(p.offsets, p.starts, p.slots, p.checkpoints, 64, self.kernel, cpu)
        return form(*(rows_of[rows] for rows_of in self.inputs), self.constants, *self.pools, plan)

    def decode(
        self,
        slots: Tensor,
        form: Callable[..., Tensor],
        rows: slice = slice(None),
        positions: Tensor | None = None,
    ) -> Tensor:
        """Decode one token in each row's slot. positions: by row; by default 1,000 times the slot."""
        at = slots[rows], (slots * 1000 if positions is None else positions)[rows]
        return form(*(rows_of[rows] for rows_of in self.inputs), self.constants, *self.pools, *at)

    def again(self, states: torch.dtype | None = None) -> "Net":
        pools = self.state_pools.clone() if states is None else self.state_pools.to(states)
        return replace(self, conv_pools=self.conv_pools.clone(), state_pools=pools)

    def alone(self, slot: int) -> "Net":
        """Return a copy in which all slots but `slot` are NaN."""
        net = self.again()
        others = [other for other in range(len(self.state_pools)) if other != slot]
        net.conv_pools[others] = torch.nan
        net.state_pools[others] = torch.nan
        return net


def slots_of(rows: int, slots: int, seed: int = 0) -> Tensor:
    return torch.randperm(slots, generator=torch.Generator().manual_seed(seed))[:rows]


def assert_same_to_rounding(found: Net, y: Tensor, expected: Net, exact: Tensor) -> None:
    """Check outputs and states up to rounding, and the convolution pools and other layers' states bit by bit."""
    prefills.assert_same_to_rounding(found, y, expected, exact)
    others = [layer for layer in range(LAYERS) if layer != 1]
    assert torch.equal(found.state_pools[:, others], expected.state_pools[:, others])


def assert_only_written(found: Net, before: Net, slots: list[int]) -> None:
    spare = [slot for slot in range(len(found.state_pools)) if slot not in slots]
    assert torch.equal(found.state_pools[spare], before.state_pools[spare])
    assert torch.equal(found.conv_pools[spare], before.conv_pools[spare])


def magnification(state: Tensor, rms: Tensor, shortest: Tensor) -> Tensor:
    """Return the factor by which a net magnifies rounding errors in its output, for each of H heads: [H, 1].

    The norm magnifies the error of its input, a sum of products of state and query that may cancel. Dividing a short
    query or key by its length magnifies the error of the convolution.

    state: [H, P, N] with P numbers of a value and N of a key, after the token.
    rms: [H, 1], root mean square of the norm's input.
    shortest: the smallest length of a query or key so far.
    """
    products = state.norm(dim=-1).amax(1, keepdim=True) * state.shape[-1] ** -0.5
    return (1 + products / rms) * (1 + 0.1 / shortest)
