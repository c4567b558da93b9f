"""Real servers with too few resources, and their shutdown: no request is lost, and every token is right."""

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from baton.models.hash_definition import expected_output
from tests.api.hash_traffic import VOCAB, Traffic, make_checkpoint, troubles, wait_home
from tests.api.server_process import SERVE, ServerProcess

pytestmark = pytest.mark.anyio
FOUR = ["--state-slots", "4", "--kv-pages", "160", "--page-size", "4", "--max-model-len", "200", "--step-tokens", "64"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("hash"), delay_ms=[0, 1])


def generate(prompt: list[int], count: int = 5) -> dict[str, Any]:
    return {"input_ids": prompt, "sampling_params": {"max_new_tokens": count, "temperature": 0}}


@pytest.mark.parametrize(
    ("strategy", "tree_slots", "fit", "outcomes"),
    [
        pytest.param("just_in_time", 0, 4, {"skipped"}, marks=pytest.mark.soak),
        ("just_in_time", 1, 3, {"granted", "skipped"}),
        ("extra_buffer", 1, 1, {"granted"}),
        pytest.param("extra_buffer_lazy", 0, 2, {"granted"}, marks=pytest.mark.soak),
        ("no_buffer", 0, 4, set()),
    ],
)
async def test_four_slots_and_a_hundred_requests(
    checkpoint: Path, strategy: str, tree_slots: int, fit: int, outcomes: set[str]
) -> None:
    options = ["--state-strategy", strategy, "--tree-slots", str(tree_slots), "--poison-freed"]
    with ServerProcess([*SERVE, str(checkpoint), *FOUR, *options]) as server:
        traffic = Traffic(server.url, 3, 100, at_once=100, finish=3, stream=1)
        await traffic.run()
        assert traffic.outcomes == {"length": 100}
        await asyncio.to_thread(wait_home, server)
        counters = server.get("/server_info")["counters"]
        assert {name for name in ("granted", "skipped") if counters.get(f"checkpoints_{name}", 0)} >= outcomes
        assert outcomes or "checkpoints_granted" not in counters
    assert troubles(server) == []
    sized = [line["note"] for line in server.log if line["event"] == "sized"]
    each = (4 - tree_slots) // fit
    assert f"{fit} requests fit: 4 slots less {tree_slots} for the tree, {each} a request ({strategy})" in sized


async def test_a_request_larger_than_the_pool_learns_how_large_it_may_be(checkpoint: Path) -> None:
    small = ["--state-slots", "4", "--kv-pages", "5", "--page-size", "4", "--max-model-len", "200"]
    with ServerProcess([*SERVE, str(checkpoint), *small]) as server:
        status, answer = server.post("/generate", generate([7] * 20))
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert answer["error"]["message"] == ("20 tokens do not fit: the KV pages hold 19 tokens and one to generate")
        prompt = [7] * 19
        status, answer = server.post("/generate", generate(prompt))
        assert (status, answer["output_ids"]) == (200, expected_output(prompt, 2, VOCAB))
        assert answer["meta_info"]["finish_reason"]["type"] == "length"
    assert troubles(server) == []


async def test_why_a_prefix_was_not_reused(checkpoint: Path) -> None:
    """Log and meta_info say how many prompt tokens the tree knew, and why fewer were reused."""
    tiny = [
        "--state-slots",
        "3",
        "--kv-pages",
        "160",
        "--page-size",
        "4",
        "--max-running",
        "1",
        "--track-interval",
        "0",
    ]
    policy = ["--state-strategy", "no_buffer", "--cache-policy", "lru", "--host-memory", "0"]
    with ServerProcess([*SERVE, str(checkpoint), *tiny, *policy]) as server:

        def ask(prompt: list[int]) -> tuple[int, int, str]:
            status, answer = server.post("/generate", generate(prompt, 1))
            assert status == 200
            meta = answer["meta_info"]
            return meta["cached_tokens"], meta["matched_tokens"], meta["lost"]

        first = list(range(40))
        assert ask(first) == (0, 0, "")
        assert ask([*first, 99, 98]) == (40, 40, "")
        assert ask([*first[:30], 99]) == (0, 30, "misaligned")
        for other in range(100, 104):
            ask([other] * 10)
        assert ask([*first, 99]) == (0, 41, "evicted")
        body = {"model": "default", "prompt": [*first, 99, 97], "max_tokens": 1, "temperature": 0}
        details = server.post("/v1/completions", body)[1]["usage"]["prompt_tokens_details"]
        assert details == {"cached_tokens": 41, "matched_tokens": 41}
        details = server.post("/v1/completions", body | {"prompt": [*first[:30], 98]})[1]["usage"][
            "prompt_tokens_details"
        ]
        assert details == {"cached_tokens": 0, "matched_tokens": 30, "lost": "never_kept"}
    lines = [line for line in server.log if line["event"] == "request" and line["endpoint"] == "POST /generate"]
    assert [(line["matched_tokens"], line["lost"]) for line in lines[2:4]] == [(30, "misaligned"), (0, "")]


