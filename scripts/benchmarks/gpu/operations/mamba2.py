"""Operations of a Mamba-2 mixer: the whole mixer, its convolution, scan, state update and gated norm."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import ModuleType

import torch
from torch import Tensor

from baton.kernels.conv1d import reference as conv1d
from baton.kernels.mamba2.constants import MixerConstants
from baton.kernels.mamba2.decode import reference as mixer_decode
from baton.kernels.mamba2.prefill import reference as mixer_prefill
from baton.kernels.mamba2.ssd import reference as ssd
from baton.kernels.mamba2.state_update import reference as state_update, replay
from baton.kernels.norm.gated import reference as gated_norm
from baton.kernels.prefill.plan import PrefillPlan, plan_prefill
from scripts.benchmarks.gpu.operation import Draw, Operation, bytes_of

LIMITS = (0.0, float("inf"))
WINDOW = 16  # steps between two writes of a state; their inputs are kept


@dataclass(frozen=True)
class Mixer:
    """The sizes of a mixer."""

    heads: int = 128
    width: int = 64  # columns of a head
    groups: int = 8  # groups of heads that share B and C
    state: int = 128
    kernel: int = 4  # width of the convolution

    @property
    def inner(self) -> int:
        return self.heads * self.width

    @property
    def channels(self) -> int:
        return self.inner + 2 * self.groups * self.state

    def pools(self, draw: Draw, slots: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the pools of convolution inputs and of states: strided views, because a slot holds two layers."""
        states = draw.normal(slots, 2, self.heads, self.width, self.state, dtype=dtype)[:, 1]
        conv = draw.normal(slots, 2, self.kernel - 1, self.channels, dtype=torch.float32)[:, 1]
        return conv, states

    def constants(self, draw: Draw) -> tuple[Tensor, ...]:
        """Return the constants that `named` takes: taps, conv_bias, dt_bias, A, D, norm."""
        return (
            draw.uniform(-0.5, 0.5, self.kernel, self.channels),
            draw.uniform(-0.5, 0.5, self.channels),
            draw.uniform(-6.0, -2.0, self.heads),
            draw.uniform(-16.0, -1.0, self.heads),
            draw.uniform(0.5, 1.5, self.heads),
            draw.uniform(0.5, 1.5, self.inner),
        )

    def named(self, constants: Sequence[Tensor]) -> MixerConstants:
        taps, conv_bias, dt_bias, A, D, norm = constants
        return MixerConstants(taps, conv_bias, dt_bias, A, D, norm, self.groups, 1e-5, LIMITS)

    def parts(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return views of x, B and C in the output of the convolution."""
        x, B, C = torch.split(convolved, [self.inner, self.groups * self.state, self.groups * self.state], 1)
        groups = self.groups, self.state
        x = torch.unflatten(x, 1, (self.heads, self.width))
        return x, torch.unflatten(B, 1, groups), torch.unflatten(C, 1, groups)


def plans(
    lengths: Sequence[int], kernel: int, device: torch.device, chunk_size: int = 128
) -> tuple[PrefillPlan, PrefillPlan]:
    """Plan the prefill of whole prompts, once for `device` and once for a CPU.

    Prompt i has its state in slot 2i + 1, and a checkpoint at half its length in slot 2i.
    """
    offsets, rows = [0, *accumulate(lengths)], range(len(lengths))
    saved = [(row, length // 2, 2 * row) for row, length in enumerate(lengths) if length > 1]
    layout = (offsets, [0] * len(lengths), [2 * row + 1 for row in rows], saved, chunk_size, kernel)
    return plan_prefill(*layout, device), plan_prefill(*layout, torch.device("cpu"))


def prefill(draw: Draw, mixer: Mixer, lengths: Sequence[int], states: torch.dtype = torch.float32) -> Operation:
    """Build a call of the whole mixer on packed prompts."""
    from baton.kernels.mamba2.prefill import triton

    here, on_cpu = plans(lengths, mixer.kernel, draw.device)
    projected = draw.normal(sum(lengths), mixer.inner + mixer.channels + mixer.heads)
    conv, pool = mixer.pools(draw, 2 * len(lengths), states)

    def run(projected: Tensor, conv: Tensor, pool: Tensor, *constants: Tensor) -> Sequence[Tensor]:
        return triton.mixer_prefill(projected, mixer.named(constants), conv, pool, here), conv, pool

    def exact(projected: Tensor, conv: Tensor, pool: Tensor, *constants: Tensor) -> Sequence[Tensor]:
        return mixer_prefill.mixer_prefill(projected, mixer.named(constants), conv, pool, on_cpu), conv, pool

    moved = bytes_of(projected, pool) + sum(lengths) * mixer.inner * projected.element_size()
    return Operation(run, exact, (projected, conv, pool, *mixer.constants(draw)), moved, scan_flops(mixer, lengths))


def scan(draw: Draw, mixer: Mixer, lengths: Sequence[int], states: torch.dtype = torch.float32) -> Operation:
    """Build a call of the scan (SSD) alone. The kernel itself applies bias and softplus to dt."""
    from baton.kernels.mamba2.ssd import triton

    here, on_cpu = plans(lengths, mixer.kernel, draw.device)
    tokens = sum(lengths)
    convolved, dt = draw.normal(tokens, mixer.channels), draw.normal(tokens, mixer.heads)
    pool = mixer.pools(draw, 2 * len(lengths), states)[1]
    _, _, dt_bias, A, D, _ = mixer.constants(draw)

    def run(convolved: Tensor, dt: Tensor, pool: Tensor, *rest: Tensor) -> Sequence[Tensor]:
        (x, B, C), (dt_bias, A, D) = mixer.parts(convolved), rest
        return triton.ssd_prefill(x, dt, A, B, C, D, pool, here.table, dt_bias=dt_bias, dt_limits=LIMITS), pool

    def exact(convolved: Tensor, dt: Tensor, pool: Tensor, *rest: Tensor) -> Sequence[Tensor]:
        (x, B, C), (dt_bias, A, D) = mixer.parts(convolved), rest
        dt = torch.nn.functional.softplus(dt + dt_bias)
        return ssd.ssd_prefill(x, dt, A, B, C, D, pool, on_cpu.chunks), pool

    moved = bytes_of(convolved, dt, pool) + tokens * mixer.inner * convolved.element_size()
    return Operation(run, exact, (convolved, dt, pool, dt_bias, A, D), moved, scan_flops(mixer, lengths))


def scan_flops(mixer: Mixer, lengths: Sequence[int], chunk: int = 64) -> int:
    """Count the floating-point operations in chunks: C·B for each group; scores·x, C·state and B·x for each head."""
    of_token = mixer.groups * chunk * mixer.state + mixer.inner * (chunk + 2 * mixer.state)
    return 2 * of_token * sum(lengths)


def convolve(draw: Draw, mixer: Mixer, lengths: Sequence[int]) -> Operation:
    """Build a call of the convolution on packed prompts."""
    from baton.kernels.conv1d import triton

    here, on_cpu = plans(lengths, mixer.kernel, draw.device)
    x, pool = draw.normal(sum(lengths), mixer.channels), mixer.pools(draw, 2 * len(lengths), torch.float32)[0]
    taps, bias, *_ = mixer.constants(draw)

    def run(x: Tensor, pool: Tensor, taps: Tensor, bias: Tensor) -> Sequence[Tensor]:
        return triton.conv1d_prefill(x, taps, bias, pool, here.table), pool

    def exact(x: Tensor, pool: Tensor, taps: Tensor, bias: Tensor) -> Sequence[Tensor]:
        return conv1d.conv1d_prefill(x, taps, bias, pool, on_cpu.conv), pool

    return Operation(run, exact, (x, pool, taps, bias), 2 * bytes_of(x))


def decode(draw: Draw, mixer: Mixer, rows: int, states: torch.dtype = torch.float32) -> Operation:
    """Build a call of the whole mixer with one token per row."""
    from baton.kernels.mamba2.decode import triton

    projected = draw.normal(rows, mixer.inner + mixer.channels + mixer.heads)
    conv, pool = mixer.pools(draw, rows + 1, states)
    slots, positions = draw.order(rows + 1)[:rows], draw.integers(10_000, rows)

    def run(projected: Tensor, conv: Tensor, pool: Tensor, *rest: Tensor) -> Sequence[Tensor]:
        slots, positions, *constants = rest
        return triton.mixer_decode(projected, mixer.named(constants), conv, pool, slots, positions), conv, pool

    def exact(projected: Tensor, conv: Tensor, pool: Tensor, *rest: Tensor) -> Sequence[Tensor]:
        slots, positions, *constants = rest
        return mixer_decode.mixer_decode(projected, mixer.named(constants), conv, pool, slots, positions), conv, pool

    inputs = (projected, conv, pool, slots, positions, *mixer.constants(draw))
    moved = bytes_of(projected) + 2 * rows * bytes_of(conv[0], pool[0]) + bytes_of(projected[:, : mixer.inner])
    return Operation(run, exact, inputs, moved)


def step(draw: Draw, mixer: Mixer, rows: int, states: torch.dtype = torch.float32) -> Operation:
    """Build a call of the state update alone."""
    from baton.kernels.mamba2.state_update import triton

    pool = mixer.pools(draw, rows + 1, states)[1]
    convolved, dt = draw.normal(rows, mixer.channels, dtype=torch.float32), draw.uniform(0.001, 0.1, rows, mixer.heads)
    slots, positions = draw.order(rows + 1)[:rows], draw.integers(10_000, rows)
    _, _, _, A, D, _ = mixer.constants(draw)

    def run(convolved: Tensor, dt: Tensor, pool: Tensor, *rest: Tensor) -> Sequence[Tensor]:
        (x, B, C), (slots, positions, A, D) = mixer.parts(convolved), rest
        return triton.selective_state_update(x, dt, A, B, C, D, pool, slots, positions), pool

    def exact(convolved: Tensor, dt: Tensor, pool: Tensor, *rest: Tensor) -> Sequence[Tensor]:
        (x, B, C), (slots, positions, A, D) = mixer.parts(convolved), rest
        return state_update.selective_state_update(x, dt, A, B, C, D, pool, slots, positions), pool

    moved = bytes_of(convolved, dt) + 2 * rows * bytes_of(pool[0]) + 4 * rows * mixer.inner
    return Operation(run, exact, (convolved, dt, pool, slots, positions, A, D), moved)


def replayed(draw: Draw, mixer: Mixer, rows: int) -> Operation:
    """Build a call of the state update that replays kept inputs, then a flush. Rows are at random steps of a window."""
    from baton.kernels.mamba2.state_update import triton_replay

    pool, convolved = (
        mixer.pools(draw, rows + 1, torch.float32)[1],
        draw.normal(rows, mixer.channels, dtype=torch.float32),
    )
    dt, slots = draw.uniform(0.001, 0.1, rows, mixer.heads), draw.order(rows + 1)[:rows]
    positions, places = draw.integers(1000, rows) + WINDOW, draw.order(rows)
    window = (
        draw.normal(rows, WINDOW, mixer.heads, mixer.width, dtype=torch.float32),
        draw.uniform(0.9, 1.0, rows, WINDOW, mixer.heads),
        draw.normal(rows, WINDOW, mixer.groups, mixer.state, dtype=torch.float32),
    )
    _, _, _, A, D, _ = mixer.constants(draw)

    def by(module: ModuleType) -> Callable[..., Sequence[Tensor]]:
        def run(convolved: Tensor, dt: Tensor, pool: Tensor, *rest: Tensor) -> Sequence[Tensor]:
            (x, B, C), (A, D, slots, positions, places, *window) = mixer.parts(convolved), rest
            ring, starts = replay.InputRing(*window), torch.zeros_like(positions)
            where = pool, slots, positions, ring, places, starts
            y = module.replay_state_update(x, dt, A, B, C, D, *where)
            module.flush(pool, slots, positions + 1, ring, places, starts)
            return y, pool

        return run

    moved = bytes_of(convolved, dt) + rows * bytes_of(pool[0]) + 4 * rows * mixer.inner + bytes_of(*window) // 2
    return Operation(
        by(triton_replay), by(replay), (convolved, dt, pool, A, D, slots, positions, places, *window), moved
    )


def norm(draw: Draw, mixer: Mixer, rows: int) -> Operation:
    """Build a call of the gated norm."""
    from baton.kernels.norm.gated import triton

    x, gate = draw.normal(rows, mixer.inner), draw.normal(rows, 2 * mixer.inner)[:, : mixer.inner]
    weight = draw.uniform(0.5, 1.5, mixer.inner)

    def run(x: Tensor, gate: Tensor, weight: Tensor) -> Sequence[Tensor]:
        return (triton.gated_norm(x, gate, weight, 1e-5, mixer.groups, dtype=x.dtype),)

    def exact(x: Tensor, gate: Tensor, weight: Tensor) -> Sequence[Tensor]:
        return (gated_norm.gated_norm(x, gate, weight, 1e-5, mixer.groups),)

    return Operation(run, exact, (x, gate, weight), 3 * bytes_of(x))
