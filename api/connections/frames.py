"""A check that all frames from a websocket's client are masked, as RFC 6455 (5.1) requires."""


class MaskCheck:
    """A parser of websocket frame headers, in a byte stream that arrives in pieces of any size."""

    def __init__(self) -> None:
        self._header = bytearray()  # the part of the current frame's header that has arrived
        self._payload = 0  # bytes of the current frame's payload still to skip

    def all_masked(self, data: bytes) -> bool:
        """Parse the next bytes of the stream. Return False if an unmasked frame begins in these bytes."""
        at = 0
        while at < len(data):
            skipped = min(self._payload, len(data) - at)
            self._payload -= skipped
            at += skipped
            if at < len(data):
                self._header.append(data[at])
                at += 1
                if len(self._header) == 2 and not self._header[1] & 0x80:
                    return False
                if len(self._header) == header_size(self._header):
                    self._payload = payload_size(self._header)
                    self._header.clear()
        return True


def header_size(start: bytearray) -> int:
    """Return the length of a masked frame's header in bytes, or 2 while fewer than two bytes of it are known."""
    if len(start) < 2:
        return 2
    return 6 + {126: 2, 127: 8}.get(start[1] & 0x7F, 0)


def payload_size(header: bytearray) -> int:
    """Return the length of a frame's payload in bytes, given the frame's complete header."""
    short = header[1] & 0x7F
    return short if short < 126 else int.from_bytes(header[2:-4], "big")
