"""Random gated delta nets whose pools are views of one layer in pools that hold all layers of a slot together."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from baton.kernels.delta_net.constants import DeltaConstants
from baton.kernels.prefill.plan import plan_prefill
from tests.kernels.packing import Packed

F32, BF16 = torch.float32, torch.bfloat16
DTYPES = st.sampled_from([F32, BF16])
LAYERS = 3


@dataclass(frozen=True)
class NetLayout:
    keys: int  # key heads
    heads: int  # value heads per key head
    width: int
    size: int
    kernel: int
    bias: bool

    @property
    def all_heads(self) -> int:
        return self.keys * self.heads

    @property
    def inner(self) -> int:
        return self.all_heads * self.width

    @property
    def channels(self) -> int:
        return self.inner + 2 * self.keys * self.size


def layouts(most_keys: int = 3, most_heads: int = 3, typical: int = 128) -> st.SearchStrategy[NetLayout]:
    sizes = st.one_of(st.integers(1, 40), st.sampled_from([64, typical]))
    return st.builds(
        NetLayout,
        keys=st.integers(1, most_keys),
        heads=st.integers(1, most_heads),
        width=sizes,
        size=sizes,
        kernel=st.integers(1, 5),
        bias=st.booleans(),
    )


TYPICAL = NetLayout(keys=4, heads=2, width=128, size=128, kernel=4, bias=False)


@dataclass(frozen=True)
class DeltaNet:
    layout: NetLayout
    constants: DeltaConstants
    projected: Tensor
    conv_pools: Tensor
    state_pools: Tensor

    def prefill(self, packed: Packed, form: Callable[..., Tensor], rows: slice = slice(None)) -> Tensor:
        p, cpu = packed, torch.device("cpu")
        plan = plan_prefill(p.offsets, p.starts, p.slots, p.checkpoints, 64, self.layout.kernel, cpu)
        return form(self.projected[rows], self.constants, self.conv_pools[:, 1], self.state_pools[:, 1], plan)

    def decode(self, slots: Tensor, form: Callable[..., Tensor], rows: slice = slice(None)) -> Tensor:
        pools = self.conv_pools[:, 1], self.state_pools[:, 1]
        return form(self.projected[rows], self.constants, *pools, slots[rows], slots[rows] * 1000)

    def again(self, states: torch.dtype | None = None) -> "DeltaNet":
        pools = self.state_pools.clone() if states is None else self.state_pools.to(states)
        return replace(self, conv_pools=self.conv_pools.clone(), state_pools=pools)

    def alone(self, slot: int) -> "DeltaNet":
        """Return a copy in which all slots but `slot` are NaN."""
        net = self.again()
        others = [other for other in range(len(self.state_pools)) if other != slot]
        net.conv_pools[others] = torch.nan
        net.state_pools[others] = torch.nan
        return net


def drawn(
    s: NetLayout, tokens: int, slots: int, dtype: torch.dtype = F32, seed: int = 0, states: torch.dtype = F32
) -> DeltaNet:
    g = torch.Generator().manual_seed(seed)
    constants = DeltaConstants(
        taps=torch.randn(s.kernel, s.channels, generator=g) / s.kernel,
        conv_bias=torch.randn(s.channels, generator=g) if s.bias else None,
        dt_bias=torch.randn(s.all_heads, generator=g) - 1,
        A=-torch.rand(s.all_heads, generator=g) * (4 if seed % 2 else 0.1),
        norm=torch.randn(s.width, generator=g),
        key_heads=s.keys,
        eps=0.01,
    )
    return DeltaNet(
        s,
        constants,
        torch.randn(tokens, s.inner + s.channels + 2 * s.all_heads, generator=g).to(dtype),
        torch.randn(slots, LAYERS, s.kernel - 1, s.channels, generator=g),
        torch.randn(slots, LAYERS, s.all_heads, s.width, s.size, generator=g).to(states),
    )


def slots_of(rows: int, slots: int, seed: int = 0) -> Tensor:
    return torch.randperm(slots, generator=torch.Generator().manual_seed(seed))[:rows]


def assert_same_to_rounding(found: DeltaNet, y: Tensor, expected: DeltaNet, exact: Tensor) -> None:
    """Check outputs and states up to rounding, and the convolution pools and other layers' states bit by bit."""
    tolerance = 3e-5 if y.dtype == F32 else 2**-7
    torch.testing.assert_close(y, exact, rtol=tolerance, atol=tolerance * max(1.0, float(exact.abs().max())))
    tolerance = 2e-5 if found.state_pools.dtype == F32 else 2**-7
    scale = expected.state_pools.abs().max().item()
    torch.testing.assert_close(found.state_pools, expected.state_pools, rtol=tolerance, atol=1e-5 * scale)
    assert torch.equal(found.conv_pools, expected.conv_pools)
    others = [layer for layer in range(LAYERS) if layer != 1]
    assert torch.equal(found.state_pools[:, others], expected.state_pools[:, others])


def assert_only_written(found: DeltaNet, before: DeltaNet, slots: list[int]) -> None:
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
