"""`baton chat` on a terminal: keys, history, and a server that dies."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.server_process import ROOT, SERVE, ServerProcess
from tests.api.terminal.pty_process import CTRL_C, CTRL_D, CTRL_U, RUN, UP, PtyProcess

HELLO = "Hello, wörld."
Talk = Callable[..., PtyProcess]


@pytest.fixture(scope="module")
def pausing() -> Iterator[ServerProcess]:
    with ServerProcess(["tests.api.fake_server", "pausing"]) as running:
        yield running


@pytest.fixture
def talk(tmp_path: Path) -> Talk:
    """Return a function that starts a chat whose state folder is tmp_path."""
    return lambda server, *options: PtyProcess(
        ["baton.api.cli", "chat", "--url", server.url, *options], {"XDG_STATE_HOME": str(tmp_path)}
    )


def latest(server: ServerProcess) -> Any:
    [first, *_] = server.get("/v1/sessions")["data"]
    return server.get(f"/v1/sessions/{first['id']}")


def test_a_stopped_answer_leaves_the_session_usable(pausing: ServerProcess, talk: Talk) -> None:
    with talk(pausing) as chat:
        chat.expect("> ")
        chat.enter("Hi")
        chat.expect("Hel")
        chat.press(CTRL_C)
        chat.expect(" [stopped]")
        report = chat.expect(" tokens\n> ")
        session = latest(pausing)
        [turn] = session["turns"]
        assert turn["status"] == "disconnected" and HELLO.startswith(turn["text"]) and len(turn["text"]) < len(HELLO)
        start = f"turn 1 was kept with {turn['output_tokens']} tokens of its answer"
        assert f"{start}; the session is at {session['position']} tokens" in report
        chat.enter("Again")
        chat.expect(f"{HELLO}\nturn 2 · 15 tokens · ")
        chat.expect("> ")
        chat.press("half a li")
        chat.expect("half a li")
        chat.interrupt_reading()
        chat.expect("/quit or Ctrl-D leaves.\n> ")
        chat.press(CTRL_D)
        assert chat.wait() == 0
    assert chat.shown.endswith(f"Continue with: baton chat --url {pausing.url} --session {session['id']}\n")
    assert "\x1b[2mturn 2 · 15 tokens · " in chat.raw
    assert [turn["turn"] for turn in latest(pausing)["turns"]] == [1, 2]


def test_stopping_before_the_first_token(talk: Talk) -> None:
    with ServerProcess(["tests.api.fake_server", "held"]) as held, talk(held) as chat:
        chat.expect("> ")
        chat.enter("Hi")
        held.wait_until(lambda: any(s["status"] == "busy" for s in held.get("/v1/sessions")["data"]))
        chat.press(CTRL_C)
        chat.expect("turn 1 was kept with 0 tokens of its answer")
        chat.expect("> ")
        chat.enter("/history")
        chat.expect("1> Hi\n\n[disconnected]\n> ")


def test_a_script_is_ended_by_ctrl_c(pausing: ServerProcess) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", RUN, "baton.api.cli", "chat", "--url", pausing.url],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as script:
        assert script.stdin is not None and script.stdout is not None and script.stderr is not None
        script.stdin.write(b"Hi\nnever\n")
        script.stdin.flush()
        assert script.stdout.read(1) == b"H"
        script.send_signal(signal.SIGINT)
        assert (script.wait(60), script.stderr.read()) == (130, b"")
    pausing.wait_until(lambda: latest(pausing)["status"] == "idle")
    assert [turn["status"] for turn in latest(pausing)["turns"]] == ["disconnected"]


def test_lines_are_remembered_in_a_private_file(pausing: ServerProcess, talk: Talk, tmp_path: Path) -> None:
    file = tmp_path / "baton" / "chat_history"
    file.parent.mkdir()
    file.touch(0o644)
    with talk(pausing, "--api-key", "sesame") as chat:
        for line in ("/sessions", "/help", "/help", " /new"):
            chat.expect("> ")
            chat.enter(line)
        chat.expect("> ")
        chat.enter("/quit")
        assert chat.wait() == 0
    assert file.read_text() == "/sessions\n/help\n/quit\n"
    assert file.stat().st_mode & 0o777 == 0o600
    with talk(pausing) as chat:
        chat.expect("> ")
        chat.enter(UP + UP)
        chat.expect("/sessions      list the sessions")
        chat.expect("> ")
        chat.press(CTRL_D)
        assert chat.wait() == 0


def test_a_server_that_dies_and_comes_back(talk: Talk) -> None:
    with ServerProcess(["tests.api.fake_server", "pausing"], exit_code=-9) as first, talk(first) as chat:
        chat.expect("> ")
        chat.enter("My name is Clara.")
        chat.expect("Hel")
        first.process.kill()
        chat.expect("baton: the server disconnected in mid-answer\nEnter tries again.\n> My name is Clara.")
        first.process.wait()
        chat.enter("")
        chat.expect("cannot reach")
        chat.expect("> My name is Clara.")
        port = first.url.rpartition(":")[2]
        with ServerProcess(["tests.api.fake_server", "pausing", f"port={port}"]) as second:
            chat.enter("")
            chat.expect(" is gone: your next message begins a new one\nEnter tries again.\n> My name is Clara.")
            chat.enter(" Yes.")
            chat.expect(f"{HELLO}\nturn 1 · ")
            chat.expect("> ")
            [turn] = latest(second)["turns"]
            assert turn["messages"] == [{"role": "user", "content": "My name is Clara. Yes."}]


def test_a_refused_line_can_be_edited(pausing: ServerProcess, talk: Talk) -> None:
    with talk(pausing, "--session", "nowhere") as chat:
        chat.expect("baton: there is no session nowhere\n")
        chat.expect("/resume continues one of them; any other message begins a new session.\n> ")
        chat.enter("refuse me")
        chat.expect("roles must alternate\nEnter tries again.\n> refuse me")
        chat.press(CTRL_U)
        chat.enter("refuse nothing")
        chat.expect(f"{HELLO}\nturn 1 · ")


def test_a_turn_resumes_from_the_state(talk: Talk) -> None:
    """With the bundled model the second turn does not compute the tokens of the first again."""
    with ServerProcess([*SERVE, "--memory", "256M"]) as server, talk(server, "--temperature", "0") as chat:
        chat.expect("> ")
        chat.enter("My name is Anna.")
        chat.expect("reused from the state")
        first = latest(server)
        chat.expect("> ")
        chat.enter("What is my name?")
        chat.expect("Anna")
        chat.expect("reused from the state")
        second = latest(server)["turns"][1]
        assert second["start"] == first["position"]
        assert second["cached_tokens"] >= first["position"] - 1
        prompt = second["start"] + second["input_tokens"]
        assert f"{second['cached_tokens']} of {prompt} reused from the state" in chat.shown
