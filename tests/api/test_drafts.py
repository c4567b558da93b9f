"""Drafts through the API: a client's prediction, what the usage says of it, and that answers do not depend on it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from tests.api.hash_traffic import make_checkpoint
from tests.api.server_process import SERVE, ServerProcess

ASCII = 90  # the byte tokenizer's first tokens are printable ASCII characters
TOKENS = 60


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a model whose steps take 4 ms however many tokens they have, so that drafts pay."""
    folder = make_checkpoint(tmp_path_factory.mktemp("drafts"), vocab_size=ASCII, delay_ms=[4, 4])
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    return folder


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[ServerProcess]:
    with ServerProcess([*SERVE, str(checkpoint)]) as running:
        yield running


def ask(server: ServerProcess, **fields: Any) -> tuple[str, int, int]:
    """Return the answer's text, and the numbers of accepted and rejected drafts."""
    body = {
        "messages": [{"role": "user", "content": "Hello,world"}],
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "seed": 3,
    }
    status, answer = server.post("/v1/chat/completions", body | fields)
    assert status == 200, answer
    details = answer["usage"]["completion_tokens_details"]
    counts = details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]
    return answer["choices"][0]["message"]["content"], *counts


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_prediction_makes_drafts_and_changes_no_token(server: ServerProcess, temperature: float) -> None:
    text, *_ = ask(server, temperature=temperature, speculation="off")
    assert len(text) == TOKENS
    parts = [{"type": "text", "text": part} for part in (text[:20], text[20:])]
    for content in (text, parts):
        predicted, accepted, _ = ask(
            server, temperature=temperature, prediction={"type": "content", "content": content}
        )
        assert predicted == text and accepted > TOKENS / 2
    wrong = "".join("a" if at % 8 == 7 and letter != "a" else letter for at, letter in enumerate(text))
    predicted, accepted, rejected = ask(
        server, temperature=temperature, prediction={"type": "content", "content": wrong}
    )
    assert predicted == text and accepted > TOKENS / 6 and rejected > 0
    assert ask(server, temperature=temperature, speculation="off", prediction={"type": "content", "content": text}) == (
        text,
        0,
        0,
    )


def test_drafts_follow_a_grammar(server: ServerProcess) -> None:
    form = {"structured_outputs": {"regex": "[A-Z]{20}-[a-z]{20}[0-9]+"}}
    text, *_ = ask(server, temperature=1, speculation="off", **form)
    assert len(text) == TOKENS and text[20] == "-"
    predicted, accepted, _ = ask(server, temperature=1, prediction={"type": "content", "content": text}, **form)
    assert predicted == text and accepted > TOKENS / 2


def test_responses_count_drafts_too(server: ServerProcess) -> None:
    schema = {"type": "json_schema", "name": "repeated", "schema": {"enum": ["abc" * 15]}}
    status, answer = server.post("/v1/responses", {"input": "a", "text": {"format": schema}})
    assert status == 200 and answer["output"][0]["content"][0]["text"] == '"' + "abc" * 15 + '"'
    assert answer["usage"]["output_tokens_details"]["accepted_prediction_tokens"] > 15


def test_drafts_are_counted_in_the_metrics_and_in_the_log(server: ServerProcess) -> None:
    text, *_ = ask(server, temperature=0)
    _, accepted, _ = ask(server, temperature=0, prediction={"type": "content", "content": text})
    with urlopen(f"{server.url}/metrics") as answer:
        lines = [
            line for line in answer.read().decode().splitlines() if line.startswith("baton:drafts_accepted_total{")
        ]
    assert sum(float(line.split()[-1]) for line in lines) >= accepted > 0 and 'drafter="ngram"' in lines[0]
    assert any(line.get("drafts_accepted") == accepted for line in server.log)


def test_a_wrong_prediction_is_refused_by_name(server: ServerProcess) -> None:
    body = {"messages": [{"role": "user", "content": "a"}]}
    for prediction in (
        {"type": "content"},
        {"type": "image", "content": "a"},
        "a",
        {"type": "content", "content": [1]},
    ):
        status, answer = server.post("/v1/chat/completions", body | {"prediction": prediction})
        assert status == 400 and answer["error"]["param"].startswith("prediction")
    for content in ("a" * 5000, "\u00e9"):  # longer than the context, and with tokens that the model does not have
        status, answer = server.post(
            "/v1/chat/completions", body | {"prediction": {"type": "content", "content": content}}
        )
        assert (status, answer["error"]["param"]) == (400, "prediction")
    status, answer = server.post("/v1/chat/completions", body | {"speculation": "always"})
    assert status == 400 and answer["error"]["param"] == "speculation"


def test_a_server_without_drafts_takes_the_same_requests(checkpoint: Path, server: ServerProcess) -> None:
    text, *_ = ask(server, temperature=0)
    with ServerProcess([*SERVE, str(checkpoint), "--speculation", "off"]) as other:
        assert ask(other, temperature=0, prediction={"type": "content", "content": text}) == (text, 0, 0)
