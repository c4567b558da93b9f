"""scripts/trace on the log of a ring in this process and on made-up logs. tests/api tests a real server's log."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from baton.actors.runtime.events import (
    ActEvent,
    DroppedEvent,
    Event,
    HeaderEvent,
    MessageEvent,
    MoveEvent,
    RequestEvent,
    StepEvent,
    UnitEvent,
)
from scripts.tracing.events import trace_events
from scripts.tracing.log import Holding, dropped, read_log, rebuild_ledger
from scripts.tracing.together import events_of_engines
from tests.actors.runtime.test_tracing import record_ring
from tests.api.server_process import ROOT
from tests.scripts.trace_format import TraceEvent, check

HEADER = HeaderEvent(1, 1.7e9, 100.0)
TRACE = "a" * 32
TIMES = ("at", "sent", "delivered", "handled", "began", "ended")


def made_up() -> list[Event]:
    """Return the log of a request with one step, including what the API and the device did."""
    return [
        HEADER,
        UnitEvent(100.0, 2),
        MoveEvent(100.2, 1, 1, "owned", "cache", "take"),
        MessageEvent(1, "Submit", "api", "scheduler", 100.1, 100.2, 100.3, TRACE, requests=("r",)),
        RequestEvent(100.1, "r", "queued", TRACE, 3),
        ActEvent("scheduler", 100.4, 100.6),
        MessageEvent(2, "Step", "scheduler", "forward", 100.5, 100.7, 100.8, step=1),
        StepEvent(1, 100.75, 101.0, 1, 3),
        MessageEvent(3, "Ran", "device", "forward", 101.1, 101.2, 101.3, step=1),
        RequestEvent(101.2, "r", "admitted", TRACE),
        RequestEvent(101.3, "r", "first_token", tokens=1),
        MoveEvent(101.4, 1, 1, "cached", "node 5", "cache"),
        RequestEvent(101.5, "r", "ended", tokens=1, reason="length"),
    ]


def write(path: Path, log: Sequence[Event]) -> Path:
    path.write_bytes(msgspec.json.Encoder().encode_lines(log))
    return path


def of_phase(events: Sequence[TraceEvent], phase: str) -> list[TraceEvent]:
    return [event for event in events if event["ph"] == phase]


def tracks(events: Sequence[TraceEvent]) -> dict[tuple[int, int], str]:
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}


def test_each_message_flows_from_its_sender_to_its_receiver() -> None:
    events = trace_events(made_up())
    check(events)
    names = tracks(events)
    ends = {(e["id"], e["ph"]): (names[e["pid"], e["tid"]], e["ts"]) for e in events if e["ph"] in "sf"}
    assert ends[1, "s"] == ("api", 100_000.0) and ends[1, "f"] == ("scheduler", 200_000.0)
    assert ends[2, "s"] == ("scheduler", 500_000.0) and ends[2, "f"] == ("forward", 700_000.0)
    assert ends[3, "s"] == ("device", pytest.approx(1_000_000)) and ends[3, "f"] == ("forward", 1_200_000.0)
    [work] = [id for id, _ in ends if id > 3 and (id, "s") in ends and (id, "f") in ends][:1]
    assert ends[work, "s"][0] == "forward" and ends[work, "f"] == ("device", 750_000.0)


def test_tracks_show_the_work_of_actors_and_the_holders_of_slots() -> None:
    events = trace_events(made_up())
    names = tracks(events)
    did = [(names[e["pid"], e["tid"]], e["name"], e["ts"], e["dur"]) for e in of_phase(events, "X")]
    assert ("scheduler", "Submit", 200_000.0, 100_000.0) in did
    assert ("scheduler", "act", 400_000.0, 200_000.0) in did
    assert ("api", "send Submit", 100_000.0, 1.0) in did
    assert ("device", "step 1", 750_000.0, 250_000.0) in did
    assert [each for each in did if each[0].startswith("slot")] == [
        ("slot 1", "cache", 200_000.0, 1_200_000.0),
        ("slot 1", "node 5", 1_400_000.0, 100_000.0),
    ]
    [submit] = [e for e in events if e["ph"] == "X" and e["name"] == "Submit"]
    assert (submit["args"]["trace"], submit["args"]["waited_us"]) == (TRACE, 100_000.0)


def test_a_request_is_a_span_with_its_phases() -> None:
    spans = [(e["ph"], e["name"], e["ts"] / 1e6) for e in trace_events(made_up()) if e.get("cat") == "request"]
    assert spans == [
        ("b", "r", 0.1), ("b", "queued", 0.1), ("e", "queued", 1.2), ("b", "prefill", 1.2), ("e", "prefill", 1.3),
        ("b", "decode", 1.3), ("e", "decode", 1.5), ("e", "r", 1.5),
    ]  # fmt: skip


def test_engines_share_a_scale_of_time_and_no_track_or_id() -> None:
    later = [HeaderEvent(1, HEADER.unix_time + 2.0, 7.0), *map(_shifted, made_up()[1:])]
    events = events_of_engines([("decode", made_up()), ("prefill", later)])
    check(events)
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert processes == {1: "ring of decode", 2: "slots of decode", 3: "ring of prefill", 4: "slots of prefill"}
    spans = [event for event in of_phase(events, "b") if event["args"].get("trace") == TRACE]
    assert [(event["pid"], event["ts"]) for event in spans] == [(1, pytest.approx(1e5)), (3, pytest.approx(2.1e6))]


def _shifted(event: Event) -> Event:
    """Return the event of an engine whose clock reads 93 seconds less."""
    times = {name: getattr(event, name) - 93.0 for name in TIMES if hasattr(event, name)}
    return msgspec.structs.replace(event, **times)


def test_spans_that_are_open_at_the_end_are_closed() -> None:
    log = [event for event in made_up() if not (isinstance(event, RequestEvent) and event.what == "ended")]
    events = trace_events(log)
    check(events)
    [end] = [e for e in of_phase(events, "e") if e["name"] == "r"]
    assert end["args"]["finish_reason"] == "open at the end of the log"


@pytest.mark.parametrize("restart", [False, True])
def test_the_trace_of_a_ring_is_well_formed(restart: bool) -> None:
    recorded, answers, ring = record_ring(restart)
    log = [HeaderEvent(1, 0.0, min(e.at for e in recorded if isinstance(e, UnitEvent))), *recorded]
    events = trace_events(log)
    check(events)
    messages = [event for event in recorded if isinstance(event, MessageEvent)]
    flows = [event["id"] for event in of_phase(events, "s")]
    assert {message.sequence for message in messages} <= set(flows)
    ids = {event["id"] for event in of_phase(events, "b")}
    assert ids == {answer.request.id for answer in answers}
    known = [(entry.place, entry.holder, entry.generation) for entry in ring.relay.ledger.entries]
    assert [(holding.place, holding.holder, holding.generation) for holding in rebuild_ledger(log)] == known


def test_the_ledger_is_reset_by_each_unit() -> None:
    log = [*made_up(), UnitEvent(102.0, 1), MoveEvent(103.0, 0, 1, "owned", "cache", "take")]
    assert rebuild_ledger(log) == [Holding(0, "owned", "cache", 1)]
    assert rebuild_ledger(made_up()) == [Holding(0, "free", "pool", 0), Holding(1, "cached", "node 5", 1)]


def test_a_log_that_ends_within_a_line_is_read_up_to_there(tmp_path: Path) -> None:
    path = write(tmp_path / "log", made_up())
    path.write_bytes(path.read_bytes()[:-5])
    assert read_log(path) == made_up()[:-1]


@pytest.mark.parametrize("content", [b"", b"\n", b'{"type":"act"}\n', b"not json\n"])
def test_an_invalid_log_is_rejected(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "log").write_bytes(content)
    with pytest.raises(ValueError, match="log"):
        read_log(tmp_path / "log")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    script = str(ROOT / "scripts" / "trace")
    return subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, timeout=60)


def test_the_command_writes_the_trace_and_prints_the_ledger(tmp_path: Path) -> None:
    log = write(tmp_path / "log", [*made_up(), DroppedEvent(3), DroppedEvent(2)])
    assert dropped(read_log(log)) == 5
    done = run(str(log), "-o", str(tmp_path / "out.json"))
    assert done.returncode == 0 and "5 events are missing" in done.stderr
    check(json.loads((tmp_path / "out.json").read_text())["traceEvents"])
    slots = run(str(log), "--slots")
    assert json.loads(slots.stdout)[1] == {"slot": 1, "place": "cached", "holder": "node 5", "generation": 1}
    text = run(str(log), "--text")
    assert "    2  scheduler → forward    Step         step 1" in text.stdout.splitlines()
    assert text.stdout.splitlines().count("        slot 1 is held by cache") == 1
    nothing = run(str(tmp_path / "absent"))
    assert nothing.returncode == 1 and "absent" in nothing.stderr and "Traceback" not in nothing.stderr
