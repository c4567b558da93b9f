"""The file of --trace-file: events of the ring and histories of requests, one JSON object per line."""

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
CAPACITY = 1 << 16  # maximum events that wait to be written
CHUNK = 256  # maximum events encoded at once
INTERVAL_S = 0.05  # seconds between two writes


class TraceFile:
    """A trace file and the thread that writes it.

    `record` never blocks. If the disk is too slow, events are dropped, and an event in the file says how many. An
    OSError during a write is logged, and nothing more is written.
    """

    def __init__(self, path: Path, capacity: int = CAPACITY) -> None:
        """Overwrite the file and start the thread. Raises OSError if the file cannot be opened."""
        self._file = path.open("wb")
        self._events: deque[Event | History] = deque()
        self._histories = Histories()
        self._capacity = capacity
        self._dropped = 0  # number of events dropped so far
        self._reported = 0  # how many of the dropped events the file mentions
        self._counting = threading.Lock()
        self._encoder = msgspec.json.Encoder()
        self._closing = threading.Event()
        self.record(HeaderEvent(VERSION, time.time(), time.monotonic()))
        self._thread = threading.Thread(target=self._write, name="trace", daemon=True)
        self._thread.start()

    def record_end(self, member: Member) -> None:
        """Record the tokens of an admitted request that has ended or was abandoned. The thread hashes them later."""
        if member.first is not None:
            self.record(History(member.submitted_at, member.request, bytes(member.delivered)))

    def record(self, event: Event | History) -> None:
        """Add an event. Any thread may call this."""
        if len(self._events) < self._capacity:
            self._events.append(event)
        else:
            with self._counting:
                self._dropped += 1

    def close(self) -> None:
        """Write the remaining events, and close the file."""
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
        """Write the waiting events in small chunks, because encoding a chunk holds the interpreter lock."""
        for _ in range(len(self._events) // CHUNK + 1):
            chunk = [self._events.popleft() for _ in range(min(CHUNK, len(self._events)))]
            lines = [self._histories.event(each) if isinstance(each, History) else each for each in chunk]
            self._file.write(self._encoder.encode_lines(lines))
        if self._dropped > self._reported:
            missing = DroppedEvent(self._dropped - self._reported)
            self._reported += missing.count
            self._file.write(self._encoder.encode_lines([missing]))
        self._file.flush()
