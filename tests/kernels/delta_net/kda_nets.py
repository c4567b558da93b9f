"""Random layers of Kimi Delta Attention, and their definition token by token in float64."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from baton.kernels.delta_net.constants import KdaConstants
from tests.kernels.delta_net.nets import F32, LAYERS, Net, magnification


@dataclass(frozen=True)
class KdaLayout:
    heads: int
    width: int
    size: int
    kernel: int

    @property
    def channels(self) -> int:
        return self.heads * (2 * self.size + self.width)


def layouts(most_heads: int = 4, typical: int = 128) -> st.SearchStrategy[KdaLayout]:
    sizes = st.one_of(st.integers(1, 40), st.sampled_from([64, typical]))
    return st.builds(KdaLayout, heads=st.integers(1, most_heads), width=sizes, size=sizes, kernel=st.integers(2, 5))


TYPICAL = KdaLayout(heads=6, width=128, size=128, kernel=4)
SMALL = KdaLayout(heads=2, width=8, size=16, kernel=4)


def drawn(
    s: KdaLayout, tokens: int, slots: int, dtype: torch.dtype = F32, seed: int = 0, states: torch.dtype = F32
) -> Net:
    """Draw a layer whose channels decay at each token by a factor between almost 1 and about e^-16, or e^-5 at most."""
    g = torch.Generator().manual_seed(seed)
    constants = KdaConstants(
        taps=torch.randn(s.kernel, s.channels, generator=g) / s.kernel,
        dt_bias=torch.randn(s.heads * s.size, generator=g) * 3 - 1,
        A=-torch.rand(s.heads, generator=g) * (4 if seed % 2 else 0.1),
        norm=torch.randn(s.width, generator=g),
        eps=0.01,
        lower_bound=-5.0 if seed % 3 == 1 else None,
    )
    projected = torch.randn(tokens, s.channels + s.heads, generator=g).to(dtype)
    forget = torch.randn(tokens, s.heads * s.size, generator=g).to(dtype)
    gate = torch.randn(tokens, s.heads * s.width, generator=g).to(dtype)
    return Net(
        s.kernel,
        constants,
        (projected, forget, gate),
        torch.randn(slots, LAYERS, s.kernel - 1, s.channels, generator=g),
        torch.randn(slots, LAYERS, s.heads, s.width, s.size, generator=g).to(states),
    )


def definition(s: KdaLayout, net: Net, slot: int) -> tuple[Tensor, Tensor]:
    """Return y for all tokens as one sequence that continues the state in `slot`, token by token in float64.

    Also return the factor by which rounding errors are magnified.
    """
    c = net.constants
    assert isinstance(c, KdaConstants)
    projected, forget, gate = (each.double() for each in net.inputs)
    inputs, b = projected.split([s.channels, s.heads], 1)
    g = (forget + c.dt_bias).view(-1, s.heads, s.size)
    if c.lower_bound is None:
        g = c.A[:, None] * torch.where(g > 20, g, g.exp().log1p())
    else:
        g = c.lower_bound / (1 + (c.A[:, None] * g).exp())
    gate = gate.view(-1, s.heads, s.width)
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
