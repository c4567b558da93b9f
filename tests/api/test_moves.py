"""Sessions that move from one engine to another, as real processes on loopback."""

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.api.server_process import SERVE, ServerProcess
from tests.api.test_peers import SMALL, generate, prompt, wait_for_link

HISTORY = prompt(11, 300)


@contextmanager
def linked(folder: Path, *options: str) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    """Two engines, "first" and "second", with a link; each with a folder for its sessions."""
    address = f"unix:{folder / 'link'}"
    with ExitStack() as stack:
        first = stack.enter_context(engine(folder, "first", "--peer-listen", address, *options))
        second = stack.enter_context(engine(folder, "second", "--peer", address))
        wait_for_link(first)
        wait_for_link(second)
        yield first, second


def engine(folder: Path, name: str, *options: str) -> ServerProcess:
    return ServerProcess((*SERVE, *SMALL, "--engine-name", name, "--session-dir", str(folder / name), *options))


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    with linked(tmp_path_factory.mktemp("moves")) as both:
        yield both


def turn(server: ServerProcess, session: str, ids: list[int], **fields: Any) -> dict[str, Any]:
    body = {"input_ids": ids, "temperature": 0, "max_tokens": 8, "ignore_eos": True} | fields
    status, answer = server.post(f"/v1/sessions/{session}/turns", body)
    assert status == 200, answer
    return answer


def begin(server: ServerProcess, session: str) -> dict[str, Any]:
    assert server.post("/v1/sessions", {"id": session})[0] == 200
    return turn(server, session, HISTORY)


def test_a_session_moves_with_its_state_and_goes_on_with_the_same_tokens(
    engines: tuple[ServerProcess, ServerProcess],
) -> None:
    first, second = engines
    begin(first, "stays"), begin(first, "moves")
    expected = turn(first, "stays", prompt(12, 40))
    status, moved = first.post("/v1/sessions/moves/move", {"engine": "second"})
    assert (status, moved["engine"]) == (200, "second"), moved
    shown = second.get("/v1/sessions/moves")
    assert shown["turn"] == 1 and shown["state"]["tier"] == "host" and shown["saved"]
    assert shown["state"]["position"] >= len(HISTORY)
    found = turn(second, "moves", prompt(12, 40))
    assert found["output_ids"] == expected["output_ids"]
    assert (found["resumed_from"], found["lost"]) == ("host", "")
    status, gone = first.post("/v1/sessions/moves/turns", {"input_ids": [1]})
    assert status == 404 and gone["error"]["code"] == "session_moved" and "second" in gone["error"]["message"]
    assert "moves" not in [each["id"] for each in first.get("/v1/sessions")["data"]]


def test_a_session_moves_back(engines: tuple[ServerProcess, ServerProcess]) -> None:
    first, second = engines
    begin(first, "there-and-back")
    for source, target in ((first, "second"), (second, "first")):
        assert source.post("/v1/sessions/there-and-back/move", {"engine": target})[0] == 200
    assert turn(first, "there-and-back", prompt(13, 20))["resumed_from"] == "host"


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"engine": "nobody"}, 503, "session_not_moved"),
        ({"engine": "second", "after": 7}, 409, "session_moved_on"),
        ({"engine": ""}, 400, None),
        ({}, 400, None),
    ],
)
def test_a_session_that_cannot_move_stays(
    engines: tuple[ServerProcess, ServerProcess], body: dict[str, Any], status: int, code: str | None
) -> None:
    first, _ = engines
    name = f"stays-{status}-{len(body)}-{body.get('engine')}"
    begin(first, name.rstrip("-"))
    found, answer = first.post(f"/v1/sessions/{name.rstrip('-')}/move", body)
    assert found == status and (code is None or answer["error"]["code"] == code), answer
    assert turn(first, name.rstrip("-"), prompt(14, 10))["turn"] == 2


def test_an_id_that_the_peer_has_already_is_refused(engines: tuple[ServerProcess, ServerProcess]) -> None:
    first, second = engines
    begin(first, "both"), begin(second, "both")
    status, answer = first.post("/v1/sessions/both/move", {"engine": "second"})
    assert status == 503 and "exists already" in answer["error"]["message"]
    assert turn(first, "both", prompt(15, 10))["turn"] == 2 and turn(second, "both", prompt(15, 10))["turn"] == 2


def test_a_paused_engine_is_asked_for_nothing(engines: tuple[ServerProcess, ServerProcess]) -> None:
    first, second = engines

    def takes_nothing() -> bool:
        [link] = second.get("/debug/peers")
        return bool(link["draining"])

    assert not takes_nothing()
    assert first.post("/pause_generation", {"mode": "retract"})[0] == 200
    first.wait_until(takes_nothing)
    assert first.post("/continue_generation", {})[0] == 200
    first.wait_until(lambda: not takes_nothing())


def test_a_server_without_peers_moves_nothing(tmp_path: Path) -> None:
    with engine(tmp_path, "alone") as alone:
        begin(alone, "stays")
        status, answer = alone.post("/v1/sessions/stays/move", {"engine": "second"})
        assert (status, answer["error"]["code"]) == (400, "no_peers")


def test_a_drain_hands_all_sessions_over(tmp_path: Path) -> None:
    """The engine that ends hands its sessions to the one of --drain-to, with their states."""
    with linked(tmp_path, "--drain-to", "second") as (first, second):
        for number in range(5):
            begin(first, f"session-{number}")
        first.process.send_signal(signal.SIGTERM)
        assert first.process.wait(30) == 0
        assert {each["id"] for each in second.get("/v1/sessions")["data"]} == {f"session-{n}" for n in range(5)}
        for number in range(5):
            assert turn(second, f"session-{number}", prompt(16, 10))["resumed_from"] == "host"


def test_the_hand_over_and_the_drain_share_their_time(tmp_path: Path) -> None:
    """A session whose turn goes on for longer cannot be handed over, and its turn is ended when the time is over."""
    with linked(tmp_path, "--drain-to", "second", "--drain-timeout", "3") as (first, _), ThreadPoolExecutor() as pool:
        assert first.post("/v1/sessions", {"id": "long"})[0] == 200
        body = {"input_ids": prompt(18, 10), "max_tokens": 100_000, "ignore_eos": True, "speculation": "off"}
        answer = pool.submit(first.post, "/v1/sessions/long/turns", body)
        first.wait_until(lambda: first.get("/server_info")["open_requests"] == 1)
        began = time.monotonic()
        first.process.send_signal(signal.SIGTERM)
        assert first.process.wait(30) == 0
        assert 3 <= time.monotonic() - began < 5.5 and answer.result()[0] == 503


def test_a_drain_hands_over_states_that_no_session_has(tmp_path: Path) -> None:
    with linked(tmp_path, "--drain-to", "second") as (first, second):
        prompts = [prompt(17 + number, 60) for number in range(4)]
        expected = [generate(first, tokens) for tokens in prompts]
        first.process.send_signal(signal.SIGTERM)
        assert first.process.wait(30) == 0
        for tokens, before in zip(prompts, expected, strict=True):
            answer = generate(second, tokens)
            assert answer["output_ids"] == before["output_ids"]
            assert answer["meta_info"]["cached_tokens"] >= len(tokens) - 1, "the state came from the engine that ended"
