"""Unmasked websocket frames of clients are detected, however the stream is split."""

import random

import pytest

from baton.api.connections.frames import MaskCheck

SIZES = (0, 1, 125, 126, 127, 65_535, 65_536, 70_000)


def frame(size: int, masked: bool = True) -> bytes:
    bit = 0x80 if masked else 0
    if size < 126:
        length = bytes([bit | size])
    elif size < 2**16:
        length = bytes([bit | 126]) + size.to_bytes(2, "big")
    else:
        length = bytes([bit | 127]) + size.to_bytes(8, "big")
    return b"\x81" + length + (b"mask" if masked else b"") + bytes(size)


def pieces(data: bytes, random: random.Random) -> list[bytes]:
    cuts = sorted(random.randrange(len(data) + 1) for _ in range(random.randrange(12)))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


@pytest.mark.parametrize("seed", range(20))
def test_masked_frames_pass_and_the_first_unmasked_one_does_not(seed: int) -> None:
    draw = random.Random(seed)
    good = b"".join(frame(draw.choice(SIZES)) for _ in range(8))
    check = MaskCheck()
    assert all(check.all_masked(piece) for piece in pieces(good, draw))
    bad = frame(draw.choice(SIZES), masked=False) + bytes(100)
    assert not all(check.all_masked(piece) for piece in pieces(bad, draw))


def test_byte_by_byte() -> None:
    check = MaskCheck()
    data = frame(3) + frame(200) + frame(0)
    assert all(check.all_masked(bytes([byte])) for byte in data)
    assert check.all_masked(b"\x81")
    assert not check.all_masked(b"\x03")
