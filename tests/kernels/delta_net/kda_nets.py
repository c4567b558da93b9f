"""Random layers of Kimi Delta Attention whose pools are views of one layer in pools that hold all layers of a slot."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from baton.kernels.delta_net.constants import KdaConstants
from baton.kernels.prefill.plan import plan_prefill
from tests.kernels.packing import Packed

F32, BF16 = torch.float32, torch.bfloat16
DTYPES = st.sampled_from([F32, BF16])
LAYERS = 3


@dataclass(frozen=True)
class KdaLayout:
    heads: int
    width: int
    size: int
    kernel: int

    @property
    def channels(self) -> int:
        return self.heads * (2 * self.size + self.width)


SIZES = st.one_of(st.integers(1, 40), st.sampled_from([64, 128]))
LAYOUTS = st.builds(KdaLayout, heads=st.integers(1, 4), width=SIZES, size=SIZES, kernel=st.integers(2, 5))
TYPICAL = KdaLayout(heads=6, width=128, size=128, kernel=4)


@dataclass(frozen=True)
class KdaNet:
    layout: KdaLayout
    constants: KdaConstants
    projected: Tensor
    forget: Tensor
    gate: Tensor
    conv_pools: Tensor
    state_pools: Tensor

    def arguments(self, rows: slice = slice(None)) -> tuple[Tensor, Tensor, Tensor, KdaConstants, Tensor, Tensor]:
        """Return the arguments that prefill and decode have in common, for these rows."""
        projections = (self.projected[rows], self.forget[rows], self.gate[rows])
        return (*projections, self.constants, self.conv_pools[:, 1], self.state_pools[:, 1])

    def prefill(self, packed: Packed, form: Callable[..., Tensor], rows: slice = slice(None)) -> Tensor:
        p, cpu = packed, torch.device("cpu")
        plan = plan_prefill(p.offsets, p.starts, p.slots, p.checkpoints, 64, self.layout.kernel, cpu)
        return form(*self.arguments(rows), plan)

    def decode(self, slots: Tensor, form: Callable[..., Tensor], rows: slice = slice(None)) -> Tensor:
        return form(*self.arguments(rows), slots[rows], slots[rows] * 1000)

    def again(self, states: torch.dtype | None = None) -> "KdaNet":
        pools = self.state_pools.clone() if states is None else self.state_pools.to(states)
        return replace(self, conv_pools=self.conv_pools.clone(), state_pools=pools)

    def alone(self, slot: int) -> "KdaNet":
        """Return a copy in which all slots but `slot` are NaN."""
        net = self.again()
        others = [other for other in range(len(self.state_pools)) if other != slot]
        net.conv_pools[others] = torch.nan
        net.state_pools[others] = torch.nan
        return net


def drawn(
    s: KdaLayout, tokens: int, slots: int, dtype: torch.dtype = F32, seed: int = 0, states: torch.dtype = F32
) -> KdaNet:
    """Draw a layer whose channels decay at each token by a factor between almost 1 and about e^-16."""
    g = torch.Generator().manual_seed(seed)
    constants = KdaConstants(
        taps=torch.randn(s.kernel, s.channels, generator=g) / s.kernel,
        dt_bias=torch.randn(s.heads * s.size, generator=g) * 3 - 1,
        A=-torch.rand(s.heads, generator=g) * (4 if seed % 2 else 0.1),
        norm=torch.randn(s.width, generator=g),
        eps=0.01,
    )
    return KdaNet(
        s,
        constants,
        torch.randn(tokens, s.channels + s.heads, generator=g).to(dtype),
        torch.randn(tokens, s.heads * s.size, generator=g).to(dtype),
        torch.randn(tokens, s.heads * s.width, generator=g).to(dtype),
        torch.randn(slots, LAYERS, s.kernel - 1, s.channels, generator=g),
        torch.randn(slots, LAYERS, s.heads, s.width, s.size, generator=g).to(states),
    )


def slots_of(rows: int, slots: int, seed: int = 0) -> Tensor:
    return torch.randperm(slots, generator=torch.Generator().manual_seed(seed))[:rows]


def assert_same_to_rounding(found: KdaNet, y: Tensor, expected: KdaNet, exact: Tensor) -> None:
    """Check outputs and states up to rounding, and the convolution pools and other layers' states bit by bit."""
    tolerance = 3e-5 if y.dtype == F32 else 2**-7
    torch.testing.assert_close(y, exact, rtol=tolerance, atol=tolerance * max(1.0, float(exact.abs().max())))
    tolerance = 2e-5 if found.state_pools.dtype == F32 else 2**-7
    scale = expected.state_pools.abs().max().item()
    torch.testing.assert_close(found.state_pools, expected.state_pools, rtol=tolerance, atol=1e-5 * scale)
    assert torch.equal(found.conv_pools, expected.conv_pools)
    others = [layer for layer in range(LAYERS) if layer != 1]
    assert torch.equal(found.state_pools[:, others], expected.state_pools[:, others])


def assert_only_written(found: KdaNet, before: KdaNet, slots: list[int]) -> None:
    spare = [slot for slot in range(len(found.state_pools)) if slot not in slots]
    assert torch.equal(found.state_pools[spare], before.state_pools[spare])
    assert torch.equal(found.conv_pools[spare], before.conv_pools[spare])
