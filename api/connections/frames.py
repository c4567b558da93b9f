"""A check that the frames a client sends on a websocket are masked, as RFC 6455 (5.1) requires."""


class MaskCheck:
    """A parser of frame headers in a stream that arrives in arbitrary pieces."""

    def __init__(self) -> None:
        self._header = bytearray()  # of the current frame, as far as it has arrived
        self._payload = 0  # bytes of the current payload still to skip

    def all_masked(self, data: bytes) -> bool:
        """Parse the next bytes of the stream. Return False if a frame that begins in them is not masked."""
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
    """Return the length of a masked frame's header in bytes, given at least its first two bytes (else 2)."""
    if len(start) < 2:
        return 2
    return 6 + {126: 2, 127: 8}.get(start[1] & 0x7F, 0)


def payload_size(header: bytearray) -> int:
    """Return the payload's length in bytes, from a whole header."""
    short = header[1] & 0x7F
    return short if short < 126 else int.from_bytes(header[2:-4], "big")