async def test_the_debug_endpoints(checkpoint: Path) -> None:
    roomy = [*FOUR, "--state-slots", "8", "--track-interval", "4"]  # slots for all states
    with ServerProcess([*SERVE, str(checkpoint), *roomy]) as server:
        loop = asyncio.get_running_loop()
        body = generate([5] * 30, 150) | {"rid": "watched", "cache_salt": "tenant"}
        asking = loop.run_in_executor(None, server.post, "/generate", body)
        server.wait_until(lambda: any(entry["request"] == "watched" for entry in server.get("/debug/slots")))
        owned = [entry for entry in server.get("/debug/slots") if entry["request"] == "watched"]
        assert all(entry["place"] == "owned" and entry["seconds"] >= 0 for entry in owned)
        status, answer = await asking
        assert status == 200
        await asyncio.to_thread(wait_home, server)
        slots, tree = server.get("/debug/slots"), server.get("/debug/tree")
    assert [entry["slot"] for entry in slots] == list(range(8))
    cached = {entry["slot"]: entry["position"] for entry in slots if entry["place"] == "cached"}
    assert cached == {node["slot"]: node["end"] for node in tree if node["slot"] is not None}
    assert max(cached.values()) >= 30 + len(answer["output_ids"]) - 1
    ids = {node["id"] for node in tree}
    assert all(node["parent"] in ids or (node["parent"] is None and node["start"] == 0) for node in tree)
    assert {node["salt"] for node in tree} == {hashlib.sha256(b"tenant").hexdigest()[:16]}
    assert all("tokens" not in node for node in tree)


async def test_sigterm_under_load(checkpoint: Path) -> None:
    """Every accepted request gets a whole answer or a 503, and the exit code is 0."""
    with ServerProcess([*SERVE, str(checkpoint), *FOUR, "--drain-timeout", "0.5"]) as server:
        traffic = Traffic(server.url, 5, 600, at_once=100, finish=3, stream=1)
        running = asyncio.create_task(traffic.run())
        await asyncio.to_thread(server.wait_until, lambda: server.get("/server_info")["open_requests"] > 50)
        await asyncio.to_thread(server.wait_until, lambda: traffic.outcomes["length"] > 20)
        assert await asyncio.to_thread(server.stop) == 0
        await running
        assert traffic.outcomes.total() == 600
        assert traffic.outcomes["length"] > 20 and traffic.outcomes["503"] > 0
        assert set(traffic.outcomes) <= {"length", "503", "unreachable"}
    assert troubles(server) == []
    assert any(line["event"] == "drained" for line in server.log)
    answered = [line for line in server.log if line["event"] == "request" and line["endpoint"] == "POST /generate"]
    assert len(answered) == traffic.outcomes["length"] + traffic.outcomes["503"]


async def test_kill_and_restart(checkpoint: Path) -> None:
    with ServerProcess([*SERVE, str(checkpoint), *FOUR], exit_code=-9) as server:
        port = server.url.rpartition(":")[2]
        body = generate([1, 2, 3], 190)
        asking = asyncio.get_running_loop().run_in_executor(None, post_or_fail, server, body)
        await asyncio.to_thread(server.wait_until, lambda: server.get("/server_info")["open_requests"] > 0)
        server.process.kill()
        assert isinstance(await asking, OSError | ValueError)
        server.wait()
    arguments = [argument if argument != "0" else port for argument in SERVE]
    with ServerProcess([*arguments, str(checkpoint), *FOUR]) as again:
        assert again.url == server.url
        assert again.post("/generate", generate([1, 2, 3]))[1]["output_ids"] == expected_output([1, 2, 3], 5, VOCAB)


def post_or_fail(server: ServerProcess, body: dict[str, Any]) -> object:
    try:
        return server.post("/generate", body)
    except (OSError, ValueError) as error:
        return error
    except Exception as error:
        return OSError(json.dumps(str(error)))
