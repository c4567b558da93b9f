"""Two API keys whose sessions have the same names: what each was told is there after a kill, the other's is not."""

import asyncio
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from baton.models.hash_definition import expected_output
from tests.fuzz.shapes import VOCAB
from tests.reliability.lives import TENANTS, Caller, Lives

# Those that the fuzzed requests name too, under a key of their own.
SHARED = ("s0", "s1", "s3")
LONGEST = 130
RETRY_S = 0.2
REFUSED = (429, 503)


@dataclass(frozen=True)
class History:
    """What has been said: all tokens, and each turn's number with the position behind it."""

    tokens: tuple[int, ...] = ()
    turns: tuple[tuple[int, int], ...] = ()

    def positions(self) -> list[int]:
        return [position for _, position in self.turns]


class Talk:
    """One session, as its client knows it. unsure: how it will be, if what was not answered was done nonetheless."""

    def __init__(self, caller: Caller, lives: Lives, id: str, name: str) -> None:
        self._caller, self._lives = caller, lives
        self._path = f"/v1/sessions/{id}"
        self._name = f"session {id} of {name}"
        self._known = History()
        self._unsure: History | None = None

    async def go_on(self, random: Random) -> None:
        """Until cancelled: turns, and now and then a rewind or a suspension; after a kill, a look at what is there."""
        checked = 0
        while True:
            life = await self._lives.current()
            if checked != life or self._unsure is not None:
                checked = life if await self._check() else 0
            elif self._known.turns and (len(self._known.tokens) > LONGEST or random.random() < 0.05):
                await self._rewind(random)
            elif random.random() < 0.05:
                await self._caller.ask("POST", f"{self._path}/suspend", {})
            else:
                await self._turn(random)
            await asyncio.sleep(random.uniform(0, 0.2))

    async def _check(self) -> bool:
        """All that was acknowledged is there, and at most what was under way beyond it. False without an answer."""
        told = await self._caller.ask("GET", self._path)
        if told is None or told[0] in REFUSED:
            return False
        turns = tuple((turn["turn"], turn["position"]) for turn in told[1].get("turns", ()))
        positions = [position for _, position in turns]
        if self._unsure is not None and positions == self._unsure.positions():
            self._known = replace(self._unsure, turns=turns)
        self._unsure = None
        if told[0] != 200 or turns != self._known.turns:
            self._complain(f"{told} is not what was acknowledged: {self._known.turns}")
            self._known = replace(self._known, turns=turns)
        self._lives.figures.done["turns found again"] += len(turns)
        return True

    async def _turn(self, random: Random) -> None:
        new = [random.randrange(250) for _ in range(random.randint(1, 20))]
        said = expected_output([*self._known.tokens, *new], random.randint(1, 8), VOCAB)
        before, tokens = len(self._known.tokens), (*self._known.tokens, *new, *said)
        self._unsure = History(tokens, (*self._known.turns, (0, len(tokens))))
        body = {"input_ids": new, "max_tokens": len(said), "temperature": 0, "ignore_eos": True}
        answer = await self._done("turns", body)
        if answer is None:
            return
        if (answer["output_ids"], answer["history"], answer["start"], answer["position"]) != (
            said, before, before, len(tokens),
        ):  # fmt: skip
            self._complain(f"{said} was expected, not {answer}")
        self._known = History(tokens, (*self._known.turns, (answer["turn"], len(tokens))))

    async def _rewind(self, random: Random) -> None:
        kept = self._known.turns[: random.randrange(len(self._known.turns))]
        rewound = History(self._known.tokens[: kept[-1][1] if kept else 0], kept)
        self._unsure = rewound
        if await self._done("rewind", {"turn": kept[-1][0] if kept else 0}) is not None:
            self._known = rewound

    async def _done(self, what: str, body: Any) -> Any:
        """The answer to what was acknowledged; None if it was refused, or not answered and may be there nonetheless."""
        told = await self._caller.ask("POST", f"{self._path}/{what}", body)
        if told is None:
            return None
        self._unsure = None
        if told[0] == 200:
            self._lives.figures.done[what] += 1
            return told[1]
        if told[0] not in REFUSED:
            self._complain(f"{what}: {told}")
        await asyncio.sleep(RETRY_S)
        return None

    def _complain(self, what: str) -> None:
        self._lives.figures.complain(f"{self._name}: {what}")


class Tenant:
    """One key, its sessions, and its curiosity about those of the other."""

    def __init__(self, lives: Lives, name: str, seed: int) -> None:
        self._lives = lives
        self._name = name
        self._random = Random(f"{name} {seed}")
        [self._other] = set(TENANTS) - {name}
        self._ids = {*SHARED, own(name)}

    async def live(self) -> None:
        """Until cancelled."""
        async with Caller(self._lives, self._name, f"tenant {self._name}") as caller, asyncio.TaskGroup() as tasks:
            for id in sorted(self._ids):
                told = await caller.ask("POST", "/v1/sessions", {"id": id})
                assert told is not None and told[0] == 200, told
                talk = Talk(caller, self._lives, id, self._name)
                tasks.create_task(talk.go_on(Random(self._random.random())))
            tasks.create_task(self._pry(caller))

    async def _pry(self, caller: Caller) -> None:
        path = f"/v1/sessions/{own(self._other)}"
        tries = [
            ("GET", path, None), ("DELETE", path, None), ("POST", f"{path}/rewind", {"turn": 0}),
            ("POST", f"{path}/turns", {"input_ids": [1]}), ("POST", f"{path}/fork", {}),
            ("POST", f"{path}/suspend", {}),
        ]  # fmt: skip
        while True:
            await asyncio.sleep(self._random.uniform(0.2, 1))
            told = await caller.ask("GET", "/v1/sessions")
            if told is not None and told[0] == 200 and {each["id"] for each in told[1]["data"]} != self._ids:
                self._lives.figures.complain(f"{self._name} was shown {told[1]}")
            told = await caller.ask(*self._random.choice(tries))
            if told is not None and told[0] not in (404, *REFUSED):
                self._lives.figures.complain(f"{self._name} reached what is the other's: {told}")
            self._lives.figures.done["tries of one key to reach the other's sessions"] += 1


def own(name: str) -> str:
    """The session that only this key has."""
    return f"of-{name}"
