"""Sits an examination with a running server: in a session, in its fork, and cold."""

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from scripts.demo.chat import Chat
from scripts.demo.exams import Score, make_exam, score
from scripts.demo.text import plain

LONGEST_ANSWER = 160
Text = dict[str, str]


class Refused(Exception):
    """The server did not answer a request; the message says why."""


@dataclass(frozen=True)
class Answered:
    """text, and the tokens it was given as; prompt, cached: tokens of what was sent, and of those out of the cache."""

    text: str
    ids: list[int]
    prompt: int
    cached: int


@dataclass(frozen=True)
class Outcome:
    """What came of one question. cold: asked without anything cached; forked: in a fork of the session.

    forked is None where there is no turn to fork behind.
    """

    score: Score
    session: Answered
    cold: Answered
    forked: Answered | None

    @property
    def same_cold(self) -> bool:
        return self.cold.ids == self.session.ids

    @property
    def same_forked(self) -> bool | None:
        return None if self.forked is None else self.forked.ids == self.session.ids


class Client:
    def __init__(self, http: aiohttp.ClientSession, base: str, key: str | None = None) -> None:
        self._http, self._base = http, base.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def open(self, **fields: str) -> str:
        return str((await self._post("/v1/sessions", fields))["id"])

    async def fork(self, session: str, turn: int) -> str:
        return str((await self._post(f"/v1/sessions/{session}/fork", {"turn": turn}))["id"])

    async def close(self, session: str) -> None:
        async with self._http.delete(f"{self._base}/v1/sessions/{session}", headers=self._headers) as answer:
            await answer.read()

    async def say(self, session: str, messages: Sequence[Text]) -> tuple[int, Answered]:
        """A turn of the session: its number, and what is answered greedily."""
        body = {"messages": list(messages), "temperature": 0, "max_tokens": LONGEST_ANSWER}
        turn = await self._post(f"/v1/sessions/{session}/turns", body)
        usage = turn["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return turn["turn"], Answered(turn["text"], turn["output_ids"], usage["prompt_tokens"], cached)

    async def _post(self, path: str, body: Any) -> Any:
        async with self._http.post(self._base + path, json=body, headers=self._headers) as answer:
            if answer.status != 200:
                raise Refused(f"{path}: {answer.status} {(await answer.text())[:300]}")
            return await answer.json()


async def examine(client: Client, name: str, turns: int, samples: int, seed: int, at_once: int) -> list[Outcome]:
    """The outcomes of so many questions of one examination."""
    free = asyncio.Semaphore(at_once)

    async def one(number: int) -> Outcome:
        async with free:
            return await sit(client, make_exam(name, number, turns, seed))

    return list(await asyncio.gather(*(one(number) for number in range(samples))))


async def sit(client: Client, chat: Chat) -> Outcome:
    """Hold the chat with the server's own answers; its last answer is what counts.

    The last message is then said again in a fork of the session that ends before it, and once more with all of the chat
    in one turn, under a salt of its own, so that nothing of it is cached.
    """
    messages = plain(chat.messages(), chat.schemas())
    session, forked, said, before, after = await client.open(), None, list[Text](), 0, 0
    sessions = [session]
    try:
        for heard in parts(messages):
            before = after
            after, answer = await client.say(session, heard)
            said += [*heard, {"role": "assistant", "content": answer.text}]
        if before:
            sessions.append(await client.fork(session, before))
            _, forked = await client.say(sessions[-1], heard)
        sessions.append(await client.open(cache_salt=secrets.token_hex(8)))
        _, cold = await client.say(sessions[-1], said[:-1])
    finally:
        for each in sessions:
            await client.close(each)
    return Outcome(score(chat.turns[-1].messages[-1], answer.text), answer, cold, forked)


def parts(messages: Sequence[Text]) -> list[list[Text]]:
    """What is said between answers, part by part; the answers are left out."""
    found: list[list[Text]] = [[]]
    for message in messages:
        if message["role"] == "assistant":
            found.append([])
        else:
            found[-1].append(message)
    return [part for part in found if part]
