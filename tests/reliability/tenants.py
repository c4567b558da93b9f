"""Two API keys whose sessions have the same ids. After a kill each key must find its own histories, and no others."""

import asyncio
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from baton.models.hash_definition import expected_output
from tests.fuzz.shapes import VOCAB
from tests.reliability.lives import TENANTS, Caller, Lives

# Session ids that fuzzed requests use too, under an API key of their own.
SHARED = ("s0", "s1", "s3")
LONGEST = 130
RETRY_S = 0.2
REFUSED = (429, 503)


@dataclass(frozen=True)
class History:
    """The history of a session: its tokens and its turns."""

    tokens: tuple[int, ...] = ()
    turns: tuple[tuple[int, int], ...] = ()  # number and end position of each turn

    def positions(self) -> list[int]:
        return [position for _, position in self.turns]


class Talk:
    """A session as its client knows it."""

    def __init__(self, caller: Caller, lives: Lives, id: str, name: str) -> None:
        self._caller, self._lives = caller, lives
        self._path = f"/v1/sessions/{id}"
        self._name = f"session {id} of {name}"
        self._known = History()  # the history that the server has acknowledged
        # What the history is if the last request, which got no answer, was carried out.
        self._unconfirmed: History | None = None

    async def go_on(self, random: Random) -> None:
        """Take turns until cancelled, with an occasional rewind or suspension. Check the history after each kill."""
        checked = 0
        while True:
            life = await self._lives.current()
            if checked != life or self._unconfirmed is not None:
                checked = life if await self._check() else 0
            elif self._known.turns and (len(self._known.tokens) > LONGEST or random.random() < 0.05):
                await self._rewind(random)
            elif random.random() < 0.05:
                await self._caller.ask("POST", f"{self._path}/suspend", {})
            else:
                await self._turn(random)
            await asyncio.sleep(random.uniform(0, 0.2))

    async def _check(self) -> bool:
        """Check that the server has exactly the acknowledged turns, or also what the unanswered request would add.

        Return False if there was no answer.
        """
        answer = await self._caller.ask("GET", self._path)
        if answer is None or answer[0] in REFUSED:
            return False
        turns = tuple((turn["turn"], turn["position"]) for turn in answer[1].get("turns", ()))
        positions = [position for _, position in turns]
        if self._unconfirmed is not None and positions == self._unconfirmed.positions():
            self._known = replace(self._unconfirmed, turns=turns)
        self._unconfirmed = None
        if answer[0] != 200 or turns != self._known.turns:
            self._complain(f"{answer} is not what was acknowledged: {self._known.turns}")
            self._known = replace(self._known, turns=turns)
        self._lives.figures.done["turns found again"] += len(turns)
        return True

    async def _turn(self, random: Random) -> None:
        """Take a turn whose output can be predicted, and compare the answer with the prediction."""
        new = [random.randrange(250) for _ in range(random.randint(1, 20))]
        output = expected_output([*self._known.tokens, *new], random.randint(1, 8), VOCAB)
        before, tokens = len(self._known.tokens), (*self._known.tokens, *new, *output)
        self._unconfirmed = History(tokens, (*self._known.turns, (0, len(tokens))))
        body = {"input_ids": new, "max_tokens": len(output), "temperature": 0, "ignore_eos": True}
        answer = await self._request("turns", body)
        if answer is None:
            return
        if (answer["output_ids"], answer["history"], answer["start"], answer["position"]) != (
            output, before, before, len(tokens),
        ):  # fmt: skip
            self._complain(f"{output} was expected, not {answer}")
        self._known = History(tokens, (*self._known.turns, (answer["turn"], len(tokens))))

    async def _rewind(self, random: Random) -> None:
        turns = self._known.turns[: random.randrange(len(self._known.turns))]
        rewound = History(self._known.tokens[: turns[-1][1] if turns else 0], turns)
        self._unconfirmed = rewound
        if await self._request("rewind", {"turn": turns[-1][0] if turns else 0}) is not None:
            self._known = rewound

    async def _request(self, what: str, body: Any) -> Any:
        """Send a request and return its answer; None if the request was refused or not answered.

        A request without an answer may have been carried out.
        """
        answer = await self._caller.ask("POST", f"{self._path}/{what}", body)
        if answer is None:
            return None
        self._unconfirmed = None
        if answer[0] == 200:
            self._lives.figures.done[what] += 1
            return answer[1]
        if answer[0] not in REFUSED:
            self._complain(f"{what}: {answer}")
        await asyncio.sleep(RETRY_S)
        return None

    def _complain(self, what: str) -> None:
        self._lives.figures.complain(f"{self._name}: {what}")


class Tenant:
    """A client with an API key and sessions, which also tries to reach the sessions of the other key."""

    def __init__(self, lives: Lives, name: str, seed: int) -> None:
        self._lives = lives
        self._name = name
        self._random = Random(f"{name} {seed}")
        [self._other] = set(TENANTS) - {name}
        self._ids = {*SHARED, own(name)}

    async def live(self) -> None:
        """Run all sessions until cancelled."""
        async with Caller(self._lives, self._name, f"tenant {self._name}") as caller, asyncio.TaskGroup() as tasks:
            for id in sorted(self._ids):
                answer = await caller.ask("POST", "/v1/sessions", {"id": id})
                assert answer is not None and answer[0] == 200, answer
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
            answer = await caller.ask("GET", "/v1/sessions")
            if answer is not None and answer[0] == 200 and {each["id"] for each in answer[1]["data"]} != self._ids:
                self._lives.figures.complain(f"{self._name} was shown {answer[1]}")
            answer = await caller.ask(*self._random.choice(tries))
            if answer is not None and answer[0] not in (404, *REFUSED):
                self._lives.figures.complain(f"{self._name} reached what is the other's: {answer}")
            self._lives.figures.done["tries of one key to reach the other's sessions"] += 1


def own(name: str) -> str:
    """Return the id of the session that only the API key `name` has."""
    return f"of-{name}"
