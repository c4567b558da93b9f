"""Requests drawn from the Structs that the endpoints read. They find every planted bug, and no other bug."""

import gc
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.api.app import HANDLERS
from tests.fuzz.campaign import fuzz, shrink
from tests.fuzz.planted import PLANTED, planted
from tests.fuzz.requests import ENDPOINTS, Endpoint, FuzzRequest, draw
from tests.fuzz.server import make_hash_model

# A planted bug may end the server while connections are open, which raises errors that nothing catches.
IGNORED = "ignore::pytest.PytestUnraisableExceptionWarning"
pytestmark = [pytest.mark.anyio, pytest.mark.filterwarnings(IGNORED)]

SEED = 2
HASH_REQUESTS, BUNDLED_REQUESTS = 1500, 500
SOAK_REQUESTS = int(os.environ.get("BATON_FUZZ_REQUESTS") or 50_000)
SOAK_BATCH = 2000
MOST_UNTIL_FOUND = 3000
# Paths whose handlers read nothing of a request, that would pause all other requests, or whose answer never ends.
NOT_FUZZED = {"/", "/ready", "/version", "/pause_generation", "/continue_generation", "/v1/events"}
ALIASES = {"/get_model_info", "/get_server_info"}
# For each planted bug, the endpoints that can show it. Requests to these endpoints alone find it sooner.
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PLACES: dict[str, tuple[str, ...]] = {
    "a_bias_is_checked_by_its_first_digits": (CHAT, TEXT),
    "a_number_in_a_query_is_any_digits": ("/v1/responses", "/v1/responses/{response}/input_items"),
    "a_role_may_be_anything": ("/tokenize",),
    "a_seed_has_any_size": (CHAT, TEXT),
    "alternatives_have_no_bounds": (CHAT,),
    "alternatives_have_no_upper_bound": (CHAT,),
    "a_refused_turn_never_ends": ("/v1/sessions", "/v1/sessions/{session}/turns"),
    "negative_token_ids_are_accepted": (TEXT,),
    "stop_tokens_are_not_checked": (CHAT, TEXT),
    "token_ids_are_not_checked": (CHAT, TEXT),
}


@pytest.fixture(scope="module")
def hash_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hash_model(tmp_path_factory.mktemp("hash"))


@pytest.fixture(scope="module", autouse=True)
def clean_up() -> Iterator[None]:
    """Collect garbage after this module, so that unraisable errors of planted bugs appear here, not in a later test."""
    yield
    gc.collect()


def places(paths: tuple[str, ...]) -> tuple[Endpoint, ...]:
    return tuple(each for each in ENDPOINTS if not paths or each.path in paths)


def test_every_route_is_fuzzed() -> None:
    routes = {route.path for handlers in HANDLERS for route in handlers.routes}
    assert {path.replace(":.+", "") for path in routes} - NOT_FUZZED - ALIASES <= {each.path for each in ENDPOINTS}


def test_a_number_always_draws_the_same_request() -> None:
    assert [draw(SEED, number) for number in range(200)] == [draw(SEED, number) for number in range(200)]


async def test_a_failing_request_is_shrunk() -> None:
    async def fails(request: FuzzRequest) -> bool:
        return "bad" in json.loads(request.body).get("stop", ())

    body = b'{"n": [1, {"a": 2}], "stop": ["x", "bad"], "top_k": 3}'
    small = await shrink(FuzzRequest("POST", "/generate", ((b"Accept", b"x"),), body, leaves=3), fails)
    assert small == FuzzRequest("POST", "/generate", (), b'{"stop": ["bad"]}')


async def test_the_hash_model_withstands_all_requests(hash_model: Path) -> None:
    campaign = await fuzz(hash_model, SEED, range(HASH_REQUESTS))
    assert campaign.failures == [], "\n\n".join(map(str, campaign.failures))
    assert campaign.statuses[200] > HASH_REQUESTS / 5 and campaign.statuses[400] > HASH_REQUESTS / 5
    assert campaign.canaries > 20


async def test_a_real_model_withstands_all_requests(tmp_path: Path) -> None:
    numbers = range(HASH_REQUESTS, HASH_REQUESTS + BUNDLED_REQUESTS)
    campaign = await fuzz(None, SEED, numbers, session_dir=str(tmp_path))
    assert campaign.failures == [], "\n\n".join(map(str, campaign.failures))
    assert campaign.canaries > 5


# Outside of the soak only one bug in eight is planted, because each starts a server.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.soak] * bool(at % 8)) for at, name in enumerate(PLANTED)]
)
async def test_a_planted_bug_is_found(hash_model: Path, name: str) -> None:
    with planted(name):
        where, numbers = places(PLACES.get(name, ())), range(MOST_UNTIL_FOUND)
        campaign = await fuzz(hash_model, SEED, numbers, where, first_only=True, home_s=3.0, codec_check=False)
    assert campaign.failures


@pytest.mark.soak
async def test_a_long_run_of_fresh_seeds(hash_model: Path, tmp_path: Path) -> None:
    """BATON_FUZZ_REQUESTS sets the number of requests; BATON_FIRST_SEED sets the seed, to repeat a run."""
    seed = int(os.environ.get("BATON_FIRST_SEED") or int.from_bytes(os.urandom(4)))
    for first in range(0, SOAK_REQUESTS, SOAK_BATCH):
        model = None if first // SOAK_BATCH % 4 == 3 else hash_model
        # Each model has its own folder: a session file of another model would be logged as an error.
        folder = str(tmp_path / ("hash" if model else "bundled")) if first // SOAK_BATCH % 2 else None
        campaign = await fuzz(model, seed, range(first, first + SOAK_BATCH), session_dir=folder)
        assert campaign.failures == [], "\n\n".join(map(str, campaign.failures))
