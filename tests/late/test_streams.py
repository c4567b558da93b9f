"""When the late device executes operations: streams and events, captured steps, threads, Triton kernels."""

import itertools
import queue
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.kernels.norm.rms import add_rms_norm, reference
from tests.late import Fault, LateDevice

META = torch.device("meta")


def numbers(late: LateDevice, count: int = 4) -> Tensor:
    return late.of(torch.arange(float(count)))


def test_without_a_seed_nothing_is_executed_before_a_wait() -> None:
    with LateDevice() as late:
        stream, other, x, y = late.stream(), late.stream(), numbers(late), numbers(late)
        with stream.active():
            x += 1
        first = stream.record()
        with stream.active():
            x += 1
        with other.active():
            y += 1
        assert [stream.done, other.done, first.passed()] == [0, 0, False]
        assert stream.execute(1) == 1 and first.passed()
        stream.record().wait()
        assert [stream.done, other.done] == [2, 0]
        assert late.read(x).tolist() == [2, 3, 4, 5] and other.execute() == 0


def test_a_stream_does_not_pass_an_event_that_it_waits_for() -> None:
    with LateDevice() as late:
        stream, other, x = late.stream(), late.stream(), numbers(late)
        with other.active():
            x += 1
        stream.wait(other.record())
        with stream.active():
            x *= 2
        assert stream.execute() == 0
        stream.record().wait()
        assert late.read(x).tolist() == [2, 4, 6, 8]


def test_polling_sees_an_event_pass_sooner_or_later() -> None:
    polls = []
    for seed in range(30):
        with LateDevice(seed) as late:
            stream, x = late.stream(), numbers(late)
            with stream.active():
                for _ in range(8):
                    x += 1
            event = stream.record()
            polls.append(next(times for times in range(1000) if event.passed()))
    assert 0 in polls and max(polls) > 2


def test_views_share_their_memory() -> None:
    with LateDevice(3) as late:
        x = late.of(torch.arange(12.0).view(3, 4))
        with late.stream().active(), torch.inference_mode():
            left, right = x.split([1, 3], dim=1)
            left.zero_()
            right[1].add_(left[1] + 100)
            bits = x.view(torch.int32)[2]
            bits.copy_(bits[0].expand(4))
        assert late.read(x).tolist() == [[0, 1, 2, 3], [0, 105, 106, 107], [0, 0, 0, 0]]


def test_modules_move() -> None:
    module, x = torch.nn.Linear(3, 2), torch.arange(3.0)
    with LateDevice() as late:
        expected = module(x)
        late.to(module)
        with late.stream().active(), torch.inference_mode():
            found = module(late.of(x))
        torch.testing.assert_close(late.read(found), expected.detach())


def test_one_thread_waits_for_what_another_enqueues() -> None:
    with LateDevice() as late:
        stream, x = late.stream(), numbers(late)
        host = stream.host_buffer(16).view(torch.float32)
        with stream.active():
            stream.download(x + 1, host)
        waiter = threading.Thread(target=stream.record().wait, name="waiter")
        waiter.start()
        waiter.join()
        assert host.tolist() == [1, 2, 3, 4]
        assert [entry.what for entry in late.log if entry.kind == "wait"] == ["waiter"]


def collected(late: LateDevice, steps: int, buffers: int) -> list[float]:
    """Enqueue steps in this thread, and return the results that a second thread collects after each step's event.

    buffers: how many host buffers the uploads use in turn, and how many the downloads use
    """
    stream, total = late.stream(), late.of(torch.zeros(4))
    inputs, outputs = ([stream.host_buffer(16).view(torch.float32) for _ in range(buffers)] for _ in range(2))
    free, pending, results = (queue.Queue[Any]() for _ in range(3))
    for index in range(buffers):
        free.put(index)

    def wait() -> None:
        while (item := pending.get()) is not None:
            event, index = item
            event.wait()
            results.put(float(outputs[index][3]))
            free.put(index)

    waiter = threading.Thread(target=wait)
    waiter.start()
    with stream.active(), torch.inference_mode():
        for step in range(steps):
            index = free.get()
            inputs[index].fill_(float(step))
            x = torch.empty(4, device=META)
            stream.upload(inputs[index], x)
            total.add_(x * 1.0)
            stream.download(total, outputs[index])
            pending.put((stream.record(), index))
    pending.put(None)
    waiter.join()
    return list(results.queue)


