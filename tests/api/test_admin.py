"""Health as tools ask for it."""

import pytest

from tests.api.fake_ring import serving

pytestmark = pytest.mark.anyio


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


async def test_what_sglangs_tools_look_for() -> None:
    async with serving() as served, served.client.get("/server_info") as response:
        assert (await response.json())["disable_radix_cache"] is False
