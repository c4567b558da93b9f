"""The references of Kimi Delta Attention between its projections, against its definition in float64."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from baton.kernels.delta_net.decode import kda_decode, reference as decoding
from baton.kernels.delta_net.prefill import kda_prefill, reference as prefilling
from tests.kernels.delta_net.delta_nets import magnification
from tests.kernels.delta_net.kda_nets import BF16, F32, LAYOUTS, KdaLayout, KdaNet, assert_same_to_rounding, drawn
from tests.kernels.mamba2.test_prefill import packs
from tests.kernels.packing import Packed, pack

many = settings(max_examples=25, deadline=None)
SMALL = KdaLayout(heads=3, width=6, size=8, kernel=4)


def definition(net: KdaNet, slot: int) -> tuple[Tensor, Tensor]:
    """Return y for all tokens as one sequence that continues the state in `slot`, token by token in float64.

    Also return the factor by which rounding errors are magnified.
    """
    s, c = net.layout, net.constants
    inputs, b = net.projected.double().split([s.channels, s.heads], 1)
    g = net.forget.double() + c.dt_bias
    g = c.A[:, None] * torch.where(g > 20, g, g.exp().log1p()).view(-1, s.heads, s.size)
    gate = net.gate.double().view(-1, s.heads, s.width)
    history, state, outputs = [*net.conv_pools[slot, 1].double()], net.state_pools[slot, 1].double(), list[Tensor]()
    magnified, shortest = list[Tensor](), torch.tensor(1.0)
    for token in range(len(inputs)):
        history = [*history, inputs[token]][-s.kernel :]
        x = torch.stack([tap * past for tap, past in zip(c.taps.double(), history, strict=True)]).sum(0)
        q, k, v = (x * x.sigmoid()).split([s.heads * s.size, s.heads * s.size, s.heads * s.width])
        q, k = (y.view(s.heads, s.size) for y in (q, k))
        lengths = [(y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k)]
        shortest = torch.stack([shortest, *(length.min() for length in lengths)]).min()
        q, k = (y / length for y, length in zip((q, k), lengths, strict=True))
        out = list[Tensor]()
        for head in range(s.heads):
            held = state[head] @ g[token, head].exp().diag()
            change = b[token, head].sigmoid() * (v.view(s.heads, s.width)[head] - held @ k[head])
            state[head] = held + torch.outer(change, k[head])
            out.append(state[head] @ q[head] * s.size**-0.5)
        o = torch.stack(out)
        rms = (o.square().mean(-1, keepdim=True) + c.eps).sqrt()
        outputs.append(c.norm * o / rms / (1 + (-gate[token]).exp()))
        magnified.append(magnification(state, rms, shortest).expand_as(o))
    return torch.stack(outputs).flatten(1), torch.stack(magnified).flatten(1)


@many
@given(layout=LAYOUTS, tokens=st.integers(1, 140), seed=st.integers(0, 9))
def test_a_prefill_equals_the_definition(layout: KdaLayout, tokens: int, seed: int) -> None:
    net = drawn(layout, tokens, 3, seed=seed)
    expected, magnified = definition(net, 1)
    y = net.prefill(Packed([0, tokens], [5], [1], [], 3), kda_prefill)
    assert ((y - expected).abs() <= 2e-5 * magnified).all()


@many
@given(layout=LAYOUTS, packed=packs(), seed=st.integers(0, 9))
def test_decoding_token_by_token_equals_a_prefill(layout: KdaLayout, packed: Packed, seed: int) -> None:
    """Outputs, states and the convolution's history agree at each segment's end and at every checkpoint."""
    filled = drawn(layout, packed.tokens, packed.pool_size, seed=seed)
    decoded = filled.again()
    y = filled.prefill(packed, kda_prefill)
    for segment, slot in enumerate(packed.slots):
        for token in range(*packed.offsets[segment : segment + 2]):
            row = slice(token, token + 1)
            position = torch.tensor([packed.starts[segment] + token - packed.offsets[segment]])
            found = kda_decode(*decoded.arguments(row), torch.tensor([slot]), position)
            torch.testing.assert_close(found, y[row], rtol=1e-4, atol=1e-4)
            for owner, at, target in packed.checkpoints:
                if (owner, at) == (segment, position + 1):
                    decoded.conv_pools[target] = decoded.conv_pools[slot]
                    decoded.state_pools[target, 1] = decoded.state_pools[slot, 1]
    assert torch.equal(filled.conv_pools[:, 1], decoded.conv_pools[:, 1])
    torch.testing.assert_close(filled.state_pools[:, 1], decoded.state_pools[:, 1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("states", [F32, BF16])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_dispatched_form_equals_the_references(dtype: torch.dtype, states: torch.dtype) -> None:
    packed = pack([90, 1, 40], [0, 64, 7], [(0, 64), (0, 70), (2, 47)])
    found = drawn(SMALL, packed.tokens, packed.pool_size, dtype, 0, states)
    expected = found.again()
    y, exact = found.prefill(packed, kda_prefill), expected.prefill(packed, prefilling.kda_prefill)
    assert y.dtype == dtype and y.shape == (131, 18)
    assert_same_to_rounding(found, y, expected, exact)
    slots = torch.tensor(packed.slots)
    y, exact = (
        net.decode(slots, form, slice(3)) for net, form in ((found, kda_decode), (expected, decoding.kda_decode))
    )
    assert y.dtype == dtype
    assert_same_to_rounding(found, y, expected, exact)


def test_nan_in_one_request_does_not_reach_others() -> None:
    packed = pack([70, 33], [0, 0], [])
    healthy = drawn(SMALL, packed.tokens, packed.pool_size)
    poisoned = healthy.again()
    poisoned.forget[70, :] = torch.nan
    alone = Packed([0, 70], [0], packed.slots[:1], [], packed.pool_size)
    expected = healthy.again().prefill(alone, kda_prefill, slice(70))
    y = poisoned.prefill(packed, kda_prefill)
    assert torch.equal(y[:70], expected) and y[70:].isnan().any()
    assert poisoned.state_pools[packed.slots[0], 1].isfinite().all()