@pytest.mark.parametrize("seed", [None, *range(5)])
def test_one_thread_enqueues_and_another_collects(seed: int | None) -> None:
    with LateDevice(seed) as late:
        assert collected(late, steps=40, buffers=3) == list(itertools.accumulate(range(40)))


def test_a_captured_step_is_done_at_each_replay_over_the_same_memory() -> None:
    with LateDevice() as late:
        stream, x, results = late.stream(), numbers(late), []

        def step() -> None:
            doubled = x * 2
            results.append(doubled + 1)
            del doubled
            x.add_(1)

        replay = stream.capture(step)
        assert late.read(x).tolist() == [0, 1, 2, 3]
        replay()
        assert late.read(results[0]).tolist() == [1, 3, 5, 7]
        third = results[0][2:3]
        replay()
        replay()
        assert late.read(x).tolist() == [3, 4, 5, 6]
        assert late.read(results[0]).tolist() == [5, 7, 9, 11] and late.read(third).tolist() == [9]
        assert len(results) == 1, "the program runs once"


def test_a_captured_upload_reads_its_buffer_at_each_replay() -> None:
    with LateDevice() as late:
        stream, x = late.stream(), numbers(late)
        host = stream.host_buffer(16).view(torch.float32)
        replay = stream.capture(lambda: stream.upload(host, x))
        for value in (3.0, 4.0):
            host.fill_(value)
            replay()
            assert late.read(x).tolist() == [value] * 4
    with pytest.raises(Fault, match="host buffer"), LateDevice() as late:
        stream, x = late.stream(), numbers(late)
        host = stream.host_buffer(16).view(torch.float32)
        replay = stream.capture(lambda: stream.upload(host, x))
        for value in (3.0, 4.0):
            host.fill_(value)
            replay()


def test_nothing_is_read_while_a_step_is_captured() -> None:
    with LateDevice(raises=False) as late, pytest.raises(Fault, match="host read"):
        x = numbers(late)
        late.stream().capture(lambda: x[0].item())


def test_results_of_a_capture_are_unwritten_before_its_replay() -> None:
    with pytest.raises(Fault, match="unwritten"), LateDevice() as late:
        stream, x, results = late.stream(), numbers(late), []
        stream.capture(lambda: results.append(x + 1))
        with stream.active():
            results[0].add_(1)


def test_memory_that_a_capture_uses_must_outlive_it() -> None:
    with LateDevice() as late:
        stream, x = late.stream(), numbers(late)
        with stream.active():
            dropped = [x + 1]
        replay = stream.capture(lambda: x.copy_(dropped[0]))
        replay()
        assert late.read(x).tolist() == [1, 2, 3, 4]
        dropped.clear()
        replay()
        assert late.read(x).isnan().all()


def test_empty_memory_has_no_numbers() -> None:
    with LateDevice() as late, late.stream().active():
        assert late.read(torch.empty(3, device=META)).isnan().all()
        assert (late.read(torch.empty(3, dtype=torch.int32, device=META)) > 2**30).all()


def test_kernels_run_in_stream_order() -> None:
    generator = torch.Generator().manual_seed(0)
    residual, x, weight = (torch.randn(shape, generator=generator) for shape in [(3, 8), (3, 8), (8,)])
    with LateDevice() as late:
        stream = late.stream()
        on_device = [late.of(tensor) for tensor in (residual, x, weight)]
        with stream.active():
            on_device[0].mul_(2)
            found = add_rms_norm(*on_device, 1e-5)
            on_device[0].zero_()
        assert [entry.what for entry in late.log if entry.kind == "launch"] == [
            "aten.mul_.Tensor", "_add_rms_norm", "aten.zero_.default",
        ]  # fmt: skip
        expected = reference.add_rms_norm(residual * 2, x, weight, 1e-5)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(late.read(one), other)


def test_kernels_run_at_once_on_host_tensors_and_never_on_both() -> None:
    from baton.kernels.norm.rms import triton

    x, weight = torch.ones(2, 8), torch.ones(8)
    with LateDevice() as late, late.stream().active():
        torch.testing.assert_close(triton.add_rms_norm(x, None, weight, 0.0)[1], x)
        with pytest.raises(Fault, match="_add_rms_norm was given a tensor of the host"):
            add_rms_norm(late.of(x), None, weight, 0.0)


def test_a_kernels_tensors_are_aligned() -> None:
    with pytest.raises(Fault, match="misaligned: _add_rms_norm"), LateDevice() as late:
        x, weight = late.of(torch.ones(9)), late.of(torch.ones(8))
        with late.stream().active():
            add_rms_norm(x[1:].view(1, 8), None, weight, 0.0)
