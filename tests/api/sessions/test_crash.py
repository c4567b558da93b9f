"""kill -9: everything acknowledged is there after a restart, and sessions continue as if nothing had happened."""

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from tests.api.server_process import SERVE, ServerProcess

SMALL = ("--memory", "256M", "--host-memory", "64M", "--max-running", "4")
SESSIONS = 4
LONGEST = 1200
SAID = ("My name is Anna.", "What is 3 plus 4?", "What is my name?", "My name is Boris.", "What is 9 plus 8?")


@dataclass
class Talk:
    """A session as its client knows it."""

    path: str
    reference: str
    texts: list[str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    position: int = 0
    unsure: str | None = None  # message of a last turn that may not be saved, because its end was not read
    suspended: int | None = None  # position of the state that a suspend has stored on disk, if no turn came after


class Crashes:
    """A server that is killed again and again, and a reference server that is not; both must give the same answers."""

    def __init__(self, folder: Path, reference: ServerProcess, seed: int) -> None:
        self.resumed: Counter[str] = Counter()
        self.killed: Counter[str] = Counter()
        self._states = folder / "states"
        self._options = [*SERVE, *SMALL, "--session-dir", str(folder)]
        self._reference = reference
        self._chance = random.Random(seed)
        self._talks: list[Talk] = []

    def round(self) -> None:
        """Start the server, check and continue all sessions, and kill the server during turns or file writes."""
        with suppress(Killed), ServerProcess(self._options) as server:
            for talk in self._talks:
                self._check(server, talk)
            for talk in list(self._talks):
                self._go_on(server, talk)
            while len(self._talks) < SESSIONS:
                self._talks.append(self._new(server))
                self._go_on(server, self._talks[-1])
            for talk in self._chance.sample(self._talks, 2):
                self._suspend(server, talk)
            (self._kill_in_turns if self.killed.total() % 2 else self._kill_in_writes)(server)
            raise Killed

    def end(self) -> None:
        """Start the server, check and continue all sessions, and shut the server down regularly."""
        with ServerProcess(self._options) as server:
            for talk in self._talks:
                self._check(server, talk)
                self._go_on(server, talk)

    def _new(self, server: ServerProcess) -> Talk:
        here, there = (f"/v1/sessions/{post_ok(one, '/v1/sessions', {})['id']}" for one in (server, self._reference))
        return Talk(here, there)

    def _check(self, server: ServerProcess, talk: Talk) -> None:
        """Check that acknowledged turns are there, and a turn whose end was not read is there whole or not at all."""
        turns = server.get(talk.path)["turns"]
        if talk.unsure is not None and len(turns) == len(talk.texts) + 1:
            talk.texts.append(talk.unsure)
            talk.answers.append(self._ask_reference(talk, talk.unsure)["text"])
            talk.position = turns[-1]["position"]
        talk.unsure = None
        assert [turn["messages"][0]["content"] for turn in turns] == talk.texts
        assert [turn["text"] for turn in turns] == talk.answers
        assert [turn["position"] for turn in turns[-1:]] == [talk.position][: len(turns)]

    def _go_on(self, server: ServerProcess, talk: Talk) -> None:
        if talk.position > LONGEST:
            self._talks.remove(talk)
            return
        text = self._chance.choice(SAID)
        answer = post_ok(server, f"{talk.path}/turns", body_of(text))
        assert answer["text"] == self._ask_reference(talk, text)["text"]
        assert answer["start"] == answer["history"] == talk.position
        if talk.suspended is not None and not self._has_twin(talk):
            reused = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert (answer["resumed_from"] == "disk" and reused == talk.suspended) or answer["lost"], answer
        if talk.texts:
            self.resumed[answer["resumed_from"]] += 1
        talk.texts.append(text)
        talk.answers.append(answer["text"])
        talk.position, talk.suspended = answer["position"], None

    def _has_twin(self, talk: Talk) -> bool:
        """Return whether another session begins with the same messages; its state may be in a tier above the disk."""
        return any(other is not talk and other.texts[: len(talk.texts)] == talk.texts for other in self._talks)

    def _suspend(self, server: ServerProcess, talk: Talk) -> None:
        state = post_ok(server, f"{talk.path}/suspend", {})["state"]
        assert state["tier"] == "disk" and 0 < state["position"] <= talk.position
        talk.suspended = state["position"]

    def _kill_in_turns(self, server: ServerProcess) -> None:
        threads = [
            threading.Thread(target=self._read_some, args=(server, talk, self._chance.choice(SAID)))
            for talk in self._talks
        ]
        for thread in threads:
            thread.start()
        time.sleep(self._chance.uniform(0, 0.6))
        self._kill(server, "turns")
        for thread in threads:
            thread.join()

    def _kill_in_writes(self, server: ServerProcess) -> None:
        """Kill the server while a state file is half written, or after 5 to 200 ms if no such file appears."""
        talks = [talk for talk in self._talks if talk.suspended is None]
        threads = [threading.Thread(target=self._suspend_or_die, args=(server, talk)) for talk in talks]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + self._chance.uniform(0.005, 0.2)
        while not (seen := any(self._states.glob("*.tmp"))) and time.monotonic() < deadline:
            pass
        self._kill(server, "half-written file" if seen else "suspending")
        for thread in threads:
            thread.join()

    def _kill(self, server: ServerProcess, when: str) -> None:
        server.kill()
        self.killed[when] += 1

    def _read_some(self, server: ServerProcess, talk: Talk, text: str) -> None:
        """Run a turn. It counts as acknowledged if its end is read before the server is killed."""
        talk.unsure, talk.suspended = text, None
        body = json.dumps(body_of(text) | {"stream": True}).encode()
        request = Request(f"{server.url}{talk.path}/turns", body, {"Content-Type": "application/json"})
        with suppress(OSError, HTTPException), urlopen(request, timeout=60) as response:
            for line in response:
                event = json.loads(line[6:]) if line.startswith(b"data: {") else {}
                if event.get("type") == "turn.ended":
                    assert event["text"] == self._ask_reference(talk, text)["text"]
                    talk.texts.append(text)
                    talk.answers.append(event["text"])
                    talk.position, talk.unsure = event["position"], None

    def _suspend_or_die(self, server: ServerProcess, talk: Talk) -> None:
        with suppress(OSError, HTTPException, ValueError):
            self._suspend(server, talk)

    def _ask_reference(self, talk: Talk, text: str) -> Any:
        return post_ok(self._reference, f"{talk.reference}/turns", body_of(text))


class Killed(Exception):
    pass


def body_of(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 60}


def post_ok(server: ServerProcess, path: str, body: Any) -> Any:
    status, answer = server.post(path, body)
    assert status == 200, answer
    return answer


@pytest.fixture(scope="module")
def reference() -> Iterator[ServerProcess]:
    with ServerProcess([*SERVE, *SMALL]) as running:
        yield running


@pytest.mark.parametrize(
    ("rounds", "seed"), [(3, 1), pytest.param(100, 2, marks=pytest.mark.soak)], ids=["3 times", "100 times"]
)
def test_kill_nine(tmp_path: Path, reference: ServerProcess, rounds: int, seed: int) -> None:
    crashes = Crashes(tmp_path, reference, seed)
    for _ in range(rounds):
        crashes.round()
    crashes.end()
    print(f"killed: {dict(crashes.killed)}; resumed from: {dict(crashes.resumed)}")
    assert crashes.killed["turns"] == rounds // 2
    assert crashes.resumed["disk"] >= rounds
