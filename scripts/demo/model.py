"""The trained model: a dense granitemoehybrid in plain differentiable torch. Parameters have Hugging Face's names."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Size:
    """The sizes of the model. All Mamba-2 heads share one group of B and C; attention has no positional encoding."""

    vocab: int = 768
    hidden: int = 192
    layers: tuple[str, ...] = ("mamba", "mamba", "attention", "mamba", "attention", "mamba", "attention", "mamba")
    mamba_heads: int = 6
    mamba_head: int = 64  # width of a head
    mamba_state: int = 64
    conv: int = 4  # kernel of the convolution
    chunk: int = 64  # tokens of a chunk of the scan
    heads: int = 6
    kv_heads: int = 6
    intermediate: int = 192
    embedding_multiplier: float = 12.0
    residual_multiplier: float = 0.5
    eps: float = 1e-5

    @property
    def mamba_inner(self) -> int:
        return self.mamba_heads * self.mamba_head

    @property
    def head(self) -> int:
        return self.hidden // self.heads


class RMSNorm(nn.Module):
    """A norm by the root mean square, with a weight for each column."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def scan(x: Tensor, dt: Tensor, rate: Tensor, b: Tensor, c: Tensor, chunk: int) -> Tensor:
    """Compute the Mamba-2 recurrence h_t = exp(dt·rate)·h_{t-1} + dt·x⊗b, y_t = h_t·c, in chunks and from h = 0.

    The algorithm is SSD, arXiv 2405.21060.

    x: [B, T, H, P]; dt: [B, T, H]; rate: [H], negative; b, c: [B, T, N]. Returns [B, T, H, P].
    B: chats. T: tokens, a multiple of `chunk`. H: heads. P: columns of a head. N: columns of the state.
    """
    batch, length, heads, width = x.shape
    count = length // chunk
    decay = (dt * rate).view(batch, count, chunk, heads).permute(0, 3, 1, 2).cumsum(-1)
    x = (x * dt[..., None]).view(batch, count, chunk, heads, width).permute(0, 3, 1, 2, 4)
    b = b.view(batch, 1, count, chunk, -1)
    c = c.view(batch, 1, count, chunk, -1)
    y = ((c @ b.transpose(-1, -2)) * between(decay, decay, 1)) @ x
    ends = b.transpose(-1, -2) @ (x * (decay[..., -1:] - decay).exp()[..., None])
    whole = decay[..., -1].cumsum(-1)
    passed = between(F.pad(whole, (1, -1)), whole, 0)
    states = (passed @ ends.flatten(-2)).view_as(ends)
    y = y + (c @ states) * decay.exp()[..., None]
    return y.permute(0, 2, 3, 1, 4).reshape(batch, length, heads, width)


def between(to: Tensor, since: Tensor, diagonal: int) -> Tensor:
    """Return exp(to_i − since_j) for j < i + diagonal, else 0. From [..., T] for T positions to [..., T, T]."""
    hidden = torch.ones(to.shape[-1], to.shape[-1], dtype=torch.bool, device=to.device).triu(diagonal)
    return (to[..., :, None] - since[..., None, :]).masked_fill(hidden, -math.inf).exp()


