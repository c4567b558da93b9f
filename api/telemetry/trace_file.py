"""--trace-file: the ring's events and its requests' histories, one a line as JSON, written by a thread of its own."""

import threading
import time
from collections import deque
from pathlib import Path

import msgspec
import structlog

from baton.actors.runtime.events import DroppedEvent, Event, HeaderEvent
from baton.api.generation.outputs import Member
from baton.api.telemetry.histories import Histories, History

VERSION = 2
CAPACITY = 1 << 16
CHUNK = 256
INTERVAL_S = 0.05


class TraceFile:
    """`record` never waits: what the disk is too slow for is dropped, and the file says how much that was.

    Opening raises OSError; a later one ends the file, and is logged. The file is overwritten.
    """

    def __init__(self, path: Path, capacity: int = CAPACITY) -> None:
        self._file = path.open("wb")
        self._events: deque[Event | History] = deque()
        self._histories = Histories()
        self._capacity = capacity
        self._dropped = 0
        self._told = 0
        self._counting = threading.Lock()
        self._encoder = msgspec.json.Encoder()
        self._closing = threading.Event()
        self.record(HeaderEvent(VERSION, time.time(), time.monotonic()))
        self._thread = threading.Thread(target=self._write, name="trace", daemon=True)
        self._thread.start()

    def record_end(self, member: Member) -> None:
        """A request that was admitted has ended, or was left; its tokens are hashed by the writing thread."""
        if member.first is not None:
            self.record(History(member.submitted_at, member.request, bytes(member.delivered)))

    def record(self, event: Event | History) -> None:
        """From any thread."""
        if len(self._events) < self._capacity:
            self._events.append(event)
        else:
            with self._counting:
                self._dropped += 1

    def close(self) -> None:
        """Write what is left."""
        self._closing.set()
        self._thread.join()

    def _write(self) -> None:
        try:
            with self._file:
                while not self._closing.wait(INTERVAL_S):
                    self._drain()
                self._drain()
        except OSError as error:
            self._capacity = 0
            structlog.get_logger().error("the trace file ends here", error=str(error))

    def _drain(self) -> None:
        """In small chunks: encoding one keeps every other thread waiting."""
        for _ in range(len(self._events) // CHUNK + 1):
            chunk = [self._events.popleft() for _ in range(min(CHUNK, len(self._events)))]
            lines = [self._histories.event(each) if isinstance(each, History) else each for each in chunk]
            self._file.write(self._encoder.encode_lines(lines))
        if self._dropped > self._told:
            missing = DroppedEvent(self._dropped - self._told)
            self._told += missing.count
            self._file.write(self._encoder.encode_lines([missing]))
        self._file.flush()
