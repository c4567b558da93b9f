"""--trace-file: the writer alone, and in a real server with the hash model."""

import threading
import time
from pathlib import Path

import msgspec
import pytest
import structlog

from baton.actors.runtime.events import (
    ActEvent,
    DroppedEvent,
    HeaderEvent,
    HistoryEvent,
    MoveEvent,
    RequestEvent,
    StepEvent,
)
from baton.api.config import Config
from baton.api.serve import StartError
from baton.api.telemetry.trace_file import TraceFile
from baton.api.wiring import load
from scripts.tracing.events import trace_events
from scripts.tracing.log import dropped, read_log, rebuild_ledger
from tests.api.hash_traffic import Traffic, make_checkpoint, troubles, wait_home
from tests.api.server_process import SERVE, ServerProcess
from tests.scripts.trace_format import check

SMALL = [
    "--state-slots", "8", "--kv-pages", "120", "--page-size", "4", "--max-running", "4",
    "--step-tokens", "64", "--max-model-len", "200", "--track-interval", "16",
]  # fmt: skip


def test_all_that_is_recorded_is_written_in_order(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "log")
    events = [ActEvent("cache", float(number), number + 0.5) for number in range(3000)]
    for event in events:
        file.record(event)
    file.close()
    header, *rest = read_log(tmp_path / "log")
    assert isinstance(header, HeaderEvent) and abs(header.unix_time - time.time()) < 60
    assert rest == events


def test_it_is_written_while_the_server_runs(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "log")
    file.record(ActEvent("cache", 1.0, 2.0))
    deadline = time.monotonic() + 10
    while b'"act"' not in (tmp_path / "log").read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    file.close()


class Held(TraceFile):
    """A trace file whose writing thread waits until `go` is set."""

    def __init__(self, path: Path, capacity: int) -> None:
        self.go = threading.Event()
        super().__init__(path, capacity)

    def _write(self) -> None:
        self.go.wait(10)
        super()._write()


def test_events_beyond_the_speed_of_the_disk_are_dropped_and_counted(tmp_path: Path) -> None:
    file = Held(tmp_path / "log", capacity=10)
    for number in range(25):
        file.record(ActEvent("cache", float(number), float(number)))
    file.go.set()
    file.close()
    _, *events = read_log(tmp_path / "log")
    assert [event.began for event in events if isinstance(event, ActEvent)] == [float(i) for i in range(9)]
    assert events[-1] == DroppedEvent(16)


def test_a_full_disk_ends_the_file_and_nothing_else() -> None:
    with structlog.testing.capture_logs() as logged:
        file = TraceFile(Path("/dev/full"))
        file.record(ActEvent("cache", 1.0, 2.0))
        file.close()
        file.record(ActEvent("cache", 1.0, 2.0))
    assert [(line["event"], "No space left" in line["error"]) for line in logged] == [
        ("the trace file ends here", True)
    ]


def test_a_file_that_cannot_be_opened_is_named() -> None:
    with pytest.raises(StartError, match=r"--trace-file: .*/nowhere/log"):
        load(Config(trace_file="/nowhere/log"), lambda done, total: None)


@pytest.mark.anyio
async def test_the_ledger_rebuilt_from_the_file_is_the_servers(tmp_path: Path) -> None:
    """The ledger rebuilt from a trace file equals the server's, after finished, abandoned and aborted requests."""
    log = tmp_path / "log"
    checkpoint = make_checkpoint(tmp_path, delay_ms=[0, 1])
    with ServerProcess([*SERVE, str(checkpoint), *SMALL, "--trace-file", str(log)]) as server:
        await Traffic(server.url, seed=5, requests=40).run()
        wait_home(server)
        shown = server.get("/debug/slots")
        moves = sum(server.get("/server_info")["lease_moves"].values())
        server.wait_until(lambda: count_moves(log) >= moves)
        rebuilt = rebuild_ledger(read_log(log))
    assert troubles(server) == []
    assert [msgspec.to_builtins(holding) for holding in rebuilt] == [
        {name: entry[name] for name in ("slot", "place", "holder", "generation")} for entry in shown
    ]
    assert {entry["place"] for entry in shown} >= {"cached"}
    events = read_log(log)
    assert dropped(events) == 0 and {type(event) for event in events} >= {StepEvent, RequestEvent}
    ended = [event.request for event in events if isinstance(event, RequestEvent) and event.what == "ended"]
    assert len(ended) == 40 == len(set(ended))
    finished = {event.request for event in events if isinstance(event, RequestEvent) and event.reason == "length"}
    admitted = {event.request for event in events if isinstance(event, RequestEvent) and event.what == "admitted"}
    histories = [event for event in events if isinstance(event, HistoryEvent)]
    recorded = [event.request for event in histories]
    assert len(recorded) == len(set(recorded)) and finished <= set(recorded) <= admitted
    assert all(len(event.blocks) == (event.prompt + event.answer) // event.block for event in histories)
    check(trace_events(events))


def count_moves(log: Path) -> int:
    return sum(isinstance(event, MoveEvent) for event in read_log(log))
