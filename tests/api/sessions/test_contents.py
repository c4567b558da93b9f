"""Session files with valid checksums and wrong contents are set aside as damaged; other sessions are served."""

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from baton.actors.tokens import pack
from baton.api.sessions.files import SessionFiles
from baton.api.sessions.records import LogRecord, RewindRecord, SessionHeader, TurnRecord, encode, record_of
from baton.api.sessions.restore import read_sessions
from tests.api.server_process import ServerProcess
from tests.api.sessions.test_records import HEADER, turn
from tests.api.test_process import FAKE

VOCABULARY = 300
FIRST = record_of(turn(1))
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
SOUND: list[LogRecord] = [
    msgspec.structs.replace(HEADER, owner=b""),
    msgspec.structs.replace(FIRST, output=pack([VOCABULARY - 1, 0])),
]


def second(**changed: Any) -> list[LogRecord]:
    """Return the records of a session whose second turn is sound, except for these fields."""
    record = msgspec.structs.replace(FIRST, previous=1, number=2, start=3, output=b"")
    return [*SOUND, msgspec.structs.replace(record, **changed)]


def said(**message: Any) -> list[LogRecord]:
    """Return the records of a session with one message, which is sound except for these fields."""
    return second(messages=({"role": "user", "content": "Hi"} | message,))


def opened(**changed: Any) -> list[LogRecord]:
    """Return the records of a session whose header is sound, except for these fields."""
    header, *rest = second()
    assert isinstance(header, SessionHeader)
    return [msgspec.structs.replace(header, **changed), *rest]


WRONG: dict[str, tuple[list[LogRecord], str]] = {
    "half a token in": (second(input=b"\0" * 6), "turn 2 is invalid: its input has 6 bytes"),
    "half a token out": (second(output=b"\0" * 3), "turn 2 is invalid: its output has 3 bytes"),
    "negative token": (second(output=pack([5, -7])), "turn 2 is invalid: its output has token -7"),
    "start beyond the history": (second(start=4), "turn 2 is invalid: it starts at token 4 of a history of 3"),
    "start beyond nothing": (second(previous=0, start=1), "it starts at token 1 of a history of 0"),
    "negative start": (second(start=-1), "Expected `int` >= 0 - at `$.start`"),
    "a number again": (second(number=1), "turn 1 follows turn 1"),
    "number 0": (second(previous=0, start=0, number=0), "turn 0 follows turn 1"),
    "no next number": (second(number=2**64 - 1), "Expected `int` <= 9007199254740992 - at `$.number`"),
    "message without a role": (second(messages=({"content": "Hi"},)), "missing required field `role`"),
    "message without content": (second(messages=({"role": "user"},)), "missing required field `content`"),
    "unknown role": (said(role="cat"), "Invalid enum value 'cat' - at `$[0].role`"),
    "content in parts": (said(content=[{"type": "text"}]), "Expected `str`, got `array` - at `$[0].content`"),
    "call without a function": (said(tool_calls=[{"id": "c"}]), "missing required field `function`"),
    "arguments that are a list": (
        said(tool_calls=[CALL | {"function": {"name": "f", "arguments": []}}]),
        "got `array` - at `$[0].tool_calls[0].function.arguments`",
    ),
    "ids that are numbers": (said(item_ids=[1]), "Expected `str`, got `int` - at `$[0].item_ids[0]`"),
    "no JSON": (said(name={(1, 2): 3}), "its messages are invalid: "),
    "answer without anything": (second(parts={}), "missing required field"),
    "answer without content": (second(parts={"tool_calls": [CALL]}), "missing required field"),
    "endless timeout": (opened(idle_timeout=float("nan")), "Expected `float` >= 0.0 - at `$.idle_timeout`"),
    "negative last number": (opened(last_number=-1), "Expected `int` >= 0 - at `$.last_number`"),
    "negative rewind": ([*SOUND, RewindRecord(-1)], "Expected `int` >= 0 - at `$.number`"),
}


@pytest.fixture
def files(tmp_path: Path) -> Iterator[SessionFiles]:
    files = SessionFiles(tmp_path)
    yield files
    files.close()


