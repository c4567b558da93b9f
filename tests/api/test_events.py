"""GET /v1/events of a real server with the hash model, and the places that it adds to answers for a router."""

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import msgspec
import pytest

from baton.actors.runtime.digests import Digester
from baton.actors.tokens import pack
from baton.api.events.frames import Change, Snapshot, name_of
from baton.api.events.places import HEADER, PLACES, read_places
from baton.api.resuming import ROUTED
from tests.api.hash_traffic import make_checkpoint
from tests.api.server_process import SERVE, ServerProcess

SOON_S = 10.0
PROMPT = [*range(1, 41)]
OUTPUT = 8
EVENTS = msgspec.json.Decoder(Snapshot | Change)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = make_checkpoint(tmp_path_factory.mktemp("events"))
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    with ServerProcess([*SERVE, str(folder), "--engine-name", "one"]) as running:
        yield running


class Events:
    """The events of a server, and a router's knowledge that follows from them."""

    def __init__(self, server: ServerProcess) -> None:
        self._answer = urlopen(f"{server.url}/v1/events", timeout=SOON_S)
        self.states: dict[str, int] = {}  # position by digest
        self.names: set[str] = set()
        self.snapshot = self._read()
        assert isinstance(self.snapshot, Snapshot)
        self.last: Snapshot | Change = self.snapshot
        self._take(self.snapshot)

    def __enter__(self) -> "Events":
        return self

    def __exit__(self, *_: object) -> None:
        self._answer.close()

    def until(self, condition: Callable[[], bool]) -> None:
        """Read events until the condition holds."""
        deadline = time.monotonic() + SOON_S
        while not condition():
            assert time.monotonic() < deadline
            event = self._read()
            assert isinstance(event, Snapshot) or event.sequence == self.last.sequence + 1
            self._take(event)

    def _read(self) -> Snapshot | Change:
        line = self._answer.readline()
        assert self._answer.readline() == b"\n"
        return EVENTS.decode(line.removeprefix(b"data: "))

    def _take(self, event: Snapshot | Change) -> None:
        if isinstance(event, Snapshot):
            self.states, self.names = {}, set()
        else:
            self.names -= {*event.names_gone}
            for digest in event.gone:
                del self.states[digest]
        self.states |= {state.digest: state.position for state in event.states}
        self.names |= {*event.names}
        self.last = event


def generate(server: ServerProcess, routed: bool = False, **fields: Any) -> tuple[list[int], str]:
    """Return the output, and the places of the answer."""
    params = {"max_new_tokens": OUTPUT, "temperature": 0, "ignore_eos": True}
    headers = {"Content-Type": "application/json"} | ({ROUTED: "1"} if routed else {})
    data = json.dumps({"input_ids": PROMPT, "sampling_params": params} | fields).encode()
    with urlopen(Request(f"{server.url}/generate", data, headers)) as answer:
        return json.load(answer)["output_ids"], answer.headers.get(HEADER, "")


def digest(tokens: list[int], salt: str = "") -> str:
    digester = Digester()
    return f"{int(digester.extended(digester.beginning(salt), 0, pack(tokens))[-1]):016x}"


def test_a_snapshot_and_changes_say_which_states_there_are(server: ServerProcess) -> None:
    with Events(server) as events:
        assert (events.snapshot.name, events.snapshot.phase, events.snapshot.role) == ("one", "ready", "both")
        output, _ = generate(server)
        whole = PROMPT + output
        events.until(lambda: any(position >= len(PROMPT) for position in events.states.values()))
        assert all(state == digest(whole[:position]) for state, position in events.states.items())
        with Events(server) as later:
            assert later.states == events.states and later.snapshot.boot == events.snapshot.boot
        server.get("/flush_cache")
        events.until(lambda: not events.states)
        generate(server, extra_key="salt")
        events.until(lambda: bool(events.states))
        assert all(state == digest(whole[:position], "salt") for state, position in events.states.items())


def test_requests_that_wait_for_a_row_make_a_queue(server: ServerProcess) -> None:
    """Their prompts are cached or short, so that no computation waits."""
    long = {"max_new_tokens": 300, "temperature": 0, "ignore_eos": True}
    with Events(server) as events, ThreadPoolExecutor(64) as threads:
        answers = [threads.submit(generate, server, sampling_params=long) for _ in range(128)]
        events.until(lambda: events.last.load.waiting > 16 and events.last.load.queue_seconds > 0.05)
        for answer in answers:
            answer.result()
        events.until(lambda: events.last.load.queue_seconds == 0)


def test_sessions_and_responses_come_and_go(server: ServerProcess) -> None:
    with Events(server) as events:
        _, session = server.post("/v1/sessions", {})
        _, response = server.post("/v1/responses", {"input": "a", "max_output_tokens": 2})
        names = {name_of(b"", session["id"]), name_of(b"", response["id"])}
        events.until(lambda: names <= events.names)
        for path in (f"/v1/sessions/{session['id']}", f"/v1/responses/{response['id']}"):
            with urlopen(Request(server.url + path, method="DELETE")):
                pass
        events.until(lambda: not names & events.names)


def test_the_load_is_measured_in_seconds(server: ServerProcess) -> None:
    generate(server)
    with Events(server) as events:
        events.until(lambda: events.last.load.token_seconds > 0)
        assert events.last.load.rows == 0 and sum(events.last.load.slots.values()) > 0


def test_an_engine_ends_while_a_router_listens(tmp_path: Path) -> None:
    with ServerProcess([*SERVE, str(make_checkpoint(tmp_path))]) as server, Events(server):
        began = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - began < 4


def test_an_answer_says_where_its_states_lie_if_a_router_asks(server: ServerProcess) -> None:
    assert generate(server)[1] == ""
    output, places = generate(server, routed=True)
    length, found = read_places(places)
    assert length == len(PROMPT)
    positions = [position for position, _ in found]
    assert {position: f"{each:016x}" for position, each in found} == {
        position: digest((PROMPT + output)[:position]) for position in positions
    }
    *known, end, before_last, last = positions
    assert (end, before_last, last) == (len(PROMPT), 47, 48)
    assert known and known[-1] < len(PROMPT), "the first request has left a state within the prompt"


def test_so_does_the_end_of_a_stream(server: ServerProcess) -> None:
    body = {"prompt": PROMPT, "max_tokens": 4, "stream": True}
    for headers, comments in (({ROUTED: "1"}, 1), ({}, 0)):
        request = Request(
            f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"} | headers
        )
        with urlopen(request) as answer:
            frames = answer.read().split(b"\n\n")
        assert sum(frame.startswith(PLACES) for frame in frames) == comments
        if comments:
            assert read_places(frames[-2].removeprefix(PLACES).decode())[0] == len(PROMPT)
