"""Whether the frames that a client sends through a websocket are masked, as they must be (RFC 6455, 5.1)."""


class MaskCheck:
    """Follows a stream of frames by their headers, in whatever pieces it comes."""

    def __init__(self) -> None:
        self._header = bytearray()
        self._payload = 0

    def all_masked(self, data: bytes) -> bool:
        """Take in what came next. False if a frame that begins in it is not masked."""
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


def header_size(begun: bytearray) -> int:
    """Bytes of a masked frame's header, by its first two."""
    if len(begun) < 2:
        return 2
    return 6 + {126: 2, 127: 8}.get(begun[1] & 0x7F, 0)


def payload_size(header: bytearray) -> int:
    short = header[1] & 0x7F
    return short if short < 126 else int.from_bytes(header[2:-4], "big")
