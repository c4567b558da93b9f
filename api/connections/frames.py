"""The frames of a websocket's client: a check that all are masked, and the bytes of messages that are still held."""

from collections import deque

FIN, CONTROL, MASKED = 0x80, 0x08, 0x80  # bits of a frame's first byte, twice, and of its second
# A frame counts for at least so many bytes, and so does each piece in which it arrives: aiohttp keeps objects for them.
LEAST = 256


class FrameMeter:
    """A parser of frame headers, in a byte stream that arrives in pieces of any size.

    It measures every message from its first byte until `take` is called for it. A control frame is a message, too.
    """

    def __init__(self) -> None:
        self.held = 0  # bytes of all messages, complete or not, that have not been taken
        self._header = bytearray()  # the header of the current frame, as far as it has arrived
        self._left = 2  # bytes that are still to come of the header's start, of the rest of it, or of the payload
        self._in_payload = False
        self._frame = 0  # bytes of the current frame
        self._fragments = 0  # bytes of the complete fragments of the current message
        self._complete = deque[int]()  # bytes of each complete message that has not been taken

    def add(self, data: bytes) -> bool:
        """Parse the next bytes of the stream. Return False if an unmasked frame begins: RFC 6455 (5.1) forbids it."""
        at, before = 0, 0  # before: where the current frame begins in these bytes
        while at < len(data):
            size = min(self._left, len(data) - at)
            if not self._in_payload:
                self._header += data[at : at + size]
            at += size
            self._left -= size
            if self._left:
                break  # The rest of this part has not arrived.
            if len(self._header) == 2 and not self._header[1] & MASKED:
                return False
            if self._is_frame_complete():
                self._end_frame(at - before)
                before = at
        if before < at:
            self._grow(max(LEAST, at - before))
        return True

    def _is_frame_complete(self) -> bool:
        """Return whether the part of a frame that is complete is its last one. Otherwise begin with the next part."""
        if not self._in_payload and (rest := header_size(self._header) - len(self._header)):
            self._left = rest
            return False
        if not self._in_payload and (size := payload_size(self._header)):
            self._in_payload, self._left = True, size
            return False
        return True

    def take(self) -> int:
        """Return the bytes of the first complete message, which are not held here any more."""
        size = self._complete.popleft()
        self.held -= size
        return size

    def _grow(self, size: int) -> None:
        self._frame += size
        self.held += size

    def _end_frame(self, size: int) -> None:
        """End the current frame, whose last piece has `size` bytes, and with it its message unless fragments follow."""
        self._grow(max(size, LEAST - self._frame))
        first, size = self._header[0], self._frame
        self._header.clear()
        self._frame, self._left, self._in_payload = 0, 2, False
        if first & CONTROL:  # It may come between the fragments of a message, and is handled before the message.
            self._complete.append(size)
        elif first & FIN:
            self._complete.append(self._fragments + size)
            self._fragments = 0
        else:
            self._fragments += size


def header_size(start: bytearray) -> int:
    """Return the length of a masked frame's header in bytes, or 2 while fewer than two bytes of it are known."""
    if len(start) < 2:
        return 2
    short = start[1] & 0x7F
    return 6 if short < 126 else 8 if short == 126 else 14


def payload_size(header: bytearray) -> int:
    """Return the length of a frame's payload in bytes, given the frame's complete header."""
    short = header[1] & 0x7F
    return short if short < 126 else int.from_bytes(header[2:-4], "big")


def text_frame(text: bytes) -> bytes:
    """Return a frame from the server with a short text. Raises OverflowError at 64 KiB."""
    size = bytes([len(text)]) if len(text) < 126 else b"\x7e" + len(text).to_bytes(2, "big")
    return b"\x81" + size + text


def close_frame(code: int) -> bytes:
    """Return a frame from the server that closes the websocket with `code`."""
    return b"\x88\x02" + code.to_bytes(2, "big")