def restored(files: SessionFiles) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the keys of the sessions that are restored, and the lines of the log."""
    with capture_logs() as log:
        found = [session.key for session, _ in read_sessions(files, VOCABULARY, lambda: 0.0)]
    return found, [dict(line) for line in log]


@pytest.mark.parametrize(("records", "why"), WRONG.values(), ids=list(WRONG))
def test_wrong_contents_are_set_aside_with_the_reason(
    files: SessionFiles, tmp_path: Path, records: list[LogRecord], why: str
) -> None:
    files.replace("good", SOUND)
    files.replace("wrong", records)
    found, [line] = restored(files)
    assert (found, line["event"]) == (["good"], "a session's file is set aside")
    assert why in line["error"] and line["file"] == str(tmp_path / "sessions" / "wrong.damaged")
    assert (tmp_path / "sessions" / "wrong.damaged").read_bytes() == encode(records)


@pytest.mark.parametrize(
    "records",
    [
        second(),
        said(role="assistant", tool_calls=[CALL], reasoning_content="Hm.", item_ids=["a"]),
        said(role="tool", tool_call_id="c", name="f"),
        said(role="assistant", tool_calls=[CALL | {"function": {"name": "f", "arguments": "{cut off"}}], more=[1]),
        second(messages=None, parts={"role": "assistant", "content": "", "tool_calls": [CALL]}),
        second(input=b"", start=0),
    ],
)
def test_contents_that_a_server_writes_are_restored(files: SessionFiles, records: list[LogRecord]) -> None:
    files.replace("k", records)
    assert restored(files) == (["k"], [])


@pytest.mark.parametrize("token", [VOCABULARY, 2**31 - 1])
def test_a_token_of_another_model_in_a_dropped_turn_counts(files: SessionFiles, tmp_path: Path, token: int) -> None:
    """A rewind or a branch may make any turn the last one again. The file stays for the model that it is from."""
    head = msgspec.structs.replace(FIRST, previous=0, number=3, start=0, output=b"")
    assert isinstance(head, TurnRecord)
    files.replace("k", [*second(output=pack([token])), head])
    found, [line] = restored(files)
    assert (found, line["event"]) == ([], "a session is of another model")
    assert (tmp_path / "sessions" / "k.log").exists()


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))  # the address of a socket has at most 108 bytes


IRREGULAR: dict[str, Callable[[Path], None]] = {
    "FIFO": os.mkfifo,
    "folder": Path.mkdir,
    "socket": make_socket,
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("make", IRREGULAR.values(), ids=list(IRREGULAR))
def test_what_is_no_file_is_not_opened(
    files: SessionFiles, tmp_path: Path, make: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files.replace("good", SOUND)
    make(tmp_path / "sessions" / "k.log")
    found, [line] = restored(files)
    assert (found, line["error"]) == (["good"], "it is no regular file")
    assert os.path.lexists(tmp_path / "sessions" / "k.damaged")


def test_a_folder_where_a_temporary_file_is_expected_stays(files: SessionFiles, tmp_path: Path) -> None:
    files.replace("good", SOUND)
    (tmp_path / "sessions" / "k.tmp").mkdir()
    found, [line] = restored(files)
    assert (found, line["event"]) == (["good"], "a temporary file is not deleted")


def test_a_log_that_became_a_fifo_is_not_waited_for(files: SessionFiles, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "sessions" / "k.log")
    with pytest.raises(OSError, match="No such device or address"):
        files.append("k", SOUND, 0)
    size = files.replace("k", SOUND)
    assert (tmp_path / "sessions" / "k.log").stat().st_size == size


def test_a_server_with_wrong_contents_in_its_folder_serves_the_others(tmp_path: Path) -> None:
    logs = tmp_path / "sessions"
    logs.mkdir()
    sound = [SOUND[0], msgspec.structs.replace(FIRST, output=pack([7, 0]))]
    (logs / "good.log").write_bytes(encode(sound))
    for name, (records, _) in WRONG.items():
        (logs / f"{name}.log").write_bytes(encode(records))
    os.mkfifo(logs / "fifo.log")
    with ServerProcess([FAKE, "plain", f"session_dir={tmp_path}"]) as server:
        [session] = server.get("/v1/sessions")["data"]
        assert (session["id"], session["position"]) == ("s", 3)
        status, answer = server.post("/v1/sessions/s/turns", {"messages": [{"role": "user", "content": "Hi"}]})
        assert status == 200, answer
    aside = [line for line in server.log if line["event"] == "a session's file is set aside"]
    assert sorted(Path(line["file"]).stem for line in aside) == sorted([*WRONG, "fifo"])
    assert "Traceback" not in "".join(server.output)
