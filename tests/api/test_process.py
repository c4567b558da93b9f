"""The server's process around a fake ring: a port that answers during loading, drain, signals, exit codes, log."""

import signal
import socket
import threading
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from tests.api.server_process import ServerProcess

FAKE = "tests.api.fake_server"
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


def post_in_background(server: ServerProcess, path: str, body: Any) -> tuple[threading.Thread, list[Any]]:
    answers: list[Any] = []

    def post() -> None:
        try:
            answers.append(server.post(path, body))
        except (OSError, HTTPException, ValueError) as error:
            answers.append(error)

    thread = threading.Thread(target=post)
    thread.start()
    server.wait_until(lambda: server.get("/server_info")["open_requests"] > 0)
    return thread, answers


def test_serve_answer_and_stop() -> None:
    with ServerProcess([FAKE, "plain"]) as server:
        status, answer = server.post("/v1/chat/completions", CHAT)
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "Hello, wörld.")
        assert answer["model"] == "plain"
    line = next(line for line in server.log if line["event"] == "request" and line["endpoint"].startswith("POST"))
    assert (line["status"], line["prompt_tokens"], line["cached_tokens"]) == (200, 18, 0)
    assert line["completion_tokens"] == 15
    assert line["finish_reason"] == "stop"
    assert 0 <= line["queue_ms"] <= line["first_token_ms"] <= line["generation_ms"] <= line["total_ms"]
    assert line["request"] == answer["id"]
    assert [line["event"] for line in server.log if line["event"] in ("listening", "sized", "ready", "drained")] == [
        "listening", "sized", "ready", "drained",
    ]  # fmt: skip
    assert "Hi" not in str(line)


def test_malformed_requests_do_not_fill_the_log() -> None:
    with ServerProcess([FAKE, "plain"]) as server:
        assert server.status("/" + "x" * 9000) == 400
        with pytest.raises(HTTPError, match="400"):
            urlopen(Request(server.url + "/generate", b'{"text": "a"}', {"Content-Encoding": "gzip"}), timeout=10)
    assert not [line for line in server.log if line["level"] == "error"]
    assert "Traceback" not in "".join(server.output)


def test_sigterm_lets_open_requests_finish() -> None:
    with ServerProcess([FAKE, "pausing"]) as server:
        thread, answers = post_in_background(server, "/generate", {"text": "a"})
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("draining")
        assert server.status("/ready") == 503
        assert server.post("/generate", {"text": "b"})[0] == 503
        thread.join()
        assert answers[0][0] == 200
        assert answers[0][1]["text"] == "Hello, wörld."
        assert server.wait() == 0


def test_sigterm_answers_503_to_unfinished_requests() -> None:
    with ServerProcess([FAKE, "held", "drain_timeout=0.1"]) as server:
        thread, answers = post_in_background(server, "/generate", {"text": "a"})
        assert server.stop() == 0
        thread.join()
        assert (answers[0][0], answers[0][1]["error"]["code"]) == (503, "draining")


def test_a_second_signal_ends_at_once() -> None:
    with ServerProcess([FAKE, "held"], exit_code=4) as server:
        thread, answers = post_in_background(server, "/generate", {"text": "a"})
        server.process.send_signal(signal.SIGINT)
        server.wait_for("draining")
        assert server.stop() == 4
        thread.join()
        assert isinstance(answers[0], Exception) or answers[0][0] == 503


def test_the_port_answers_while_the_model_loads() -> None:
    with ServerProcess([FAKE, "slow"], wait_ready=False) as server:
        assert (server.status("/health"), server.status("/ready"), server.status("/v1/models")) == (200, 503, 503)
        status, answer = server.post("/v1/chat/completions", CHAT)
        assert (status, answer["error"]["code"]) == (503, "loading")


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6, or no socket for both")
@pytest.mark.parametrize(("host", "versions"), [("::", [4, 6]), ("::1", [6])])
def test_the_address_of_all_interfaces_takes_ipv4_and_ipv6(host: str, versions: list[int]) -> None:
    with ServerProcess([FAKE, "plain", f"host={host}"]) as server:
        own = server.url
        assert own.startswith(f"http://[{host}]:")
        answering = []
        for version, address in ((4, "127.0.0.1"), (6, "[::1]")):
            server.url = f"http://{address}:{own.rpartition(':')[2]}"
            answering += [version] if server.status("/ready") == 200 else []
    assert answering == versions


@pytest.mark.parametrize("option", ["host=no.such.host.invalid", "host=127.0.0.1"])
def test_a_port_that_cannot_be_had(option: str) -> None:
    with ServerProcess([FAKE, "plain"]) as first:
        port = first.url.rpartition(":")[2]
        second = ServerProcess([FAKE, "plain", f"port={port}", option])
        assert second.wait() == 1
        assert "baton: cannot listen on" in "".join(second.output)
        assert "Traceback" not in "".join(second.output)
        second.kill()


def test_a_model_that_cannot_be_loaded() -> None:
    server = ServerProcess([FAKE, "broken"])
    assert server.wait() == 1
    assert server.output[-1] == "baton: org/model is not a folder\n"
    server.kill()


def test_a_ring_that_fails_answers_everyone_and_ends_the_process() -> None:
    with ServerProcess([FAKE, "dying"], exit_code=3) as server:
        status, answer = server.post("/generate", {"text": "a"})
        assert (status, answer["error"]["type"]) == (500, "server_error")
        assert server.wait() == 3
    [line] = [line for line in server.log if line["event"] == "the ring failed"]
    assert "the device is on fire" in line["exception"]
