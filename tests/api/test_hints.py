"""Hints about states, on a real server: where the next request resumes, and what it reports if it cannot."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.api.hash_traffic import make_checkpoint
from tests.api.server_process import SERVE, ServerProcess

SLOTS = 24
SIZES = [
    "--state-slots", str(SLOTS), "--kv-pages", "160", "--page-size", "4",
    "--max-running", "4", "--max-model-len", "200",
]  # fmt: skip
COMMON = 37


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("hash"))


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[ServerProcess]:
    with ServerProcess([*SERVE, str(checkpoint), *SIZES]) as running:
        yield running


def prompts(first: int) -> tuple[list[int], list[int]]:
    """Return two prompts with the same COMMON first tokens, shared with no other prompt, and 20 different ones."""
    common = [first, *(token % 16 for token in range(COMMON - 1))]
    return [*common, *[16] * 20], [*common, *[17] * 20]


def ask(server: ServerProcess, tokens: Sequence[int], **hints: Any) -> dict[str, Any]:
    body = {"input_ids": list(tokens), "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}} | hints
    status, answer = server.post("/generate", body)
    assert status == 200, answer
    return answer["meta_info"]


def test_the_next_request_resumes_exactly_at_a_requested_checkpoint(server: ServerProcess) -> None:
    first, second = prompts(20)
    ask(server, first, checkpoints=[COMMON])
    found = ask(server, second)
    assert (found["cached_tokens"], found["matched_tokens"], found["lost"]) == (COMMON, COMMON, "")
    first, second = prompts(21)
    ask(server, first)
    found = ask(server, second)
    assert (found["cached_tokens"], found["matched_tokens"], found["lost"]) == (0, COMMON, "misaligned")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/sessions/s/turns"])
def test_a_request_resumes_from_a_checkpoint_of_another_endpoint(server: ServerProcess, path: str) -> None:
    first, second = prompts(22 if "completions" in path else 23)
    server.post("/v1/sessions", {"id": "s"})
    field = "prompt" if path == "/v1/completions" else "input_ids"
    status, answer = server.post(path, {field: first, "max_tokens": 2, "checkpoints": [5, COMMON], "ignore_eos": True})
    assert status == 200, answer
    assert ask(server, second)["cached_tokens"] == COMMON
    assert ask(server, second[:5] + [18] * 8)["cached_tokens"] == 5


def test_a_request_with_keep_never_leaves_no_state(server: ServerProcess) -> None:
    first, _ = prompts(24)
    server.post("/flush_cache", {})
    ask(server, first, keep="never")
    server.wait_until(lambda: server.get("/server_info")["gauges"]["slots"]["free"] == SLOTS)
    assert ask(server, first)["cached_tokens"] == 0
    assert ask(server, first)["cached_tokens"] == len(first) - 1


def test_a_denied_checkpoint_is_reported(checkpoint: Path) -> None:
    """The strategy no_buffer keeps no state within a request, so a requested checkpoint is denied."""
    with ServerProcess([*SERVE, str(checkpoint), *SIZES, "--state-strategy", "no_buffer"]) as server:
        first, second = prompts(20)
        ask(server, first, checkpoints=[COMMON])
        found = ask(server, second)
        assert (found["cached_tokens"], found["matched_tokens"], found["lost"]) == (0, COMMON, "denied")
    # The log is complete only after the server's end: the line of a request is written after its answer.
    log = [line for line in server.log if line["event"] == "request" and line.get("lost")]
    assert [line["lost"] for line in log] == ["denied"]
