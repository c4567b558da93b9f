"""The references of the gated delta net between its projections, against its definition token by token in float64."""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from baton.kernels.delta_net.constants import DeltaConstants
from baton.kernels.delta_net.decode import delta_decode, reference as decoding
from baton.kernels.delta_net.prefill import delta_prefill, reference as prefilling
from baton.kernels.prefill.plan import plan_prefill
from tests.kernels.delta_net.delta_nets import magnification
from tests.kernels.mamba2.test_prefill import packs
from tests.kernels.packing import Packed, pack

F32, BF16 = torch.float32, torch.bfloat16
many = settings(max_examples=30, deadline=None)


@dataclass(frozen=True)
class Sizes:
    keys: int = 2  # key heads
    ratio: int = 2  # value heads per key head
    size: int = 8
    width: int = 6
    kernel: int = 4
    bias: bool = False

    @property
    def heads(self) -> int:
        return self.keys * self.ratio

    @property
    def channels(self) -> int:
        return 2 * self.keys * self.size + self.heads * self.width


SIZES = st.builds(
    Sizes,
    keys=st.integers(1, 3),
    ratio=st.integers(1, 3),
    size=st.integers(1, 20),
    width=st.integers(1, 20),
    kernel=st.integers(2, 5),
    bias=st.booleans(),
)


@dataclass(frozen=True)
class Net:
    sizes: Sizes
    constants: DeltaConstants
    projected: Tensor
    conv_pool: Tensor
    state_pool: Tensor

    def prefill(self, packed: Packed, rows: slice = slice(None)) -> Tensor:
        p, cpu = packed, torch.device("cpu")
        plan = plan_prefill(p.offsets, p.starts, p.slots, p.checkpoints, 64, self.sizes.kernel, cpu)
        return delta_prefill(self.projected[rows], self.constants, self.conv_pool, self.state_pool, plan)

    def decode(self, slots: list[int], positions: list[int], rows: slice = slice(None)) -> Tensor:
        at = torch.tensor(slots), torch.tensor(positions)
        return delta_decode(self.projected[rows], self.constants, self.conv_pool, self.state_pool, *at)

    def again(self) -> "Net":
        return replace(self, conv_pool=self.conv_pool.clone(), state_pool=self.state_pool.clone())


def drawn(s: Sizes, tokens: int, slots: int, seed: int = 0, dtype: torch.dtype = F32, states: torch.dtype = F32) -> Net:
    g = torch.Generator().manual_seed(seed)
    constants = DeltaConstants(
        taps=torch.randn(s.kernel, s.channels, generator=g) / s.kernel,
        conv_bias=torch.randn(s.channels, generator=g) if s.bias else None,
        dt_bias=torch.randn(s.heads, generator=g) - 1,
        A=-torch.rand(s.heads, generator=g) * 4,
        norm=torch.randn(s.width, generator=g),
        key_heads=s.keys,
        eps=0.01,
    )
    columns = s.heads * s.width + s.channels + 2 * s.heads
    return Net(
        s,
        constants,
        torch.randn(tokens, columns, generator=g).to(dtype),
        torch.randn(slots, s.kernel - 1, s.channels, generator=g),
        torch.randn(slots, s.heads, s.width, s.size, generator=g).to(states),
    )


def definition(net: Net, slot: int) -> tuple[Tensor, Tensor]:
    """Return y for `projected` as one sequence that continues the state in `slot`, token by token in float64.

    Also return the factor by which rounding errors are magnified.
    """
    s, c = net.sizes, net.constants
    inner = s.heads * s.width
    z, inputs, b, a = net.projected.double().split([inner, s.channels, s.heads, s.heads], 1)
    history = [*net.conv_pool[slot].double()]
    state, outputs, magnified = net.state_pool[slot].double(), list[Tensor](), list[Tensor]()
    shortest = torch.tensor(1.0)
    for token in range(len(z)):
        history = [*history, inputs[token]][-s.kernel :]
        x = sum(tap * past for tap, past in zip(c.taps.double(), history, strict=True))
        x = x if c.conv_bias is None else x + c.conv_bias
        x = x * x.sigmoid()
        q, k, v = x.split([s.keys * s.size, s.keys * s.size, inner])
        q, k = (y.view(s.keys, s.size).repeat_interleave(s.ratio, 0) for y in (q, k))
        lengths = [(y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k)]
        shortest = torch.stack([shortest, *(length.min() for length in lengths)]).min()
        q, k = (y / length for y, length in zip((q, k), lengths, strict=True))
        keep = (c.A * (1 + (a[token] + c.dt_bias).exp()).log()).exp()[:, None]
        out = list[Tensor]()
        for head in range(s.heads):
            held = state[head] * keep[head]
            change = b[token, head].sigmoid() * (v.view(s.heads, s.width)[head] - held @ k[head])
            state[head] = held + torch.outer(change, k[head])
            out.append(state[head] @ q[head] * s.size**-0.5)
        o, gate = torch.stack(out), z[token].view(s.heads, s.width)
        rms = (o.square().mean(-1, keepdim=True) + c.eps).sqrt()
        outputs.append(c.norm * o / rms * gate * gate.sigmoid())
        magnified.append(magnification(state, rms, shortest).expand_as(o))
    return torch.stack(outputs).flatten(1), torch.stack(magnified).flatten(1)


