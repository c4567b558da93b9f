"""The frames of a websocket's client are checked and measured, however the stream is split."""

import random

import pytest

from baton.api.connections.frames import LEAST, FrameMeter

SIZES = (0, 1, 125, 126, 127, 65_535, 65_536, 70_000)


def frame(size: int, masked: bool = True, first: int = 0x81) -> bytes:
    bit = 0x80 if masked else 0
    if size < 126:
        length = bytes([bit | size])
    elif size < 2**16:
        length = bytes([bit | 126]) + size.to_bytes(2, "big")
    else:
        length = bytes([bit | 127]) + size.to_bytes(8, "big")
    return bytes([first]) + length + (b"mask" if masked else b"") + bytes(size)


def pieces(data: bytes, random: random.Random) -> list[bytes]:
    cuts = sorted(random.randrange(len(data) + 1) for _ in range(random.randrange(12)))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


@pytest.mark.parametrize("seed", range(20))
def test_masked_frames_pass_and_the_first_unmasked_one_does_not(seed: int) -> None:
    draw = random.Random(seed)
    good = b"".join(frame(draw.choice(SIZES)) for _ in range(8))
    meter = FrameMeter()
    assert all(meter.add(piece) for piece in pieces(good, draw))
    bad = frame(draw.choice(SIZES), masked=False) + bytes(100)
    assert not all(meter.add(piece) for piece in pieces(bad, draw))


def test_byte_by_byte() -> None:
    meter = FrameMeter()
    data = frame(3) + frame(200) + frame(0)
    assert all(meter.add(bytes([byte])) for byte in data)
    assert meter.add(b"\x81")
    assert not meter.add(b"\x03")


def draw_messages(draw: random.Random) -> tuple[bytes, list[int]]:
    """Return a stream, and the bytes of its messages in the order of their ends. Pings come between fragments."""
    data, sizes = b"", list[int]()
    for _ in range(6):
        message, count = 0, draw.randrange(1, 4)
        for number in range(count):
            fragment = frame(draw.choice(SIZES), first=(0 if number else 1) | (0x80 if number == count - 1 else 0))
            data += fragment
            message += max(LEAST, len(fragment))
            if number == count - 1:
                sizes.append(message)
            if draw.random() < 0.5:
                data += frame(5, first=0x89)
                sizes.append(LEAST)
    return data, sizes


@pytest.mark.parametrize("seed", range(20))
def test_each_message_is_measured_from_its_first_fragment_to_its_last(seed: int) -> None:
    data, sizes = draw_messages(random.Random(seed))
    meter = FrameMeter()
    assert meter.add(data)
    assert meter.held == sum(sizes)
    assert [meter.take() for _ in sizes] == sizes
    assert meter.held == 0


@pytest.mark.parametrize("seed", range(20))
def test_pieces_add_at_most_what_small_ones_take(seed: int) -> None:
    draw = random.Random(seed)
    data, sizes = draw_messages(draw)
    meter, results, seen = FrameMeter(), list[int](), 0
    for piece in (split := pieces(data, draw)):
        assert meter.add(piece)
        seen += len(piece)
        assert sum(results) + meter.held >= seen
        while meter._complete and draw.random() < 0.8:
            results.append(meter.take())
    results += [meter.take() for _ in range(len(sizes) - len(results))]
    assert meter.held == 0
    assert all(size <= result <= size + LEAST * len(split) for size, result in zip(sizes, results, strict=True))


def test_a_message_that_does_not_end_is_held() -> None:
    meter = FrameMeter()
    assert meter.add(frame(70_000, first=0x01) + frame(0, first=0x89) + frame(70_000, first=0x00)[:50_000])
    assert meter.take() == LEAST
    assert meter.held == 70_014 + 50_000
