"""The operations that are checked (CHECKED), timed and tuned (TIMED), by name; TOYS are all of them at tiny sizes."""

from collections.abc import Callable

import torch

from scripts.benchmarks.gpu.operation import Draw, Operation
from scripts.benchmarks.gpu.operations import (
    attention,
    delta,
    drafts,
    kda,
    mamba2,
    mixture,
    pointwise,
    quantized,
    sampling,
    short_conv,
)
from scripts.benchmarks.gpu.operations.attention import Heads
from scripts.benchmarks.gpu.operations.delta import DeltaNet
from scripts.benchmarks.gpu.operations.kda import KdaNet
from scripts.benchmarks.gpu.operations.mamba2 import Mixer
from scripts.benchmarks.gpu.operations.mixture import Mixture
from scripts.benchmarks.gpu.operations.short_conv import Convolution

Build = Callable[[Draw], Operation]
BF16 = torch.bfloat16


def _all(
    mixer: Mixer,
    net: DeltaNet,
    kimi: KdaNet,
    convolution: Convolution,
    heads: Heads,
    latents: Heads,
    experts: Mixture,
    lengths: list[int],
    rows: int,
    width: int,
    vocab: int,
) -> dict[str, Build]:
    """Return builders of operations at these sizes, by name. Together the operations launch every kernel.

    lengths: tokens of each packed prompt. rows: number of rows that decode.
    width: columns of a hidden state. vocab: size of the vocabulary.
    """
    build: dict[str, tuple[Callable[..., Operation], tuple[object, ...]]] = {
        "mixer_prefill": (mamba2.prefill, (mixer, lengths)),
        "mixer_prefill, bfloat16 states": (mamba2.prefill, (mixer, lengths, BF16)),
        "ssd": (mamba2.scan, (mixer, lengths)),
        "conv1d": (mamba2.convolve, (mixer, lengths)),
        "mixer_decode": (mamba2.decode, (mixer, rows)),
        "mixer_decode, bfloat16 states": (mamba2.decode, (mixer, rows, BF16)),
        "state_update": (mamba2.step, (mixer, rows)),
        "state_update, bfloat16 states": (mamba2.step, (mixer, rows, BF16)),
        "state_update, replayed": (mamba2.replayed, (mixer, rows)),
        "delta_prefill": (delta.prefill, (net, lengths)),
        "delta_prefill, bfloat16 states": (delta.prefill, (net, lengths, BF16)),
        "delta_decode": (delta.decode, (net, rows)),
        "delta_decode, bfloat16 states": (delta.decode, (net, rows, BF16)),
        "kda_prefill": (kda.prefill, (kimi, lengths)),
        "kda_prefill, bfloat16 states": (kda.prefill, (kimi, lengths, BF16)),
        "kda_decode": (kda.decode, (kimi, rows)),
        "kda_decode, bfloat16 states": (kda.decode, (kimi, rows, BF16)),
        "mixer_decode, drafts": (drafts.decode_mixer, (mixer, rows)),
        "delta_decode, drafts": (drafts.decode_delta, (net, rows)),
        "kda_decode, drafts": (drafts.decode_kda, (kimi, rows)),
        "short_conv_decode": (short_conv.decode, (convolution, rows)),
        "short_conv_decode, drafts": (short_conv.decode_with_drafts, (convolution, rows)),
        "gated_norm": (mamba2.norm, (mixer, sum(lengths))),
        "attention": (attention.attend, (heads, [(0, lengths[0]), (70, 20)], [5, 300])),
        "attention, decode": (attention.attend, (heads, [], [3 * row for row in range(rows)])),
        "attention, latents": (attention.attend, (latents, [(0, lengths[0]), (70, 20)], [5, 300])),
        "attention, latents by heads": (attention.attend_by_heads, (latents, 70, lengths[0])),
        "rotate_and_write": (attention.write, (heads, sum(lengths), True)),
        "write_latents": (attention.write_latents, (latents, sum(lengths))),
        "write_pages": (attention.write, (heads, sum(lengths), False)),
        "rotary": (attention.rotate, (heads, sum(lengths))),
        "rms_norm": (pointwise.norm, (sum(lengths), width)),
        "rms_norm, alone": (pointwise.norm, (rows, width, False)),
        "silu_multiply": (pointwise.silu_multiply, (sum(lengths), width)),
        "squared_relu": (pointwise.squared_relu, (sum(lengths), width)),
        "sigmoid_gate": (pointwise.sigmoid_gate, (sum(lengths), width)),
        "state_pool.copy": (pointwise.copy, (rows, 64 * width)),
        "state_pool.move": (pointwise.move, (rows, 64 * width)),
        "sample, greedy": (sampling.sample, (rows, vocab, "greedy")),
        "sample": (sampling.sample, (rows, vocab, "whole")),
        "sample, truncated": (sampling.sample, (rows, vocab, "truncated")),
        "adjusted": (sampling.adjusted, (rows, vocab)),
        "log_probabilities": (sampling.log_probabilities, (rows, vocab)),
        "int8": (quantized.project, (8, rows, width, 2 * width)),
        "int8, one row": (quantized.project, (8, 1, width, max(2 * width, 1100))),
        "int4": (quantized.project, (4, rows, width, 2 * width)),
        "int4, many rows": (quantized.project, (4, sum(lengths), width, 2 * width)),
        "int8, rows of it": (quantized.look_up, (8, rows, width, 2 * width)),
        "route": (mixture.route, (experts, sum(lengths), False)),
        "route, in groups": (mixture.route, (experts, rows, True)),
        "experts": (mixture.experts, (experts, rows)),
        "experts, many rows": (mixture.experts, (experts, sum(lengths))),
        "experts, int8": (mixture.experts, (experts, rows, 8)),
        "experts, int4": (mixture.experts, (experts, rows, 4)),
        "add_shared": (mixture.add_shared, (sum(lengths), width)),
    }
    return {name: _of(function, arguments) for name, (function, arguments) in build.items()}


