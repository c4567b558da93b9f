"""Random gated delta nets, and their definition token by token in float64."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from baton.kernels.delta_net.constants import DeltaConstants
from tests.kernels.delta_net.nets import F32, LAYERS, Net, magnification


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
SMALL = NetLayout(keys=1, heads=2, width=8, size=16, kernel=4, bias=True)


def drawn(
    s: NetLayout, tokens: int, slots: int, dtype: torch.dtype = F32, seed: int = 0, states: torch.dtype = F32
) -> Net:
    g = torch.Generator().manual_seed(seed)
    constants = DeltaConstants(
        taps=torch.randn(s.kernel, s.channels, generator=g) / s.kernel,
        conv_bias=torch.randn(s.channels, generator=g) if s.bias else None,
        dt_bias=torch.randn(s.all_heads, generator=g) - 1,
        A=-torch.rand(s.all_heads, generator=g) * (4 if seed % 2 else 0.1),
        norm=torch.randn(s.width, generator=g),
        key_heads=s.keys,
        eps=0.01,
        beta_scale=2.0 if seed % 3 == 1 else 1.0,
    )
    return Net(
        s.kernel,
        constants,
        (torch.randn(tokens, s.inner + s.channels + 2 * s.all_heads, generator=g).to(dtype),),
        torch.randn(slots, LAYERS, s.kernel - 1, s.channels, generator=g),
        torch.randn(slots, LAYERS, s.all_heads, s.width, s.size, generator=g).to(states),
    )


def definition(s: NetLayout, net: Net, slot: int) -> tuple[Tensor, Tensor]:
    """Return y for all tokens as one sequence that continues the state in `slot`, token by token in float64.

    Also return the factor by which rounding errors are magnified.
    """
    c = net.constants
    assert isinstance(c, DeltaConstants)
    z, inputs, b, a = net.projected.double().split([s.inner, s.channels, s.all_heads, s.all_heads], 1)
    history, state = [*net.conv_pools[slot, 1].double()], net.state_pools[slot, 1].double()
    outputs, magnified, shortest = list[Tensor](), list[Tensor](), torch.tensor(1.0)
    for token in range(len(z)):
        history = [*history, inputs[token]][-s.kernel :]
        x = torch.stack([tap * past for tap, past in zip(c.taps.double(), history, strict=True)]).sum(0)
        x = x if c.conv_bias is None else x + c.conv_bias
        x = x * x.sigmoid()
        q, k, v = x.split([s.keys * s.size, s.keys * s.size, s.inner])
        q, k = (y.view(s.keys, s.size).repeat_interleave(s.heads, 0) for y in (q, k))
        lengths = [(y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k)]
        shortest = torch.stack([shortest, *(length.min() for length in lengths)]).min()
        q, k = (y / length for y, length in zip((q, k), lengths, strict=True))
        keep = (c.A * (1 + (a[token] + c.dt_bias).exp()).log()).exp()[:, None]
        out = list[Tensor]()
        for head in range(s.all_heads):
            held = state[head] * keep[head]
            change = c.beta_scale * b[token, head].sigmoid() * (v.view(s.all_heads, s.width)[head] - held @ k[head])
            state[head] = held + torch.outer(change, k[head])
            out.append(state[head] @ q[head] * s.size**-0.5)
        o, gate = torch.stack(out), z[token].view(s.all_heads, s.width)
        rms = (o.square().mean(-1, keepdim=True) + c.eps).sqrt()
        outputs.append(c.norm * o / rms * gate * gate.sigmoid())
        magnified.append(magnification(state, rms, shortest).expand_as(o))
    return torch.stack(outputs).flatten(1), torch.stack(magnified).flatten(1)
