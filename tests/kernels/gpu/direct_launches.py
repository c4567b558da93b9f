"""Launches of compiled kernels, with a driver that only records what it is given. test_direct_launches.py runs this."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton import language as tl

from baton.kernels.runtime.triton import KernelConfig, Launch, direct, launch, watched
from baton.kernels.runtime.triton.jit import jit
from scripts.benchmarks.gpu.fake_driver import fake_driver
from scripts.benchmarks.gpu.operation import Draw
from scripts.benchmarks.gpu.operations.listed import TOYS

CONFIG = KernelConfig({"BLOCK": 16}, warps=1, stages=2)
RATIO = 5.5
"""A direct launch may take this many times as long as a loop that only reads each argument.

It takes 3.4 times as long, and Triton's own launch 7 times.
"""


@jit
def _copy(
    x_ptr,
    bias_ptr,
    y_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    d_ptr,
    e_ptr,
    f_ptr,
    g_ptr,
    h_ptr,
    rows,
    scale,
    WIDTH: tl.constexpr,
    ROW: tl.constexpr,
    SLOT: tl.constexpr,
    HEADS: tl.constexpr,
    STATE: tl.constexpr,
    GROUPS: tl.constexpr,
    KERNEL: tl.constexpr,
    B_ROW: tl.constexpr,
    C_ROW: tl.constexpr,
    IS_GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy, with as many parameters as a scan has."""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + columns, columns < WIDTH + rows, other=0.0) * scale
    if bias_ptr is not None:
        x += tl.load(bias_ptr + columns)
    tl.store(y_ptr + columns, x, columns < WIDTH)


NAMES = ("WIDTH", "ROW", "SLOT", "HEADS", "STATE", "GROUPS", "KERNEL", "B_ROW", "C_ROW")
CONSTANTS = {**{name: 40 + number for number, name in enumerate(NAMES)}, "IS_GATED": True}


def arguments(dtype: torch.dtype = torch.float32, bias: bool = False, rows: int = 3) -> tuple[Any, ...]:
    x = torch.zeros(64, dtype=dtype)
    return x, torch.zeros(64) if bias else None, torch.zeros(64), *[x] * 8, rows, 0.5


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """Record what each launch gives to the driver, with pointers as numbers, and without metadata and hooks."""
    monkeypatch.setattr(direct, "_compiled", {})
    calls = list[tuple[Any, ...]]()

    def on_launch(*inputs: Any) -> None:
        grid, stream, function, metadata, rest = inputs[:3], inputs[3], inputs[4], inputs[5], inputs[9:]
        if inputs[7] is not None:
            inputs[7](inputs[6])
        calls.append((grid, stream, function, metadata, *map(as_number, rest)))

    with fake_driver(on_launch):
        _copy.device_caches.clear()
        yield calls
    _copy.device_caches.clear()


def as_number(argument: Any) -> Any:
    return argument.data_ptr() if isinstance(argument, Tensor) else argument


def through_triton(*inputs: Any, config: KernelConfig = CONFIG, **constants: Any) -> None:
    options = {"num_warps": config.warps, "num_stages": config.stages}
    _copy[(2, 5)](*inputs, **constants, **config.blocks, **options)


@pytest.mark.parametrize("bias", [False, True])
def test_a_later_launch_gives_the_driver_what_triton_would(recorded: list[tuple[Any, ...]], bias: bool) -> None:
    launch(_copy, (2, 5), *arguments(), config=CONFIG, **CONSTANTS)
    launch(_copy, (2, 5), *arguments(bias=True), config=CONFIG, **CONSTANTS)
    inputs = arguments(bias=bias)
    launch(_copy, (2, 5), *inputs, config=CONFIG, **CONSTANTS)
    through_triton(*inputs, **CONSTANTS)
    assert recorded[2] == recorded[3] and recorded[2][0] == (2, 5, 1) and recorded[2][2] == 1 + bias


