"""Copies in host memory: in one piece or in the lines of an arena, and converted from pages to tokens and back."""

import mmap
import os
import random
import resource
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from baton.actors.cache.below.limits import TierLimits
from baton.actors.storage.arena import Arena
from baton.actors.storage.host_memory import HostState, HostStates
from baton.actors.storage.lines import HostLines
from baton.models.batch import Pools, TensorSpec, stretches
from tests.actors.storage.host import PAGE, arena_of, buffer

CPU = torch.device("cpu")
SPECS = [
    TensorSpec((PAGE, 3, 2), torch.float32),
    TensorSpec((PAGE, 5), torch.bfloat16),
    TensorSpec((PAGE,), torch.int8),
]
STATE_BYTES, PAGE_BYTES = 960, 192  # as `stretches` aligns them
LINES = HostLines(2 * PAGE_BYTES, STATE_BYTES, PAGE_BYTES)  # a state takes two lines and a half


def pools_and_host(arena: Arena | None = None) -> tuple[Pools, HostStates]:
    slots, state = stretches(1, [TensorSpec((STATE_BYTES // 4,), torch.float32)], CPU)
    blocks, pages = stretches(4, SPECS, CPU)
    pools, host = Pools(slots, blocks, state, pages, PAGE), HostStates(arena)
    host.use(pools, buffer)
    return pools, host


def put_in(parts: tuple[Tensor, ...], whole: Tensor) -> None:
    """Copy the beginning of `whole` to consecutive parts."""
    begin = 0
    for part in parts:
        part.copy_(whole[begin : begin + len(part)])
        begin += len(part)


def spans(copy: HostState) -> list[tuple[int, int]]:
    """Return where the memory of a copy begins and ends, for each of its parts."""
    return [(part.data_ptr(), part.data_ptr() + part.nbytes) for part in (*copy.state, *copy.blocks)]


def is_of(arena: Arena, copy: HostState) -> bool:
    """Return whether all of a copy's memory is the arena's."""
    return all(arena.contains(begin, end - begin) for begin, end in spans(copy))


@pytest.mark.parametrize("in_lines", [False, True])
@pytest.mark.parametrize("position", [0, 1, 2, 5, 8])
def test_the_kv_by_token_is_that_of_the_pages_and_back(position: int, in_lines: bool) -> None:
    arena = arena_of(LINES, 7, 3) if in_lines else None
    pools, host = pools_and_host(arena)
    generator = torch.Generator().manual_seed(position)
    for tensor in (*pools.pages, *pools.state):
        tensor.copy_(torch.randint(-100, 100, tensor.shape, generator=generator))
    copy = host.room(position)
    assert (sum(map(len, copy.state)), sum(map(len, copy.blocks))) == (STATE_BYTES, -(-position // PAGE))
    assert len(copy.state) == (3 if in_lines else 1)
    put_in(copy.state, pools.slots[0])
    put_in(copy.blocks, pools.blocks)
    kv = host.kv_of(copy)
    for found, tensor in zip(kv, pools.pages, strict=True):
        assert torch.equal(found, tensor.flatten(0, 1)[:position]) and found.dtype == tensor.dtype
    again = host.from_kv(position, pools.slots[0], kv)
    for each in (copy, again):
        assert each.position == position and torch.equal(host.state_of(each), pools.slots[0])
        assert arena is None or is_of(arena, each)
    for found, brought in zip(kv, host.kv_of(again), strict=True):
        assert torch.equal(found, brought)


@pytest.mark.parametrize(
    ("state", "page"),
    [(960, 192), (64, 2**14), (145 * 2**20, 2**18), (19 * 2**20 + 64, 0), (3 * 2**18, 2**13 + 64), (2**21, 2**20)],
)
def test_lines_hold_whole_pages_and_waste_an_eighth_of_a_copy_at_most(state: int, page: int) -> None:
    lines = HostLines.fitting(state, page)
    assert lines.nbytes % 64 == 0 and lines.nbytes >= page
    assert lines.state * lines.nbytes < state + max(state // 8, page, 64)
    if page:
        assert 0 <= lines.nbytes - lines.pages * page < 64 and lines.nbytes <= max(state // 4, page)
    for pages in (0, 1, 7, 1000) if page else (0,):
        assert state + pages * page <= lines.count(pages) * lines.nbytes
        assert lines.count(pages) * lines.nbytes < state + pages * page + max(state // 8, page, 64) + lines.nbytes


def test_copies_whose_bytes_are_within_the_limit_fit_however_often_others_were_freed() -> None:
    """The cache decides by bytes alone which copies fit. So no free line may be of no use to some copy."""
    draws = random.Random(0)
    arena = arena_of(LINES, 20, 9)
    _, host = pools_and_host(arena)
    limits = TierLimits(arena.nbytes, 0, STATE_BYTES, PAGE_BYTES // PAGE, page_size=PAGE, lines=LINES)
    positions = dict[int, int]()  # of the copies, by key
    for key in range(1000):
        position = draws.randrange(9)
        while sum(map(limits.memory_bytes, [*positions.values(), position])) > limits.host_bytes:
            dropped = draws.choice(list(positions))
            del positions[dropped]
            host.drop(dropped)
        copy = host.room(position)
        assert is_of(arena, copy)
        host.put(key, copy)
        positions[key] = position
        del copy
    used = sorted(span for key in positions for span in spans(host.get(key)))
    assert all(end <= begin for (_, end), (begin, _) in pairwise(used)), "no two copies overlap"
    host.clear()
    assert arena.free_lines == 29


def test_memory_is_reused_only_when_nothing_is_left_that_reads_it() -> None:
    arena = arena_of(LINES, 4)
    _, host = pools_and_host(arena)
    copy = host.room(1)
    part = copy.blocks[0][:, 3:5].view(-1)
    assert arena.free_lines == 0
    host.put(1, copy)
    host.drop(1)
    assert arena.free_lines == 0
    del copy
    assert arena.free_lines == 3
    del part
    assert arena.free_lines == 4


def test_memory_that_was_used_before_is_reused_first() -> None:
    arena = arena_of(LINES, 40)
    _, host = pools_and_host(arena)
    first = host.room(2)
    places = {begin for begin, _ in spans(first)}
    del first
    assert {begin for begin, _ in spans(host.room(2))} == places


def test_a_copy_beyond_the_arena_takes_ordinary_memory_and_locks_none() -> None:
    arena = arena_of(LINES, 3)
    pools, host = pools_and_host(arena)

    def refuse(nbytes: int) -> Tensor:
        raise AssertionError("this would be page-locked")

    host.use(pools, refuse)
    first, second = host.room(0), host.room(5)
    assert is_of(arena, first) and not is_of(arena, second)
    assert [part.shape for part in (*second.state, *second.blocks)] == [(STATE_BYTES,), (3, PAGE_BYTES)]
    del first
    assert is_of(arena, host.room(0))


@pytest.mark.parametrize("ready", [0, 2, 6])
def test_no_line_is_lent_twice_if_threads_take_and_free_at_once(ready: int) -> None:
    arena = arena_of(LINES, 6)
    arena.keep_ready(ready)

    def use(thread: int) -> bool:
        sound = True
        for turn in range(300):
            if (lines := arena.take(2)) is not None:
                for line in lines:
                    line.fill_((thread * 31 + turn) % 251)
                sound &= all(bool((line == (thread * 31 + turn) % 251).all()) for line in lines)
            del lines
        return sound

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(use, range(4)))
    assert arena.free_lines == 6


def test_lines_that_are_kept_ready_have_their_memory() -> None:
    lines = HostLines(2**21, 2**21, 0)
    memory = mmap.mmap(-1, 8 * lines.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    arena = Arena(lines, [torch.frombuffer(memory, dtype=torch.uint8)])
    pages = lines.nbytes // mmap.PAGESIZE
    first, faults = written(arena)
    assert faults > pages // 2
    arena.keep_ready(3)
    until = time.monotonic() + 30
    while arena.ready_lines < 3:
        assert time.monotonic() < until
        time.sleep(0.001)
    second, faults = written(arena)
    assert faults < pages // 2 and first.data_ptr() != second.data_ptr()


@pytest.mark.parametrize("ready", [2, 6, 7])
def test_the_thread_that_keeps_lines_ready_ends_with_its_arena_or_its_work(ready: int) -> None:
    arena, before = arena_of(LINES, 6), set(threading.enumerate())

    def wait_until(is_over: Callable[[], bool]) -> None:
        until = time.monotonic() + 30
        while not is_over():
            assert time.monotonic() < until
            time.sleep(0.001)

    def started() -> set[threading.Thread]:
        return set(threading.enumerate()) - before

    arena.keep_ready(ready)
    wait_until(lambda: arena.ready_lines == min(ready, 6))
    if ready < 6:
        time.sleep(0.02)
        assert len(started()) == 1 and arena.ready_lines == ready, "it prepares more when these are taken"
        del arena
    wait_until(lambda: not started())


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of threads")
def test_the_thread_that_keeps_lines_ready_waits_for_others() -> None:
    arena, before = arena_of(LINES, 6), set(threading.enumerate())
    arena.keep_ready(2)
    until = time.monotonic() + 30
    while arena.ready_lines < 2:
        assert time.monotonic() < until
        time.sleep(0.001)
    [thread] = set(threading.enumerate()) - before
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, thread.native_id or 0) == min(own + 10, 19)


def written(arena: Arena) -> tuple[Tensor, int]:
    """Take a line, and write to all of it. Return it, and how often the system had to provide memory meanwhile."""
    lines = arena.take(1)
    assert lines is not None
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    lines[0].fill_(1)
    return lines[0], resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
