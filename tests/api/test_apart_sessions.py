"""Sessions, forks, agents and state strategies whose states travel between engines: the tokens are those of one."""

import asyncio
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from baton.actors.scheduler.strategy import Strategy
from tests.api.engines import Apart, LiveEngine, apart, engine, small_model
from tests.api.test_apart import FAMILIES, SEEDED, prompt

pytestmark = pytest.mark.anyio
HYBRID = "granitemoehybrid"
OTHERS = [pytest.param(family, marks=pytest.mark.soak) for family in FAMILIES if family != HYBRID]
BUFFERS = (Strategy.NO_BUFFER, Strategy.EXTRA_BUFFER, Strategy.EXTRA_BUFFER_LAZY)


class Talks:
    """Sessions of one engine, or of several engines between which they move; records every answer's tokens."""

    def __init__(self, engines: Mapping[str, LiveEngine], cluster: Apart | None = None) -> None:
        """engines: by the names that the sessions use. cluster: None if all names are those of one engine"""
        self._engines, self._cluster = engines, cluster
        self.outputs: list[list[int]] = []
        self.origins: list[str] = []  # the tier from which each turn resumed

    async def use(self, prefill: str) -> None:
        if self._cluster is not None:
            await self._cluster.use(self._engines[prefill])

    async def create(self, at: str, session: str) -> None:
        await self._engines[at].post("/v1/sessions", {"id": session})

    async def turn(self, at: str, session: str, ids: list[int], **sampling: Any) -> None:
        body = {"input_ids": ids, "temperature": 1, "max_tokens": 12, "ignore_eos": True, "seed": 7, **sampling}
        answer = await self._engines[at].post(f"/v1/sessions/{session}/turns", body)
        assert answer["lost"] != "peer", answer
        self.outputs.append(answer["output_ids"])
        self.origins.append(answer["resumed_from"])

    async def fork(self, at: str, session: str, name: str) -> None:
        await self._engines[at].post(f"/v1/sessions/{session}/fork", {"id": name})

    async def rewind(self, at: str, session: str, turn: int) -> None:
        await self._engines[at].post(f"/v1/sessions/{session}/rewind", {"turn": turn})

    async def move(self, at: str, session: str, to: str) -> None:
        if self._cluster is not None:
            name = self._engines[to].name
            answer = await self._engines[at].post(f"/v1/sessions/{session}/move", {"engine": name})
            assert answer["engine"] == name
            shown = await self._engines[to].get(f"/v1/sessions/{session}")
            assert shown["state"]["tier"] == "host", shown

    async def agents(self, at: str, history: list[int], count: int) -> None:
        """Send requests with the same history and different ends at once, as agents with one system prompt do."""
        one = self._engines[at]
        answers = await asyncio.gather(
            *(one.generate([*history, *prompt((at, number), 90)], **SEEDED) for number in range(count))
        )
        assert all(answer["meta_info"]["lost"] != "peer" for answer in answers)
        self.outputs += [answer["output_ids"] for answer in answers]


async def talk(talks: Talks) -> None:
    """Run turns, forks, a rewind, agents and moves, with another prefill engine for each part."""
    first = prompt("first")
    await talks.create("here", "s")
    await talks.turn("here", "s", first)
    await talks.use("other prefill")
    await talks.turn("here", "s", prompt("second", 100), temperature=0.0)
    await talks.fork("here", "s", "fork")
    await talks.use("prefill")
    for session in ("s", "fork"):
        await talks.turn("here", session, prompt(session, 90))
    await talks.rewind("here", "s", 1)
    await talks.turn("here", "s", prompt("after the rewind", 90))
    await talks.use("other prefill")
    await talks.agents("here", first, 3)
    await talks.agents("there", first, 3)
    await talks.move("here", "fork", "prefill")
    await talks.turn("prefill", "fork", prompt("moved", 90))
    await talks.move("prefill", "fork", "there")
    await talks.turn("there", "fork", prompt("moved again", 20), temperature=0.0)
    await talks.fork("there", "fork", "last")
    await talks.turn("there", "last", prompt("last", 90))


@pytest.mark.parametrize("family", [*FAMILIES, "lfm2_moe"])
async def test_turns_forks_and_agents_across_engines(family: str, tmp_path: Path) -> None:
    model = small_model(family)
    async with engine(model, "alone") as alone, apart(model, tmp_path, [{}, {}], [{}, {}]) as cluster:
        expected = Talks(dict.fromkeys(("here", "there", "prefill", "other prefill"), alone))
        await talk(expected)
        (here, there), (prefill, other) = cluster.decodes, cluster.prefills
        found = Talks({"here": here, "there": there, "prefill": prefill, "other prefill": other}, cluster)
        await talk(found)
        assert found.outputs == expected.outputs
        assert found.origins == ["peer"] * 5 + ["host"] * 2 + ["peer"]
        for source in (here, prefill, other):
            assert source.outcomes("lent"), source.name
        # States travel towards the prefill engines too: they resume prompts from the decode engine's states.
        for sink in (here, there, prefill, other):
            assert sink.outcomes("imported") and not sink.outcomes("failed"), sink.name


@pytest.mark.parametrize("family", [HYBRID, *OTHERS])
async def test_every_state_strategy_on_either_side(family: str, tmp_path: Path) -> None:
    """A prompt, a longer one, and a branch of it, for each pair of strategies; checkpoints are 32 tokens apart."""
    model = small_model(family)
    options = [{"state_strategy": strategy} for strategy in BUFFERS]

    async def branches(one: LiveEngine, name: str) -> list[list[int]]:
        ids, outputs = prompt(name), list[list[int]]()
        for more in ([], prompt("more", 90), prompt("branch", 90)):
            answer = await one.generate(ids + more, **SEEDED)  # greedily the small hybrid repeats one token
            assert answer["meta_info"]["lost"] != "peer", (name, answer)
            outputs.append(answer["output_ids"])
        return outputs

    async with (
        engine(model, "alone") as alone,
        apart(model, tmp_path, options, options, track_interval=32) as cluster,
    ):
        for prefill in cluster.prefills:
            await cluster.use(prefill)
            names = [f"{prefill.name} {decode.name}" for decode in cluster.decodes]
            found = await asyncio.gather(*map(branches, cluster.decodes, names))
            assert found == [await branches(alone, name) for name in names]
        for decode, prefill in product(cluster.decodes, cluster.prefills):
            assert decode.outcomes("imported").get(prefill.name, 0) >= 3, (decode.name, prefill.name)
        assert not any(decode.outcomes("failed") or decode.outcomes("declined") for decode in cluster.decodes)
