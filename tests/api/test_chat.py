"""`baton chat` against the fake server: streaming, history, refusals."""

import json
from collections.abc import Iterator

import pytest

from api.chat import chat
from tests.api.server_process import ServerProcess


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(["tests.api.fake_server", "plain"]) as running:
        yield running


def talk(monkeypatch: pytest.MonkeyPatch, url: str, *lines: str, **options: str) -> int:
    said = iter(lines)

    def read(_: str) -> str:
        try:
            return next(said)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    return chat(url, **options)  # type: ignore[arg-type]


def test_answers_are_printed_and_remembered(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(monkeypatch, f"{server.url}/v1", "Hi", "", "Again", "/new", "Hi", "/help", "/quit", "never") == 0
    out = capsys.readouterr().out
    assert out.count("Hello, wörld.") == 3
    assert out.startswith("plain at ")
    prompts = [line["prompt_tokens"] for line in server.log if line["event"] == "request" and "prompt_tokens" in line]
    assert prompts == [18, 18 + len("Hello, wörld.\nuser:Again\nassistant:".encode()), 18]


def test_a_refusal_is_shown(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(monkeypatch, server.url, "refuse me") == 0
    assert "roles must alternate" in capsys.readouterr().err


def test_no_server(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert talk(monkeypatch, "http://127.0.0.1:1") == 1
    assert "cannot reach http://127.0.0.1:1" in capsys.readouterr().err


def test_control_characters_do_not_reach_the_terminal() -> None:
    from api.chat import printable

    assert printable("a\x1b[2Jb\n\tö") == "a�[2Jb\n\tö"
    assert json.dumps(printable("\x07")) == json.dumps("�")
