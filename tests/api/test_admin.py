"""Health and pauses, as tools of SGLang use them; models, as the official clients of OpenAI and Anthropic read them."""

import asyncio
from datetime import UTC, datetime
from functools import partial

import anthropic
import openai
import pytest

from baton.actors.messages import Abort, Continue, Pause
from tests.api.fake_ring import serving

pytestmark = pytest.mark.anyio
# Clients that refuse an answer whose fields have other types.
CHECKED_OPENAI = partial(openai.AsyncOpenAI, _strict_response_validation=True)
CHECKED_ANTHROPIC = partial(anthropic.AsyncAnthropic, _strict_response_validation=True)


async def test_health_by_generating() -> None:
    async with serving() as served:
        async with served.client.get("/health_generate") as response:
            assert (response.status, await response.json()) == (200, {"status": "ok"})
        [request] = served.ring.submitted()
        assert request.stops.max_tokens == 1 and request.priority < -1000
        served.ring.refusal = "queue_full"
        async with served.client.get("/health_generate") as response:
            assert response.status == 429
        served.ring.refusal, served.ring.failing = None, True
        async with served.client.get("/health_generate") as response:
            assert response.status == 500


async def test_health_by_generating_while_the_model_loads() -> None:
    async with serving(ready=False) as served, served.client.get("/health_generate") as response:
        assert response.status == 503


async def test_endpoints_that_sglangs_tools_use() -> None:
    async with serving() as served, served.client.get("/server_info") as response:
        assert (await response.json())["disable_radix_cache"] is False


async def test_pause_and_continue() -> None:
    async with serving() as served:
        ring, gateway = served.ring, served.server.gateway
        ring.held = True
        for body, mode in (({}, "retract"), ({"mode": "retract"}, "retract"), ({"mode": "in_place"}, "in_place")):
            waiting = asyncio.ensure_future(served.post("/generate", {"text": "a"}))
            await ring.until(lambda: ring.open)
            ring.sent.clear()
            status, answer = await served.post("/pause_generation", body)
            assert (status, answer["status"]) == (200, "ok")
            assert [type(message) for message in ring.sent] == [Abort, Pause] if not body else [Pause]
            assert isinstance(ring.sent[-1], Pause) and ring.sent[-1].mode == gateway.paused == mode
            async with served.client.get("/server_info") as response:
                assert (await response.json())["paused"] == mode
            async with served.client.get("/health_generate") as response:
                assert (response.status, (await response.json())["error"]["code"]) == (503, "paused")
            flushed = await served.post("/flush_cache", {})
            assert flushed[0] == (400 if mode == "in_place" else 200), flushed
            status, answer = await served.post("/continue_generation", {"torch_empty_cache": True})
            assert (status, answer["status"]) == (200, "ok")
            assert isinstance(ring.sent[-1], Continue) and gateway.paused is None
            ring.release()
            reason = (await waiting)[1]["meta_info"]["finish_reason"]["type"]
            assert reason == ("stop" if body else "abort")
            ring.held = True
        assert (await served.error("/pause_generation", {"mode": "now"}))[1]["param"] == "mode"
        assert (await served.error("/continue_generation", {"mode": "x"}))[0] == 400
    async with serving(ready=False) as served:
        assert [(await served.error(f"/{name}_generation", {}))[0] for name in ("pause", "continue")] == [503, 503]


async def test_openais_client_lists_the_model() -> None:
    async with serving() as served, CHECKED_OPENAI(base_url=f"{served.url}v1", api_key="none") as api:
        models = [model async for model in api.models.list()]
        assert [(model.id, model.object, model.owned_by) for model in models] == [("fake", "model", "baton")]
        assert models[0].created == int(served.server.started)
        assert await api.models.retrieve("fake") == models[0]
        with pytest.raises(openai.NotFoundError):
            await api.models.retrieve("another")


async def test_a_model_has_several_names() -> None:
    async with serving() as served, CHECKED_OPENAI(base_url=f"{served.url}v1", api_key="none") as api:
        served.server.other_names = ("second", "third")
        assert [model.id async for model in api.models.list()] == ["fake", "second", "third"]
        assert (await api.models.retrieve("third")).id == "third"
        answer = await api.chat.completions.create(model="second", messages=[{"role": "user", "content": "a"}])
        assert answer.model == "fake"


async def test_anthropics_client_lists_the_model() -> None:
    async with (
        serving() as served,
        CHECKED_ANTHROPIC(base_url=served.url, api_key="none", max_retries=0) as api,
    ):
        page = await api.models.list(limit=5)
        assert (page.has_more, page.first_id, page.last_id) == (False, "fake", "fake")
        models = [model async for model in api.models.list()]
        assert [(model.id, model.type, model.display_name) for model in models] == [("fake", "model", "fake")]
        [model] = models
        assert model.created_at == datetime.fromtimestamp(int(served.server.started), UTC)
        assert (model.lifecycle, model.max_input_tokens, model.max_tokens) == ("active", 256, 256)
        assert await api.models.retrieve("fake") == model
        assert [each.display_name async for each in api.beta.models.list()] == ["fake"]
        with pytest.raises(anthropic.NotFoundError):
            await api.models.retrieve("another")