@many
@given(sizes=SIZES, tokens=st.integers(1, 140), seed=st.integers(0, 9))
def test_a_prefill_equals_the_definition(sizes: Sizes, tokens: int, seed: int) -> None:
    net = drawn(sizes, tokens, 3, seed)
    expected, magnified = definition(net, 1)
    found = net.prefill(Packed([0, tokens], [5], [1], [], 3))
    assert ((found - expected).abs() <= 2e-5 * magnified).all()


@many
@given(sizes=SIZES, packed=packs(), seed=st.integers(0, 9))
def test_decoding_token_by_token_equals_a_prefill(sizes: Sizes, packed: Packed, seed: int) -> None:
    """Outputs, states and the convolution's history agree at each segment's end and at every checkpoint."""
    filled = drawn(sizes, packed.tokens, packed.pool_size, seed)
    decoded = filled.again()
    y = filled.prefill(packed)
    for segment, slot in enumerate(packed.slots):
        first, last = packed.offsets[segment : segment + 2]
        for token in range(first, last):
            position = packed.starts[segment] + token - first
            found = decoded.decode([slot], [position], slice(token, token + 1))
            torch.testing.assert_close(found, y[token : token + 1], rtol=1e-4, atol=1e-4)
            for owner, at, target in packed.checkpoints:
                if (owner, at) == (segment, position + 1):
                    decoded.conv_pool[target] = decoded.conv_pool[slot]
                    decoded.state_pool[target] = decoded.state_pool[slot]
    assert torch.equal(filled.conv_pool, decoded.conv_pool)
    torch.testing.assert_close(filled.state_pool, decoded.state_pool, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("states", [F32, BF16])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_dispatched_form_equals_the_references(dtype: torch.dtype, states: torch.dtype) -> None:
    packed = pack([90, 1, 40], [0, 64, 7], [(0, 64), (0, 70), (2, 47)])
    found = drawn(Sizes(), packed.tokens, packed.pool_size, 0, dtype, states)
    expected = found.again()
    cpu = torch.device("cpu")
    plan = plan_prefill(packed.offsets, packed.starts, packed.slots, packed.checkpoints, 64, 4, cpu)
    e = expected
    exact = prefilling.delta_prefill(e.projected, e.constants, e.conv_pool, e.state_pool, plan)
    tolerance = 1e-5 if dtype == F32 else 2**-7
    y = found.prefill(packed)
    assert y.dtype == dtype and y.shape == (131, 24)
    torch.testing.assert_close(y, exact, rtol=tolerance, atol=tolerance)
    slots = packed.slots
    rows = torch.tensor(slots), torch.tensor([90, 65, 47])
    exact = decoding.delta_decode(e.projected[:3], e.constants, e.conv_pool, e.state_pool, *rows)
    y = found.decode(slots, [90, 65, 47], slice(3))
    assert y.dtype == dtype
    torch.testing.assert_close(y, exact, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found.state_pool, expected.state_pool, rtol=1e-5 if states == F32 else 2**-7, atol=1e-5)
    assert torch.equal(found.conv_pool, expected.conv_pool)


def test_nan_in_one_request_does_not_reach_others() -> None:
    packed = pack([70, 33], [0, 0], [])
    healthy = drawn(Sizes(), packed.tokens, packed.pool_size)
    poisoned = healthy.again()
    poisoned.projected[70, :] = torch.nan
    expected = healthy.again().prefill(Packed([0, 70], [0], packed.slots[:1], [], packed.pool_size), slice(70))
    y = poisoned.prefill(packed)
    torch.testing.assert_close(y[:70], expected, rtol=1e-5, atol=1e-5)
    assert y[70:].isnan().any()
    assert poisoned.state_pool[packed.slots[0]].isfinite().all()
