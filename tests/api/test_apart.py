"""Prefill and decode on different engines give the tokens and log probabilities of one engine, for every family."""

import asyncio
import math
import random
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from scripts.benchmarks.common.shapes import checkpoint_of
from tests.api.engines import Apart, LiveEngine, apart, engine, small_model
from tests.api.server_process import SERVE, ServerProcess
from tests.models.oracle import settings_of

pytestmark = pytest.mark.anyio
# Without attention, a hybrid, a gated delta net, and experts.
FAMILIES = ("mamba2", "granitemoehybrid", "qwen3_next", "granitemoehybrid-moe")
OTHERS = ("qwen3_5_moe", "nemotron_h-moe-latent", "bamba", "falcon_h1", "kimi_linear-moe", "lfm2_moe")
ALL = [*FAMILIES, *(pytest.param(family, marks=pytest.mark.soak) for family in OTHERS)]
SEEDED = {"temperature": 1.0, "sampling_seed": 7}


def prompt(seed: object, length: int = 150) -> list[int]:
    rng = random.Random(f"prompt {seed}")
    return [rng.randrange(250) for _ in range(length)]


async def both_ways(one: LiveEngine, ids: list[int]) -> list[dict[str, Any]]:
    """Return the greedy and the seeded answer to a prompt and to a longer one, all generated at once."""
    longer = [*ids, *prompt("more", 80)]
    return await asyncio.gather(*(one.generate(each, **how) for each in (ids, longer) for how in ({}, SEEDED)))


def asked(cluster: Apart) -> list[int]:
    """Return how many states each decode engine has imported from each prefill engine."""
    return [decode.outcomes("imported").get(p.name, 0) for decode in cluster.decodes for p in cluster.prefills]


@pytest.mark.parametrize(
    ("family", "count"),
    [
        *product(FAMILIES, (2,)),
        ("mamba2", 1),
        *(pytest.param(family, 1, marks=pytest.mark.soak) for family in FAMILIES[1:]),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in product(OTHERS, (1, 2))),
    ],
)
async def test_the_same_tokens_as_from_one_engine(family: str, count: int, tmp_path: Path) -> None:
    """With two of each, each decode engine asks both prefill engines."""
    model = small_model(family)
    async with (
        engine(model, "alone") as alone,
        apart(model, tmp_path, [{}] * count, [{}] * count) as cluster,
    ):
        for prefill in cluster.prefills:
            await cluster.use(prefill)
            prompts = {decode.name: prompt((prefill.name, decode.name)) for decode in cluster.decodes}
            answers = await asyncio.gather(*(both_ways(decode, prompts[decode.name]) for decode in cluster.decodes))
            for ids, found in zip(prompts.values(), answers, strict=True):
                expected = await both_ways(alone, ids)
                assert [each["output_ids"] for each in found] == [each["output_ids"] for each in expected]
                assert all(each["meta_info"]["lost"] == "" for each in found)
                assert expected[0]["output_ids"] != expected[1]["output_ids"]
        assert min(asked(cluster)) >= 1, asked(cluster)
        for decode in cluster.decodes:
            assert decode.relay.counters()["granted_from:peer"] >= 2 * count
            assert not decode.outcomes("failed") and not decode.outcomes("declined")
        assert all(sum(prefill.outcomes("lent").values()) >= count for prefill in cluster.prefills)


async def turns_with_logprobs(one: LiveEngine, cold: bool) -> list[dict[str, Any]]:
    """Run two conversations, and return the answers with the log probability of each token.

    cold: nothing of an earlier turn is in the cache
    """
    answers = []
    for talk in range(2):
        history = list[int]()
        for turn in range(3):
            if cold:
                await one.post("/flush_cache", {})
            history += prompt((talk, turn), 90)
            body = {
                "input_ids": list(history),
                "sampling_params": {"max_new_tokens": 12, "ignore_eos": True, "temperature": 0},
                "return_logprob": True,
            }
            answers.append(await one.post("/generate", body))
            history += answers[-1]["output_ids"]
    return answers


@pytest.mark.parametrize("family", ALL)
async def test_cached_and_cold_log_probabilities_are_equal_at_a_decode_engine(family: str, tmp_path: Path) -> None:
    """The KL divergence between log probabilities with states of peers and from scratch is below 1e-6."""
    model = small_model(family)
    async with engine(model, "alone") as alone, apart(model, tmp_path) as cluster:
        [decode] = cluster.decodes
        warm, cold = await turns_with_logprobs(decode, False), await turns_with_logprobs(alone, True)
        assert decode.relay.counters()["granted_from:peer"] == len(warm)
        assert sum(decode.outcomes("imported").values()) == len(warm)
    ratios = []
    for cached, fresh in zip(warm, cold, strict=True):
        assert cached["output_ids"] == fresh["output_ids"]
        assert cached["meta_info"]["cached_tokens"] == cached["meta_info"]["prompt_tokens"] - 1
        assert fresh["meta_info"]["cached_tokens"] == 0
        pairs = zip(
            cached["meta_info"]["output_token_logprobs"], fresh["meta_info"]["output_token_logprobs"], strict=True
        )
        ratios += [a[0] - b[0] for a, b in pairs]
    assert len(ratios) == 12 * len(warm)
    assert sum(math.exp(r) - 1 - r for r in ratios) / len(ratios) < 1e-6


@pytest.mark.soak
def test_two_and_two_real_processes(tmp_path: Path) -> None:
    """A hybrid with native code, and loads as the engines report them."""
    settings = {**settings_of("granitemoehybrid-rope", 512), "torch_dtype": "float32"}
    serve = (*SERVE, str(checkpoint_of(settings, tmp_path)), "--memory", "64M", "--host-memory", "32M")
    addresses = [f"unix:{tmp_path / name}" for name in ("one", "two")]
    peers = [word for address in addresses for word in ("--peer", address)]
    with ExitStack() as stack:
        alone = stack.enter_context(ServerProcess(serve))
        prefills = [
            stack.enter_context(ServerProcess((*serve, "--role", "prefill", "--peer-listen", address)))
            for address in addresses
        ]
        decodes = [stack.enter_context(ServerProcess((*serve, "--role", "decode", *peers))) for _ in addresses]
        for decode in decodes:
            decode.wait_until(lambda decode=decode: len(decode.get("/debug/peers")) == 2)
        for number, decode in product(range(6), decodes):
            ids, how = prompt((number, decode.url), 200), {"temperature": number % 2, "sampling_seed": 7}
            body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 20, "ignore_eos": True, **how}}
            found, expected = decode.post("/generate", body)[1], alone.post("/generate", body)[1]
            assert found["output_ids"] == expected["output_ids"]
        assert min(decode.get("/server_info")["counters"]["granted_from:peer"] for decode in decodes) >= 3
        assert sum(prefill.get("/server_info")["counters"].get("peer_loans", 0) for prefill in prefills) >= 6
