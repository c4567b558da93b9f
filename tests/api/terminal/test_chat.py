"""`baton chat` with piped input against the fake server: turns, commands, refusals."""

import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from baton.api import cli
from baton.api.cli import commands
from baton.api.terminal.chat import chat
from baton.api.terminal.client import ChatClient, ChatError, EndEvent, Event, SessionInfo, TextEvent
from tests.api.server_process import ROOT, ServerProcess

HELLO = "Hello, wörld."
MODELS = b'{"data": [{"id": "m"}]}'
TURN = b"""\
data: {"type": "turn.delta", "text": "Hello\\u001b[2J"}

data: {"type": "turn.ended", "turn": 1, "status": "completed", "position": 9, "finish_reason": "stop",\
 "usage": {"prompt_tokens": 4, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 0}}}

data: {"error": {"message": "the disk is full\\u001b", "type": "server_error", "param": null,\
 "code": "session_not_saved"}}

data: [DONE]

"""
Say = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(["tests.api.fake_server", "plain"]) as running:
        yield running


@pytest.fixture
def say(server: ServerProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Say:
    """Return a function that types lines into the chat, calls callables between them, and returns exit code and output.

    The output is two strings: standard output and standard error.
    """

    def run(*lines: str | Callable[[], object], **options: Any) -> tuple[int, str, str]:
        typed = iter(lines)

        def read(_: str) -> str:
            for line in typed:
                if isinstance(line, str):
                    return line
                line()
            raise EOFError

        monkeypatch.setattr("builtins.input", read)
        code = chat(**{"url": server.url, **options})
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def typed_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make standard input a terminal, without readline."""
    terminal = StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)


def latest(server: ServerProcess) -> Any:
    """Return the most recently used session with its turns."""
    [first, *_] = server.get("/v1/sessions")["data"]
    return server.get(f"/v1/sessions/{first['id']}")


def said(session: Any) -> list[list[tuple[str, str]]]:
    return [[(message["role"], message["content"]) for message in turn["messages"]] for turn in session["turns"]]


def test_a_turn_sends_only_new_messages(server: ServerProcess, say: Say) -> None:
    assert say("Hi", "", "Again", "/quit", "never", url=f"{server.url}/v1") == (0, f"{HELLO}\n{HELLO}\n", "")
    first = latest(server)
    assert said(first) == [[("user", "Hi")], [("user", "Again")]]
    assert say("Hi", "//new", "/new", "Hi")[0] == 0
    assert said(latest(server)) == [[("user", "Hi")]]
    assert latest(server)["id"] != first["id"]
    assert ("user", "/new") in [message for session in every(server) for turn in said(session) for message in turn]


def every(server: ServerProcess) -> list[Any]:
    return [server.get(f"/v1/sessions/{session['id']}") for session in server.get("/v1/sessions")["data"]]


def test_the_system_message_begins_the_first_turn_only(server: ServerProcess, say: Say) -> None:
    system = [("system", "Be brief.")]
    assert say("a", "b", system="Be brief.") == (0, f"{HELLO}\n{HELLO}\n", "")
    session = latest(server)
    assert said(session) == [[*system, ("user", "a")], [("user", "b")]]
    _, _, error = say("c", "/rewind 0", "d", session=session["id"], system="Be brief.")
    assert "first turn only" in error
    assert said(latest(server)) == [[*system, ("user", "d")]]


def test_settings_go_with_every_turn(server: ServerProcess, say: Say) -> None:
    assert say("a", "b", temperature=0.5, max_tokens=2)[1] == "He\nHe\n"


def test_fork_rewind_and_history(server: ServerProcess, say: Say) -> None:
    code, out, error = say("one", "two", "/fork 1", "three", "/history", "/rewind 1", "/fork", "/history")
    assert (code, error) == (0, "")
    first, second = re.findall(r"Forked (\S+) after turn 1\. This is (\S+) now\.", out)
    assert first[1] == second[0] and len({*first, *second}) == 3
    assert f"1> one\n{HELLO}\n2> three\n{HELLO}\n" in out
    assert out.endswith(f"1> one\n{HELLO}\n")
    assert "Rewound to turn 1, at " in out
    assert said(server.get(f"/v1/sessions/{first[0]}")) == [[("user", "one")], [("user", "two")]]


def test_the_list_of_sessions(server: ServerProcess, say: Say) -> None:
    server.post("/v1/sessions", {"id": "unused"})
    assert server.get("/v1/sessions/unused")["last_turn_at"] is None
    say("other")
    other = latest(server)
    assert other["last_turn_at"] == other["turns"][0]["created_at"]
    code, out, _ = say("this", "/sessions", "/resume 2", "more", "/close", "/sessions")
    assert code == 0
    title, this, second, *_ = out.splitlines()[1:]
    assert title.split() == ["session", "turn", "tokens", "last", "used", "state"]
    assert this.split()[:2] == ["*", "1"] and this.split()[3] == "1"
    assert second.split()[:4] == ["2", other["id"], "1", str(other["position"])]
    assert f"Closed {other['id']}." in out
    assert other["id"] not in out.partition("Closed ")[2].partition("\n")[2]


def test_a_session_is_found_by_the_beginning_of_its_id(server: ServerProcess, say: Say) -> None:
    for id in ("tea-green", "tea-black"):
        assert server.post("/v1/sessions", {"id": id})[0] == 200
    assert say("Hi", session="tea-g")[0] == 0
    assert latest(server)["id"] == "tea-green"
    assert say(session="tea") == (1, "", "baton: 2 sessions begin with tea\n")
    server.post("/v1/sessions", {"id": "tea"})
    assert say("Hi", session="tea")[0] == 0
    assert latest(server)["id"] == "tea"
    say("Hi")
    hexadecimal = latest(server)["id"].removeprefix("session-")
    assert say("/history", session=hexadecimal[:12])[1].endswith(f"1> Hi\n{HELLO}\n")


def test_a_chat_begins_in_a_fork(server: ServerProcess, say: Say) -> None:
    say("Hi")
    origin = latest(server)
    code, out, _ = say("more", fork=origin["id"])
    fork = latest(server)
    assert (code, fork["parent"]) == (0, {"session": origin["id"], "turn": 1})
    assert said(fork) == [[("user", "Hi")], [("user", "more")]]
    assert out.startswith(f"Forked {origin['id']} after turn 1. This is {fork['id']} now.\n")


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["refuse me"], "roles must alternate"),
        (["/dance"], "there is no command /dance"),
        (["Hi", "/rewind"], "which turn?"),
        (["Hi", "/rewind two"], "which turn?"),
        (["Hi", "/rewind 7"], "no turn 7"),
        (["/rewind 1"], "there is no session yet"),
        (["/close"], "there is no session yet"),
        (["/resume"], "which one?"),
        (["/resume 1"], "there is no session 1"),
    ],
)
def test_a_failing_command_ends_a_script(say: Say, lines: list[str], reason: str) -> None:
    code, out, error = say(*lines, "never")
    assert code == 1
    assert error.startswith("baton: ") and reason in error
    assert out.count(HELLO) == len(lines) - 1


def test_an_unknown_session(server: ServerProcess, say: Say) -> None:
    for option in ("session", "fork"):
        assert say("never", **{option: "nowhere"}) == (1, "", "baton: there is no session nowhere\n")


@pytest.mark.usefixtures("typed_by_hand")
def test_an_unknown_session_is_answered_with_the_list(server: ServerProcess, say: Say) -> None:
    server.post("/v1/sessions", {"id": "somewhere"})
    code, out, error = say("/resume 1", "Hi", session="nowhere")
    assert (code, error) == (0, "baton: there is no session nowhere\n")
    assert " 1  somewhere" in out
    assert latest(server)["id"] == "somewhere"


@pytest.mark.usefixtures("typed_by_hand")
def test_another_clients_turn_is_shown_before_continuing(server: ServerProcess, say: Say) -> None:
    def elsewhere() -> None:
        message = {"role": "user", "content": "me too"}
        assert server.post(f"/v1/sessions/{latest(server)['id']}/turns", {"messages": [message]})[0] == 200

    code, out, error = say("one", elsewhere, "two", "", elsewhere, "/rewind 1", "/rewind 1")
    assert code == 0
    assert error.count("the session is at turn ") == 2
    assert error.count(f"> me too\n{HELLO}") == 2
    assert out.endswith("Rewound to turn 1, at 34 tokens.\n\n")


@pytest.mark.usefixtures("typed_by_hand")
def test_a_deleted_session_is_replaced_by_a_new_one(server: ServerProcess, say: Say) -> None:
    gone: list[str] = []

    def close() -> None:
        gone.append(latest(server)["id"])
        ChatClient(server.url, None).close(gone[-1], 1)

    code, out, error = say("one", close, "two", "", close, "/fork", "three")
    assert (code, out.count(HELLO)) == (0, 3)
    assert [f"session {id} is gone" in error for id in gone] == [True, True]
    assert said(latest(server)) == [[("user", "three")]]


@pytest.mark.usefixtures("typed_by_hand")
def test_a_turn_whose_end_was_lost_is_not_sent_twice(
    server: ServerProcess, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection breaks before the turn's end, and the server is unreachable until the line is entered again."""
    turn, settled = ChatClient.turn, ChatClient.settled

    def broken(client: ChatClient, id: str, body: dict[str, Any]) -> Iterator[Event]:
        monkeypatch.setattr(ChatClient, "turn", turn)
        for event in turn(client, id, body):
            if isinstance(event, TextEvent):
                yield event
        raise ChatError("the connection broke")

    def unreachable(*_: object) -> SessionInfo:
        monkeypatch.setattr(ChatClient, "settled", settled)
        raise ChatError("there is nobody")

    monkeypatch.setattr(ChatClient, "turn", broken)
    monkeypatch.setattr(ChatClient, "settled", unreachable)
    code, out, error = say("Hi", "", "more")
    assert (code, out.count(HELLO)) == (0, 3)
    assert f"1> Hi\n{HELLO}\n" in out
    assert "the connection broke" in error
    assert said(latest(server)) == [[("user", "Hi")], [("user", "more")]]


def test_a_session_in_a_turn_is_not_waited_for(say: Say) -> None:
    with ServerProcess(["tests.api.fake_server", "held", "drain_timeout=0.1"]) as held:
        held.post("/v1/sessions", {"id": "busy"})
        body = {"text": "Hi"}
        other = threading.Thread(target=held.post, args=("/v1/sessions/busy/turns", body))
        other.start()
        held.wait_until(lambda: held.get("/v1/sessions/busy")["status"] == "busy")
        code, out, error = say("Hi", "never", session="busy", url=held.url)
        assert (code, out, error) == (1, "", "baton: session 'busy' is in a turn already\n")
        assert say("/sessions", url=held.url)[1].rstrip().endswith("in a turn")
        held.stop()
        other.join()


def test_a_key_is_sent(say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys").write_text("sesame\n")
    with ServerProcess(
        ["tests.api.fake_server", "plain", f"api_key_file={tmp_path / 'keys'}"], wait_ready=False
    ) as guarded:
        guarded.wait_until(lambda: guarded.status("/ready") == 200)
        assert say("Hi", url=guarded.url, api_key="sesame") == (0, f"{HELLO}\n", "")
        code, _, error = say("Hi", url=guarded.url)
        assert code == 1 and "a valid API key is required" in error
        monkeypatch.setenv("BATON_API_KEY", "sesame,other")
        assert cli.main(["chat", "--url", guarded.url]) == 0


def test_the_key_may_come_from_the_environment() -> None:
    assert commands.first_key({"BATON_API_KEY": " one , two"}) == "one"
    assert commands.first_key({"BATON_API_KEY": ""}) is None and commands.first_key({}) is None


def test_no_server(say: Say) -> None:
    code, _, error = say("Hi", url="http://127.0.0.1:1")
    assert code == 1 and "cannot reach http://127.0.0.1:1" in error


@contextmanager
def canned(get: bytes, post: bytes) -> Iterator[str]:
    """Run an HTTP server with fixed answers to GET and POST, and yield its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(get)

        def do_POST(self) -> None:
            self.answer(TURN if self.path.endswith("/turns") else post)

        def answer(self, body: bytes) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as other:
        thread = threading.Thread(target=other.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{other.server_port}"
        finally:
            other.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("get", "post", "reason"),
    [
        (MODELS, b'{"id": 3}', "does not answer like Baton"),
        (b'{"data": []}', b"", "lists no model"),
        (b"<html>", b"", "does not answer like Baton"),
    ],
)
def test_another_kind_of_server(say: Say, get: bytes, post: bytes, reason: str) -> None:
    with canned(get, post) as url:
        code, _, error = say("Hi", url=url)
    assert code == 1 and reason in error


def test_an_answer_that_is_not_saved_is_shown_without_control_characters(say: Say) -> None:
    session = b'{"id": "s", "turn": 0, "position": 0, "status": "idle", "created_at": 1}'
    with canned(MODELS, session) as url:
        assert say("Hi", url=url) == (0, "Hello�[2J\n", "baton: the disk is full�\n")


def test_a_broken_connection_after_the_end_of_a_turn_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def breaking(*_: object, **__: object) -> Iterator[Iterator[bytes]]:
        def lines() -> Iterator[bytes]:
            yield TURN.splitlines()[2]
            raise ConnectionResetError

        yield lines()

    monkeypatch.setattr("baton.api.terminal.client.urlopen", breaking)
    [event] = ChatClient("http://nowhere", None).turn("s", {})
    assert isinstance(event, EndEvent)


def test_a_turn_that_is_ending_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [SessionInfo(id="s", turn=0, position=0, status=status, created_at=1) for status in ("busy", "busy", "idle")]
    answers = iter(seen)
    monkeypatch.setattr(ChatClient, "session", lambda *_: next(answers))
    assert ChatClient("http://nowhere", None).settled("s") is seen[2]


def test_a_pipe_gets_the_answers_alone(server: ServerProcess) -> None:
    command = [sys.executable, "-m", "baton.api.cli", "chat", "--url", server.url]
    run = subprocess.run(command, cwd=ROOT, input=b"Hi\n\xff\n", capture_output=True, timeout=60)
    assert (run.returncode, run.stdout.decode(), run.stderr) == (0, f"{HELLO}\n{HELLO}\n", b"")
    assert said(latest(server))[1] == [("user", "\ufffd")]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as talk:
        assert talk.stdin is not None and talk.stdout is not None and talk.stderr is not None
        talk.stdout.close()
        talk.stdin.write(b"Hi\n")
        talk.stdin.flush()
        assert (talk.wait(60), talk.stderr.read()) == (1, b"")
