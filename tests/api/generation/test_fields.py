"""The table of sampling fields: it covers all sampling parameters of the ring, and each field reaches the ring."""

from typing import Any

import msgspec
import pytest

from baton.actors.requests import Sampling
from baton.api.generation.fields import SamplingFields
from tests.api.fake_ring import serving

pytestmark = pytest.mark.anyio

GIVEN: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 7,
    "min_p": 0.1,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.4,
    "logit_bias": {"5": 1.5},
    "seed": 11,
    "stop": ["xyz"],
    "stop_token_ids": [9],
    "ignore_eos": True,
    "skip_special_tokens": False,
    "speculation": "off",
}
MESSAGES = [{"role": "user", "content": "a"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 20} | GIVEN,
    "/v1/completions": {"prompt": "a"} | GIVEN,
    "/v1/responses": {"input": "a", "max_output_tokens": 20} | GIVEN,
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 20} | GIVEN,
    "/v1/sessions/s/turns": {"messages": MESSAGES, "max_tokens": 20} | GIVEN,
    "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 20} | GIVEN},
}


def test_the_table_covers_the_rings_sampling_parameters() -> None:
    assert set(Sampling.__struct_fields__) <= set(SamplingFields.__struct_fields__) == set(GIVEN)
    defaults = msgspec.to_builtins(SamplingFields())
    assert all(value != defaults[name] for name, value in GIVEN.items())


@pytest.mark.parametrize("path", BODIES)
async def test_each_field_reaches_the_ring(path: str) -> None:
    async with serving() as served:
        await served.post("/v1/sessions", {"id": "s"})
        status, answer = await served.post(path, BODIES[path])
        assert status == 200, answer
        [request] = served.ring.submitted()
    assert request.sampling == Sampling(0.7, 7, 0.8, 0.1, 1.2, 0.3, 0.4, {5: 1.5}, 11)
    assert (request.stops.strings, request.stops.token_ids) == (("xyz",), (9,))
    assert not request.skip_special_tokens and request.speculation == "off"


@pytest.mark.parametrize("path", BODIES)
async def test_a_missing_field_gets_the_models_default(path: str) -> None:
    async with serving() as served:
        served.server.ready().text.generation_defaults.update({"temperature": 0.5, "top_k": 3, "max_new_tokens": 4})
        await served.post("/v1/sessions", {"id": "s"})
        body = {name: value for name, value in BODIES[path].items() if name not in GIVEN and name != "sampling_params"}
        status, answer = await served.post(path, body)
        assert status == 200, answer
        [request] = served.ring.submitted()
    assert request.sampling == Sampling(0.5, 3, seed=request.sampling.seed)
