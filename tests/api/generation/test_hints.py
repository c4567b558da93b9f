"""Hints about states: they reach the ring from every generating endpoint, and wrong hints are refused."""

from typing import Any

import openai
import pytest

from tests.api.fake_ring import serving

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "user", "content": "a"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "abcdefghij"},
    "/v1/responses": {"input": "a"},
    "/v1/sessions/s/turns": {"messages": MESSAGES},
    "/generate": {"text": "abcdefghij"},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("keep", ["soon", "never"])
async def test_hints_reach_the_ring(path: str, keep: str) -> None:
    async with serving() as served:
        await served.post("/v1/sessions", {"id": "s"})
        status, answer = await served.post(path, BODIES[path] | {"checkpoints": [5, 3, 5], "keep": keep})
        assert status == 200, answer
        await served.post(path, BODIES[path] | {"checkpoints": None, "keep": None})
        request, plain = served.ring.submitted()
    assert (request.checkpoints, request.keep) == ((3, 5), keep)
    assert (plain.checkpoints, plain.keep) == ((), "")


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("hint", "word"),
    [
        ({"checkpoints": [1, 2, 3, 4, 5]}, "at most 4"),
        ({"checkpoints": [0]}, "0 is not inside the prompt"),
        ({"checkpoints": [-1]}, "-1 is not inside"),
        ({"checkpoints": [3, 10_000]}, "10000 is not inside"),
        ({"checkpoints": ["a"]}, "checkpoints"),
        ({"checkpoints": 3}, "checkpoints"),
        ({"keep": "always"}, "keep"),
        ({"keep": True}, "keep"),
    ],
)
async def test_wrong_hints_are_refused_by_name(path: str, hint: dict[str, Any], word: str) -> None:
    async with serving() as served:
        await served.post("/v1/sessions", {"id": "s"})
        status, error = await served.error(path, BODIES[path] | hint)
        assert not served.ring.submitted()
    assert status == 400 and word in error["message"]
    assert error["param"].partition("[")[0] == next(iter(hint))


async def test_a_checkpoint_may_be_at_the_last_token_but_not_at_the_end() -> None:
    async with serving() as served:
        status, _ = await served.post("/generate", {"text": "abcdefghij", "checkpoints": [9]})
        assert status == 200
        status, error = await served.error("/generate", {"text": "abcdefghij", "checkpoints": [10]})
    assert (
        status == 400 and error["message"] == "checkpoints: position 10 is not inside the prompt, which has 10 tokens"
    )


async def test_each_choice_has_the_hints_of_its_prompt() -> None:
    async with serving() as served:
        await served.post("/v1/completions", {"prompt": ["abcd", "abce"], "n": 2, "checkpoints": [3], "keep": "soon"})
        requests = served.ring.submitted()
    assert [(request.checkpoints, request.keep) for request in requests] == [((3,), "soon")] * 4


async def test_the_prompts_of_a_batch_may_have_hints_of_their_own() -> None:
    batch: dict[str, Any] = {"text": ["abcd", "abcdef"]}
    async with serving() as served:
        status, answer = await served.post("/generate", batch | {"checkpoints": [[2], None], "keep": ["never", None]})
        assert status == 200, answer
        status, error = await served.error("/generate", batch | {"checkpoints": [[2]]})
        first, second = served.ring.submitted()
    assert (first.checkpoints, first.keep, second.checkpoints, second.keep) == ((2,), "never", (), "")
    assert (status, error["param"]) == (400, "checkpoints")


@pytest.mark.parametrize(("hint", "keep"), [(None, "soon"), ("never", "never"), ("soon", "soon")])
async def test_a_prompt_cache_key_implies_keep_soon(hint: str | None, keep: str) -> None:
    """A request with prompt_cache_key, which OpenAI's client sends, gets keep "soon" unless it says otherwise."""
    async with serving() as served, openai.AsyncOpenAI(base_url=served.url + "v1", api_key="none") as api:
        extra = {"keep": hint}
        await api.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "a"}], prompt_cache_key="talk-7", extra_body=extra
        )
        await api.responses.create(model="fake", input="a", prompt_cache_key="talk-7", extra_body=extra)
        keeps = [request.keep for request in served.ring.submitted()]
    assert keeps == [keep, keep]
