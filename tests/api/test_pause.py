"""Pauses of a real server with the hash model: what stops, what is released, and that every token is right."""

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.models.hash_definition import expected_output
from tests.api.hash_traffic import VOCAB, make_checkpoint, troubles, wait_home
from tests.api.server_process import SERVE, ServerProcess

PROMPT = [7, 8, 9]
LENGTH = 120


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("hash"), delay_ms=[3, 4])


def started(checkpoint: Path, *options: str) -> ServerProcess:
    sizes = ["--state-slots", "8", "--kv-pages", "160", "--page-size", "4", "--max-running", "2"]
    return ServerProcess([*SERVE, str(checkpoint), *sizes, "--max-model-len", "200", *options])


@pytest.fixture
def server(checkpoint: Path) -> Iterator[ServerProcess]:
    with started(checkpoint) as running:
        yield running
    assert troubles(running) == []


class Asking:
    """A request that is sent from its own thread."""

    def __init__(self, server: ServerProcess, number: int, length: int = LENGTH) -> None:
        params = {"max_new_tokens": length, "temperature": 0}
        body = {"input_ids": [number, *PROMPT], "rid": f"r{number}", "sampling_params": params}
        self.right = expected_output([number, *PROMPT], length, VOCAB)
        self._thread = threading.Thread(target=lambda: self._answers.append(server.post("/generate", body)))
        self._answers: list[tuple[int, Any]] = []
        self._thread.start()

    def answer(self) -> tuple[int, Any]:
        self._thread.join(60)
        return self._answers[0]

    def check(self, reason: str = "length") -> None:
        status, answer = self.answer()
        assert status == 200, answer
        assert answer["meta_info"]["finish_reason"]["type"] == reason
        assert answer["output_ids"] == self.right[: len(answer["output_ids"])]
        assert reason == "abort" or answer["output_ids"] == self.right


def gauges(server: ServerProcess) -> Any:
    return server.get("/server_info")["gauges"]


def generated(server: ServerProcess) -> int:
    return int(server.get("/server_info")["counters"].get("generation_tokens", 0))


def three_requests(server: ServerProcess) -> list[Asking]:
    """Start three requests and wait until two run and have tokens, and one waits."""
    asking = [Asking(server, number) for number in range(3)]
    server.wait_until(lambda: gauges(server)["running"] == 2 and gauges(server)["waiting"] == 1)
    before = generated(server)
    server.wait_until(lambda: generated(server) > before + 4)
    return asking


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_paused_requests_continue_where_they_were(server: ServerProcess, mode: str) -> None:
    asking = three_requests(server)
    assert server.post("/pause_generation", {"mode": mode})[0] == 200
    at, figures = generated(server), gauges(server)
    asking.append(Asking(server, 3, length=5))
    server.wait_until(lambda: server.get("/server_info")["open_requests"] == 4)
    held = 2 if mode == "in_place" else 0
    assert (figures["running"], figures["waiting"]) == (held, 3 - held)
    assert (figures["slots"]["owned"], figures["pages"]["used"] > 0) == (held, bool(held))
    assert server.post("/flush_cache", {})[0] == (400 if held else 200)
    assert held or gauges(server)["slots"]["free"] == 8
    assert generated(server) == at and server.get("/server_info")["audit"] == []
    assert server.post("/continue_generation", {})[0] == 200
    for each in asking:
        each.check()
    wait_home(server)


def test_a_pause_that_aborts_ends_all_open_requests(server: ServerProcess) -> None:
    asking = three_requests(server)
    assert server.post("/pause_generation", {})[0] == 200
    for each in asking:
        each.check("abort")
    later = Asking(server, 4, length=5)
    server.wait_until(lambda: gauges(server)["waiting"] == 1)
    figures = gauges(server)
    assert (figures["running"], figures["slots"]["owned"]) == (0, 0)
    assert server.post("/continue_generation", {})[0] == 200
    later.check()
    assert server.post("/continue_generation", {})[0] == 200
    wait_home(server)


def test_a_request_that_waits_in_a_pause_may_be_aborted_or_run_out_of_time(checkpoint: Path) -> None:
    with started(checkpoint, "--request-timeout", "1.5", "--drain-timeout", "0.1") as server:
        running = three_requests(server)
        assert server.post("/pause_generation", {"mode": "in_place"})[0] == 200
        late = Asking(server, 3)
        server.wait_until(lambda: gauges(server)["waiting"] == 2)
        assert server.post("/abort_request", {"rid": "r3"})[1] == {"aborted": 1}
        assert server.post("/abort_request", {"rid": "r0"})[1] == {"aborted": 1}
        late.check("abort")
        running[0].check("abort")
        assert [each.answer()[0] for each in running[1:]] == [504, 504]
        wait_home(server)
        last = Asking(server, 5)
        server.wait_until(lambda: gauges(server)["waiting"] == 1)
        assert server.stop() == 0
        status, answer = last.answer()
        assert (status, answer["error"]["code"]) == (503, "draining")
    assert troubles(server) == []


def test_a_paused_server_may_continue_while_it_drains(checkpoint: Path) -> None:
    with started(checkpoint) as server:
        asking = three_requests(server)
        assert server.post("/pause_generation", {"mode": "retract"})[0] == 200
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("draining")
        assert server.post("/pause_generation", {})[0] == 503
        assert server.post("/continue_generation", {})[0] == 200
        for each in asking:
            each.check()
        assert server.wait() == 0
    assert troubles(server) == []