def test_everything_that_needs_another_variant_gets_it(recorded: list[tuple[Any, ...]]) -> None:
    """Each of these launches twice what Triton launches for the same arguments; all of them differ."""
    unaligned = torch.zeros(65)[1:]
    variants: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        (arguments(), {}),
        (arguments(bias=True), {}),
        (arguments(torch.bfloat16), {}),
        (arguments(rows=2**31), {}),
        (arguments(), {"WIDTH": 50}),
        (arguments(), {"config": KernelConfig({"BLOCK": 32}, 1, 2)}),
        (arguments(), {"config": KernelConfig({"BLOCK": 16}, 2, 2)}),
        ((unaligned, *arguments()[1:]), {}),
    ]
    functions = list[set[int]]()
    for inputs, different in variants:
        chosen = {**CONSTANTS, "config": CONFIG, **different}
        for run in (lambda *of, **how: launch(_copy, (2, 5), *of, **how), through_triton) * 2:
            run(*inputs, **chosen)
        assert len(set(recorded[-4:])) == 1
        functions.append({call[2] for call in recorded[-4:]})
    assert functions == [{number} for number in range(1, len(variants) + 1)]


def test_an_unaligned_tensor_after_an_aligned_one_takes_its_own_variant(recorded: list[tuple[Any, ...]]) -> None:
    inputs = arguments()
    for x in (inputs[0], torch.zeros(65)[1:], inputs[0]):
        launch(_copy, (2,), x, *inputs[1:], config=CONFIG, **CONSTANTS)
    assert [call[2] for call in recorded] == [1, 2, 1]


def test_a_profiler_gets_every_launch(recorded: list[tuple[Any, ...]]) -> None:
    found = list[Any]()
    for number in range(3):
        if number == 1:
            triton.knobs.runtime.launch_enter_hook.add(found.append)
        launch(_copy, (2,), *arguments(), config=CONFIG, **CONSTANTS)
    triton.knobs.runtime.launch_enter_hook.remove(found.append)
    launch(_copy, (2,), *arguments(), config=CONFIG, **CONSTANTS)
    assert len(recorded) == 4 and [each.get()["name"] for each in found] == ["_copy"] * 2


@pytest.mark.usefixtures("recorded")
def test_a_direct_launch_costs_little_more_than_reading_its_arguments() -> None:
    """Compare with a loop in the same process, because the time of either depends on the machine."""
    inputs = arguments()

    def reading() -> None:
        for argument in inputs:
            if isinstance(argument, Tensor):
                argument.data_ptr(), argument.dtype

    with fake_driver(lambda *_: None):
        _copy.device_caches.clear()
        launch(_copy, (2,), *inputs, config=CONFIG, **CONSTANTS)
        assert seconds(lambda: launch(_copy, (2,), *inputs, config=CONFIG, **CONSTANTS)) < RATIO * seconds(reading)


def seconds(run: Callable[[], None]) -> float:
    """Return the least processor time of ten calls."""
    times = list[float]()
    for _ in range(30):
        begin = time.thread_time()
        for _ in range(10):
            run()
        times.append(time.thread_time() - begin)
    return min(times)


@pytest.mark.parametrize("name", TOYS)
def test_a_known_shape_makes_no_candidates(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second call with the same shape on, no operation makes configurations to choose from."""
    operation, launches, made = TOYS[name](Draw(torch.device("meta"))), list[Launch](), list[KernelConfig]()
    initialize = KernelConfig.__init__

    def counted(self: KernelConfig, *of: Any, **how: Any) -> None:
        made.append(self)
        initialize(self, *of, **how)

    with watched(launches.append):
        operation.run(*operation.inputs)
        monkeypatch.setattr(KernelConfig, "__init__", counted)
        operation.run(*operation.inputs)
    half = len(launches) // 2
    assert made == [] and half > 0
    assert all(one.config is other.config for one, other in zip(launches[:half], launches[half:], strict=True))