def _of(function: Callable[..., Operation], arguments: tuple[object, ...]) -> Build:
    return lambda draw: function(draw, *arguments)


# Sizes that are not multiples of any block size of the kernels.
ODD = Mixture(35, 3, 71, 135, "silu_gated", 5)
SMALL = Mixture(6, 2, 40, 24, "silu_gated", 3)
KIMI = Heads(32, 1, 576, 512)
TOYS = _all(
    *(
        Mixer(2, 16, 1, 16),
        DeltaNet(2, 16, 1, 32),
        KdaNet(2, 16, 16),
        Convolution(40),
        Heads(4, 2, 16),
        Heads(4, 1, 300, 256),
        SMALL,
    ),
    *([70, 9], 3, 64, 300),
)
CHECKED: dict[str, Build] = {
    **_all(
        *(Mixer(), DeltaNet(), KdaNet(), Convolution(), Heads(), KIMI, Mixture(64, 6, 1536, 512)),
        *([700, 3, 129], 37, 4096, 131_072),
    ),
    **{
        f"{name}, odd": build
        for name, build in _all(
            Mixer(6, 20, 2, 24, 3),
            DeltaNet(6, 20, 2, 24, 3),
            KdaNet(3, 20, 24, 3),
            Convolution(1000, 4),
            Heads(10, 2, 96),
            Heads(5, 1, 300, 250),
            ODD,
            [333, 1, 64],
            5,
            1130,
            50_257,
        ).items()
    },
    # More positions than are expanded at a time.
    "attention, latents by heads, two blocks": _of(attention.attend_by_heads, (KIMI, 8000, 700)),
}
TIMED: dict[str, Build] = {
    **{
        f"{name}, {rows} rows": _of(function, (Mixer(), rows, *more))
        for rows in (1, 32, 256)
        for name, function, more in [
            ("mixer_decode", mamba2.decode, ()),
            ("state_update", mamba2.step, ()),
            ("state_update, bfloat16 states", mamba2.step, (BF16,)),
            ("state_update, replayed", mamba2.replayed, ()),
            ("gated_norm", mamba2.norm, ()),
        ]
    },
    **{
        f"{name}, 8192 tokens, {groups} groups": _of(function, (Mixer(groups=groups), [8192]))
        for groups in (1, 8)
        for name, function in [("ssd", mamba2.scan), ("conv1d", mamba2.convolve), ("mixer_prefill", mamba2.prefill)]
    },
    # Nemotron Nano 9B v2: heads that are no power of two wide.
    "ssd, 8192 tokens, heads of 80": _of(mamba2.scan, (Mixer(128, 80, 8), [8192])),
    "mixer_decode, 32 rows, heads of 80": _of(mamba2.decode, (Mixer(128, 80, 8), 32)),
    **{f"delta_decode, {rows} rows": _of(delta.decode, (DeltaNet(), rows)) for rows in (1, 32, 256)},
    "delta_decode, bfloat16 states, 256 rows": _of(delta.decode, (DeltaNet(), 256, BF16)),
    **{f"kda_decode, {rows} rows": _of(kda.decode, (KdaNet(), rows)) for rows in (1, 32, 256)},
    "kda_decode, bfloat16 states, 256 rows": _of(kda.decode, (KdaNet(), 256, BF16)),
    **{f"mixer_decode, drafts, {rows} rows": _of(drafts.decode_mixer, (Mixer(), rows)) for rows in (1, 32)},
    **{f"delta_decode, drafts, {rows} rows": _of(drafts.decode_delta, (DeltaNet(), rows)) for rows in (1, 32)},
    **{f"kda_decode, drafts, {rows} rows": _of(drafts.decode_kda, (KdaNet(), rows)) for rows in (1, 32)},
    **{f"short_conv_decode, {rows} rows": _of(short_conv.decode, (Convolution(), rows)) for rows in (1, 32, 256)},
    "delta_prefill, 8192 tokens": _of(delta.prefill, (DeltaNet(), [8192])),
    "delta_prefill, 16 prompts of 512": _of(delta.prefill, (DeltaNet(), [512] * 16)),
    "kda_prefill, 8192 tokens": _of(kda.prefill, (KdaNet(), [8192])),
    "kda_prefill, 16 prompts of 512": _of(kda.prefill, (KdaNet(), [512] * 16)),
    "ssd, 16 prompts of 512": _of(mamba2.scan, (Mixer(), [512] * 16)),
    "gated_norm, 8192 rows": _of(mamba2.norm, (Mixer(), 8192)),
    "attention, 8192 tokens": _of(attention.attend, (Heads(), [(0, 8192)])),
    "attention, heads of 64": _of(attention.attend, (Heads(32, 8, 64), [(0, 8192)])),
    "attention, decode 1 after 32768": _of(attention.attend, (Heads(), [], [32768])),
    "attention, decode 32 after 8192": _of(attention.attend, (Heads(), [], [8192] * 32)),
    "attention, decode 256 after 1024": _of(attention.attend, (Heads(), [], [1024] * 256)),
    "attention, 8192 tokens of latents": _of(attention.attend, (KIMI, [(0, 8192)])),
    "attention, 8192 tokens of latents by heads": _of(attention.attend_by_heads, (KIMI, 0, 8192)),
    "attention, 512 tokens of latents after 65536": _of(attention.attend, (KIMI, [(65_536, 512)])),
    "attention, 512 tokens of latents after 65536 by heads": _of(attention.attend_by_heads, (KIMI, 65_536, 512)),
    "attention, decode 1 after 32768 latents": _of(attention.attend, (KIMI, [], [32768])),
    "attention, decode 32 after 8192 latents": _of(attention.attend, (KIMI, [], [8192] * 32)),
    "rotate_and_write, 8192 tokens": _of(attention.write, (Heads(), 8192, True)),
    "write_latents, 8192 tokens": _of(attention.write_latents, (KIMI, 8192)),
    "rotary, 8192 tokens": _of(attention.rotate, (Heads(), 8192)),
    **{f"rms_norm, {rows} rows": _of(pointwise.norm, (rows, 4096)) for rows in (1, 256, 8192)},
    "silu_multiply, 8192 rows": _of(pointwise.silu_multiply, (8192, 14_336)),
    "squared_relu, 8192 rows": _of(pointwise.squared_relu, (8192, 21_504)),
    "sigmoid_gate, 8192 rows": _of(pointwise.sigmoid_gate, (8192, 4096)),
    "state_pool.copy, 8 of 100 MiB": _of(pointwise.copy, (8, 100 * 2**20)),
    **{
        f"sample, {kind}, {rows} rows": _of(sampling.sample, (rows, 131_072, kind))
        for kind in ("greedy", "whole", "truncated")
        for rows in (1, 256)
    },
    "adjusted, 256 rows": _of(sampling.adjusted, (256, 131_072)),
    "log_probabilities, 256 rows": _of(sampling.log_probabilities, (256, 131_072)),
    **{
        f"int{bits}, {rows} rows": _of(quantized.project, (bits, rows, 4096, 21_504))
        for bits in (8, 4)
        for rows in (1, 32, 512)
    },
    **{f"route, {rows} rows": _of(mixture.route, (Mixture(), rows, True)) for rows in (1, 32, 8192)},
    **{f"experts, {rows} rows": _of(mixture.experts, (Mixture(), rows)) for rows in (1, 32, 256, 8192)},
    "experts, int8, 32 rows": _of(mixture.experts, (Mixture(), 32, 8)),
    "add_shared, 8192 rows": _of(mixture.add_shared, (8192, 2688)),
}
