"""Every planted fault is found, and correct programs raise none."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.late import Fault, LateDevice

META = torch.device("meta")


def numbers(late: LateDevice, count: int = 4) -> Tensor:
    return late.of(torch.arange(float(count)))


HOST_READS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x[1].item(),
    "int": lambda x: int(x[1]),
    "tolist": lambda x: x.tolist(),
    "bool": lambda x: bool((x > 0).all()),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu", torch.int32),
    "numpy": lambda x: list(x.numpy()),
    "copy": lambda x: torch.empty(4).copy_(x),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 1],
    "masked assignment": lambda x: x.__setitem__(x > 2, (x * 2)[2:]),
    "equal": lambda x: torch.equal(x, x),
    "repeats": lambda x: x.repeat_interleave(x.long()),
}


@pytest.mark.parametrize("read", HOST_READS.values(), ids=HOST_READS)
def test_a_host_read_is_an_error(read: Callable[[Tensor], object]) -> None:
    with pytest.raises(Fault, match=r"^host read: .*test_faults\.py"), LateDevice() as late:
        x = numbers(late)
        with late.stream().active(), torch.inference_mode():
            read(x)


@pytest.mark.parametrize("read", HOST_READS.values(), ids=HOST_READS)
def test_without_raises_a_host_read_returns_the_value(read: Callable[[Tensor], object]) -> None:
    with LateDevice(raises=False) as late:
        x = numbers(late)
        with late.stream().active(), torch.inference_mode():
            found = read(x + 1)
        assert {fault.kind for fault in late.faults} == {"host read"}
    expected = read(torch.arange(4.0) + 1)
    if isinstance(found, Tensor) and found.device == META:
        found = late.read(found)
    assert found == expected if not isinstance(expected, Tensor) else torch.equal(found, expected)


UPLOADS: dict[str, Callable[[Tensor], object]] = {
    "tensor": lambda x: torch.tensor([1, 2], device=x.device),
    "number": lambda x: torch.tensor(1, device=x.device),
    "new_tensor": lambda x: x.new_tensor([1.0]),
    "to": lambda x: torch.ones(2).to(x.device),
    "where": lambda x: torch.where(x > 1, x, torch.tensor(1.0)),
    "operand": lambda x: x + torch.ones(4),
    "index": lambda x: x[torch.tensor([0, 1])],
    "list": lambda x: x[[0, 1]],
    "assigned by list": lambda x: x.__setitem__([0, 1], 0.0),
    "copy": lambda x: x.copy_(torch.ones(4)),
    "element": lambda x: x.__setitem__(0, torch.tensor(3.0)),
}


@pytest.mark.parametrize("upload", UPLOADS.values(), ids=UPLOADS)
def test_an_implicit_upload_is_an_error(upload: Callable[[Tensor], object]) -> None:
    with pytest.raises(Fault, match=r"^implicit upload: .*test_faults\.py"), LateDevice() as late:
        x = numbers(late)
        with late.stream().active(), torch.inference_mode():
            upload(x)


@pytest.mark.parametrize("upload", UPLOADS.values(), ids=UPLOADS)
def test_without_raises_an_implicit_upload_has_the_values(upload: Callable[[Tensor], object]) -> None:
    with LateDevice(raises=False) as late:
        x = numbers(late)
        with late.stream().active(), torch.inference_mode():
            found = upload(x)
        assert {fault.kind for fault in late.faults} == {"implicit upload"}
        changed = torch.arange(4.0)
        expected = upload(changed)
        assert torch.equal(late.read(x), changed)
        if isinstance(expected, Tensor):
            assert isinstance(found, Tensor) and torch.equal(late.read(found), expected)


def test_numbers_and_setup_are_no_faults() -> None:
    with LateDevice() as late:
        x = numbers(late)
        with late.setup():
            y = torch.tensor([1.0, 2.0, 3.0, 4.0], device=META)
            assert y.tolist() == [1, 2, 3, 4]
        with late.stream().active(), torch.inference_mode():
            x[1] = 5
            x[x > 4] = 6
            one = torch.tensor(1.0)
            x += one
            one.zero_()
            z = torch.where(x > 1, x * 2.0, y.clamp(0, 2))
        assert late.read(z).tolist() == [1, 14, 6, 8]


def upload(late: LateDevice, reuse_early: bool) -> tuple[Tensor, Tensor]:
    """Upload twice through one host buffer. reuse_early: do not wait for the first upload before writing again."""
    stream = late.stream()
    host = stream.host_buffer(16).view(torch.float32)
    first, second = numbers(late), numbers(late)
    host.fill_(1.0)
    stream.upload(host, first)
    event = stream.record()
    if not reuse_early:
        event.wait()
    host.fill_(2.0)
    stream.upload(host, second)
    return first, second


def test_a_buffer_written_too_early_is_found() -> None:
    with LateDevice() as late:
        first, second = upload(late, reuse_early=False)
        assert late.read(first).tolist() == [1.0] * 4 and late.read(second).tolist() == [2.0] * 4
    with pytest.raises(Fault, match="host buffer: written before its upload"), LateDevice() as late:
        upload(late, reuse_early=True)


def test_results_are_not_there_before_their_event() -> None:
    with LateDevice() as late:
        stream, x = late.stream(), numbers(late)
        host = stream.host_buffer(16).view(torch.float32)
        with stream.active():
            stream.download(x + 1, host)
        event = stream.record()
        assert not event.passed() and host.tolist() != [1, 2, 3, 4]
        event.wait()
        assert event.passed() and host.tolist() == [1, 2, 3, 4]
        stream.download(x, host)
        assert host.tolist() != [1, 2, 3, 4], "nor are the last ones, once the buffer is given to the device"


def test_a_target_written_too_early_is_found() -> None:
    with pytest.raises(Fault, match="host buffer: written before its download"), LateDevice() as late:
        stream, x = late.stream(), numbers(late)
        host = stream.host_buffer(16).view(torch.float32)
        stream.download(x, host)
        host.fill_(0.0)


def test_host_memory_that_is_not_pinned_is_found() -> None:
    with pytest.raises(Fault, match="pageable"), LateDevice() as late:
        late.stream().upload(torch.ones(4), numbers(late))


def test_host_memory_that_is_locked_after_the_setup_is_found() -> None:
    with LateDevice() as late, late.setup():
        late.stream().host_buffer(2**20 + 1)
    with pytest.raises(Fault, match="page lock: 1048577 bytes"), LateDevice() as late:
        late.stream().host_buffer(2**20)
        late.stream().host_buffer(2**20 + 1)


def two_streams(late: LateDevice, producer_first: bool, consumer_first: bool) -> list[float]:
    """Fill a tensor with 1 and then 2 on one stream; return the copy that a second stream downloads between the two.

    producer_first: the copy waits for the 1. consumer_first: the 2 waits for the copy.
    """
    forward, copies = late.stream(), late.stream()
    pool, host = numbers(late), copies.host_buffer(16).view(torch.float32)
    with forward.active():
        pool.fill_(1.0)
    if producer_first:
        copies.wait(forward.record())
    copies.download(pool, host)
    if consumer_first:
        forward.wait(copies.record())
    with forward.active():
        pool.fill_(2.0)
    late.synchronize()
    return host.tolist()


def test_streams_that_wait_for_each_other_are_in_order_under_every_seed() -> None:
    for seed in range(100):
        with LateDevice(seed) as late:
            assert two_streams(late, producer_first=True, consumer_first=True) == [1.0] * 4


@pytest.mark.parametrize(
    ("left_out", "seen"), [("producer_first", [0.0, 1.0, 2.0, 3.0]), ("consumer_first", [2.0] * 4)]
)
def test_a_wait_that_is_missing_shows_under_some_seeds(left_out: str, seen: list[float]) -> None:
    waits = {"producer_first": True, "consumer_first": True, left_out: False}
    found = []
    for seed in range(100):
        with LateDevice(seed) as late:
            found.append(two_streams(late, **waits))
    assert seen in found and [1.0] * 4 in found


def test_a_read_of_another_stream_s_missing_values_is_found() -> None:
    found = 0
    for seed in range(30):
        with LateDevice(seed, raises=False) as late:
            forward, copies, x = late.stream(), late.stream(), numbers(late)
            host = copies.host_buffer(16).view(torch.float32)
            with forward.active():
                computed = x + 1
            copies.download(computed, host)
            late.synchronize()
            found += late.count("unwritten")
    assert found > 0


def test_dropped_memory_is_spoiled_for_other_streams_but_not_for_its_own() -> None:
    spoiled = 0
    for seed in range(30):
        with LateDevice(seed) as late:
            forward, copies, x = late.stream(), late.stream(), numbers(late)
            with forward.active():
                made = x + 1
                own = made * 2
            copies.wait(forward.record())
            with copies.active():
                others = made * 2
            del made
            assert late.read(own).tolist() == [2, 4, 6, 8]
            spoiled += bool(late.read(others).isnan().any())
    assert 0 < spoiled < 30


def test_a_copy_keeps_the_memory_that_it_reads() -> None:
    for seed in range(30):
        with LateDevice(seed) as late:
            forward, copies, x = late.stream(), late.stream(), numbers(late)
            host = copies.host_buffer(16).view(torch.float32)
            with forward.active():
                made = x + 1
            copies.wait(forward.record())
            copies.download(made, host)
            del made
            late.synchronize()
            assert host.tolist() == [1, 2, 3, 4]


def test_an_error_is_raised_where_the_host_waits_and_nothing_is_done_after_it() -> None:
    with pytest.raises(torch.AcceleratorError, match="index"), LateDevice() as late:
        stream, x = late.stream(), numbers(late)
        with stream.active(), torch.inference_mode():
            x.index_select(0, torch.empty(1, dtype=torch.int64, device=META))
            x.zero_()
        event = stream.record()
        try:
            event.wait()
        finally:
            assert x.cell.values is not None and x.cell.values.tolist() == [0, 1, 2, 3]  # type: ignore[attr-defined]


@pytest.mark.parametrize("change", [lambda x: x.add_(1), lambda x: x[:2].fill_(0)], ids=["whole", "part"])
def test_tensors_of_inference_mode_are_changed_only_in_it(change: Callable[[Tensor], object]) -> None:
    with LateDevice() as late, late.stream().active():
        with torch.inference_mode():
            made = torch.zeros(4, device=META)
            change(made)
        with pytest.raises(RuntimeError, match="inference mode"):
            change(made)