class Mamba2(nn.Module):
    """A Mamba-2 mixer."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        channels = size.mamba_inner + 2 * size.mamba_state
        self.in_proj = nn.Linear(size.hidden, size.mamba_inner + channels + size.mamba_heads, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, size.conv, groups=channels, padding=size.conv - 1)
        steps = torch.exp(torch.empty(size.mamba_heads).uniform_(math.log(1e-3), math.log(1e-1)))
        self.dt_bias = nn.Parameter(steps + torch.log(-torch.expm1(-steps)))
        self.A_log = nn.Parameter(torch.log(torch.empty(size.mamba_heads).uniform_(1, 16)))
        self.D = nn.Parameter(torch.ones(size.mamba_heads))
        self.norm = RMSNorm(size.mamba_inner, size.eps)
        self.out_proj = nn.Linear(size.mamba_inner, size.hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        size = self.size
        batch, length, _ = hidden.shape
        inner, state = size.mamba_inner, size.mamba_state
        z, xbc, dt = self.in_proj(hidden).split([inner, inner + 2 * state, size.mamba_heads], -1)
        # The convolution as shifted multiply-adds, because oneDNN's depthwise convolution is ten times slower.
        padded = F.pad(xbc, (0, 0, size.conv - 1, 0))
        taps = self.conv1d.weight[:, 0]
        first, *later = [padded[:, k : k + length] * taps[:, k] for k in range(size.conv)]
        assert self.conv1d.bias is not None
        mixed = self.conv1d.bias + sum(later, first)
        x, b, c = torch.split(F.silu(mixed), [inner, state, state], -1)
        x = x.view(batch, length, size.mamba_heads, size.mamba_head)
        y = scan(x, F.softplus(dt + self.dt_bias), -self.A_log.exp(), b, c, size.chunk) + x * self.D[:, None]
        output: Tensor = self.out_proj(self.norm(y.reshape(batch, length, inner) * F.silu(z)))
        return output


class Attention(nn.Module):
    """Causal attention without positions."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.q_proj = nn.Linear(size.hidden, size.heads * size.head, bias=False)
        self.k_proj = nn.Linear(size.hidden, size.kv_heads * size.head, bias=False)
        self.v_proj = nn.Linear(size.hidden, size.kv_heads * size.head, bias=False)
        self.o_proj = nn.Linear(size.heads * size.head, size.hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        q, k, v = (
            f(hidden).view(batch, length, -1, self.size.head).transpose(1, 2)
            for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        output: Tensor = self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))
        return output


class MLP(nn.Module):
    """A gated MLP with SiLU."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.input_linear = nn.Linear(size.hidden, 2 * size.intermediate, bias=False)
        self.output_linear = nn.Linear(size.intermediate, size.hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.input_linear(hidden).chunk(2, -1)
        output: Tensor = self.output_linear(F.silu(gate) * up)
        return output


class Layer(nn.Module):
    """A mixer or attention, then an MLP, both with a scaled residual."""

    def __init__(self, size: Size, kind: str) -> None:
        super().__init__()
        self.kind, self.scale = kind, size.residual_multiplier
        self.input_layernorm = RMSNorm(size.hidden, size.eps)
        self.post_attention_layernorm = RMSNorm(size.hidden, size.eps)
        if kind == "mamba":
            self.mamba = Mamba2(size)
        else:
            self.self_attn = Attention(size)
        self.shared_mlp = MLP(size)

    def forward(self, x: Tensor) -> Tensor:
        mixer = self.mamba if self.kind == "mamba" else self.self_attn
        x = x + self.scale * mixer(self.input_layernorm(x))
        output: Tensor = self.shared_mlp(self.post_attention_layernorm(x))
        return x + self.scale * output


class Body(nn.Module):
    """The modules whose parameters' names begin with `model.` in Hugging Face's checkpoints."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(size.vocab, size.hidden)
        self.layers = nn.ModuleList(Layer(size, kind) for kind in size.layers)
        self.norm = RMSNorm(size.hidden, size.eps)


class DemoModel(nn.Module):
    """The whole model, from token ids, int64 [B, T], to logits, [B, T, vocab]. The embedding is also the head.

    B: chats. T: tokens, any number.
    """

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.model = Body(size)
        nn.init.normal_(self.model.embed_tokens.weight, std=size.hidden**-0.5)
        for name, weight in self.named_parameters():
            if name.endswith(("proj.weight", "linear.weight")):
                nn.init.normal_(weight, std=weight.shape[1] ** -0.5)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        ids = F.pad(ids, (0, -length % self.size.chunk))
        x = self.model.embed_tokens(ids) * self.size.embedding_multiplier
        for layer in self.model.layers:
            x = layer(x)
        return F.linear(self.model.norm(x)[:, :length], self.model.embed_tokens.weight)
