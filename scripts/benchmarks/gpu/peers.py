"""Kernels of other projects, if installed, at the sizes of Baton's. docs/gpu.md says how to install the projects."""

import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch
from torch.nn import functional as F

from scripts.benchmarks.gpu.operations.attention import Heads
from scripts.benchmarks.gpu.operations.delta import DeltaNet
from scripts.benchmarks.gpu.operations.kda import KdaNet
from scripts.benchmarks.gpu.operations.mamba2 import Mixer
from scripts.benchmarks.gpu.timing import Run

BF16 = torch.bfloat16
# Timed operations of Baton (operations/listed.py) that other projects have too: their names and sizes.
PROMPTS = {"ssd, 8192 tokens, 1 groups": Mixer(groups=1), "ssd, 8192 tokens, 8 groups": Mixer(groups=8)}
STEPS = {f"state_update, {rows} rows": rows for rows in (1, 32, 256)}
RULES = {"delta_prefill, 8192 tokens": DeltaNet(), "delta_prefill, 16 prompts of 512": DeltaNet()}
KDA_RULES = {"kda_prefill, 8192 tokens": KdaNet()}
ATTENTION = {"attention, 8192 tokens": Heads(), "attention, heads of 64": Heads(32, 8, 64)}


@cache
def from_mamba_ssm(name: str) -> ModuleType | None:
    """Import a module of mamba_ssm's Triton kernels, or return None.

    The package's __init__ is not run, because it needs a compiled extension.
    """
    spec = find_spec("mamba_ssm")
    if spec is None or not spec.submodule_search_locations:
        return None
    if "mamba_ssm" not in sys.modules:
        package = ModuleType("mamba_ssm")
        package.__spec__, package.__path__ = spec, list(spec.submodule_search_locations)
        sys.modules["mamba_ssm"] = package
    try:
        return import_module(f"mamba_ssm.ops.triton.{name}")
    except ImportError as error:
        print(f"mamba_ssm: {error}")
        return None


def mamba_ssm(name: str, device: torch.device) -> Run | None:
    if name in PROMPTS and (module := from_mamba_ssm("ssd_combined")):
        return _scan(module, PROMPTS[name], device)
    if name in STEPS and (module := from_mamba_ssm("selective_state_update")):
        return _step(module, STEPS[name], device)
    return None


def _scan(module: ModuleType, mixer: Mixer, device: torch.device, tokens: int = 8192) -> Run:
    x = torch.randn(1, tokens, mixer.heads, mixer.width, dtype=BF16, device=device)
    dt = torch.randn(1, tokens, mixer.heads, dtype=BF16, device=device)
    B, C = torch.randn(2, 1, tokens, mixer.groups, mixer.state, dtype=BF16, device=device)
    A, D, bias = torch.rand(3, mixer.heads, device=device)
    more = {"D": D, "dt_bias": bias - 4, "dt_softplus": True, "return_final_states": True}
    return lambda: module.mamba_chunk_scan_combined(x, dt, -A - 1, B, C, chunk_size=256, **more)


def _step(module: ModuleType, rows: int, device: torch.device) -> Run:
    mixer = Mixer()
    state = torch.randn(rows, mixer.heads, mixer.width, mixer.state, device=device)
    x = torch.randn(rows, mixer.heads, mixer.width, dtype=BF16, device=device)
    dt = torch.randn(rows, mixer.heads, 1, dtype=BF16, device=device).expand(-1, -1, mixer.width)
    B, C = torch.randn(2, rows, mixer.groups, mixer.state, dtype=BF16, device=device)
    A, D, bias = torch.rand(3, mixer.heads, 1, device=device)
    A = (-A - 1)[..., None].expand(-1, mixer.width, mixer.state)
    D, bias = D.expand(-1, mixer.width), (bias - 4).expand(-1, mixer.width)
    return lambda: module.selective_state_update(state, x, dt, A, B, C, D, dt_bias=bias, dt_softplus=True)


def fla(name: str, device: torch.device) -> Run | None:
    """Return a call of fla's simple GLA: the same recurrence as Mamba-2's, but each head has its own B and C."""
    if name not in PROMPTS or find_spec("fla") is None:
        return None
    module, mixer = import_module("fla.ops.simple_gla"), PROMPTS[name]
    B, C = torch.randn(2, 1, 8192, mixer.heads, mixer.state, dtype=BF16, device=device)
    x = torch.randn(1, 8192, mixer.heads, mixer.width, dtype=BF16, device=device)
    decays = -torch.rand(1, 8192, mixer.heads, device=device) - 0.1
    return lambda: module.chunk_simple_gla(C, B, x, decays, scale=1.0, output_final_state=True)


def fla_rule(name: str, device: torch.device) -> Run | None:
    """Return a call of fla's gated delta rule or KDA alone: Baton's operation also has the convolution and the norm."""
    if find_spec("fla") is None or name not in RULES | KDA_RULES:
        return None
    if name in KDA_RULES:
        kimi, module = KDA_RULES[name], import_module("fla.ops.kda")
        q, k, v = torch.randn(3, 1, 8192, kimi.heads, kimi.size, dtype=BF16, device=device)
        gates = -torch.rand(1, 8192, kimi.heads, kimi.size, device=device) - 0.01
        beta = torch.rand(1, 8192, kimi.heads, dtype=BF16, device=device)
        return lambda: module.chunk_kda(q, k, v, gates, beta, output_final_state=True, use_qk_l2norm_in_kernel=True)
    net, module = RULES[name], import_module("fla.ops.gated_delta_rule")
    q, k = torch.randn(2, 1, 8192, net.key_heads, net.size, dtype=BF16, device=device)
    v = torch.randn(1, 8192, net.heads, net.width, dtype=BF16, device=device)
    decays = -torch.rand(1, 8192, net.heads, device=device) - 0.01
    beta = torch.rand(1, 8192, net.heads, dtype=BF16, device=device)
    ends = torch.arange(0, 8193, 512, device=device) if "16 prompts" in name else None
    more = {"output_final_state": True, "use_qk_l2norm_in_kernel": True, "cu_seqlens": ends}
    return lambda: module.chunk_gated_delta_rule(q, k, v, decays, beta, **more)


def torch_attention(name: str, device: torch.device) -> Run | None:
    """Return a call of torch's attention, on keys and values without pages."""
    if name not in ATTENTION:
        return None
    query, keys, values = (each.transpose(0, 1)[None] for each in _unpaged(ATTENTION[name], device))
    return lambda: F.scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=True)


def flashinfer(name: str, device: torch.device) -> Run | None:
    """Return a call of flashinfer's prefill, on keys and values without pages."""
    if name not in ATTENTION or find_spec("flashinfer") is None:
        return None
    module = import_module("flashinfer")
    query, keys, values = _unpaged(ATTENTION[name], device)
    return lambda: module.single_prefill_with_kv_cache(query, keys, values, causal=True)


def _unpaged(heads: Heads, device: torch.device, tokens: int = 8192) -> tuple[torch.Tensor, ...]:
    counts = (heads.heads, heads.kv_heads, heads.kv_heads)
    return tuple(torch.randn(tokens, count, heads.width, dtype=BF16, device=device) for count in counts)


PEERS: dict[str, Callable[[str, torch.device], Run | None]] = {
    "mamba_ssm": mamba_ssm,
    "fla": fla,
    "fla, the rule alone": fla_rule,
    "sdpa": torch_attention,
    "flashinfer": flashinfer,
}
