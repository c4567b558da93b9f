"""Exams of a running server: each question in a session, in a fork of that session, and cold (with nothing cached)."""

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
    """An error: the server did not answer a request; the message says why."""


@dataclass(frozen=True)
class Answered:
    """One answer of the server."""

    text: str
    ids: list[int]  # its tokens
    prompt: int  # tokens of the prompt
    cached: int  # tokens of the prompt that came from the cache


@dataclass(frozen=True)
class Outcome:
    """The answers to one question."""

    score: Score  # score of the answer in the session
    session: Answered
    cold: Answered  # the answer with nothing cached
    forked: Answered | None  # the answer in a fork of the session; None if there is no turn to fork after

    @property
    def same_cold(self) -> bool:
        return self.cold.ids == self.session.ids

    @property
    def same_forked(self) -> bool | None:
        return None if self.forked is None else self.forked.ids == self.session.ids


class Client:
    """A client of the server's sessions."""

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
        """Add a turn to the session. Return the turn's number and the greedy answer."""
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
    """Return the outcomes of `samples` questions of one exam; at most `at_once` questions are in progress."""
    free = asyncio.Semaphore(at_once)

    async def one(number: int) -> Outcome:
        async with free:
            return await sit(client, make_exam(name, number, turns, seed))

    return list(await asyncio.gather(*(one(number) for number in range(samples))))


async def sit(client: Client, chat: Chat) -> Outcome:
    """Hold a chat in a session, with the server's own answers, and score the last answer.

    The last question is then sent again in a fork that ends before this question. Finally the whole chat is sent as one
    turn, under a new cache salt, so that nothing is cached.
    """
    messages = plain(chat.messages(), chat.schemas())
    session, forked, history, before, after = await client.open(), None, list[Text](), 0, 0
    sessions = [session]
    try:
        for part in parts(messages):
            before = after
            after, answer = await client.say(session, part)
            history += [*part, {"role": "assistant", "content": answer.text}]
        if before:
            sessions.append(await client.fork(session, before))
            _, forked = await client.say(sessions[-1], part)
        sessions.append(await client.open(cache_salt=secrets.token_hex(8)))
        _, cold = await client.say(sessions[-1], history[:-1])
    finally:
        for each in sessions:
            await client.close(each)
    return Outcome(score(chat.turns[-1].messages[-1], answer.text), answer, cold, forked)


def parts(messages: Sequence[Text]) -> list[list[Text]]:
    """Return the messages in groups, one group before each answer; the answers themselves are left out."""
    found: list[list[Text]] = [[]]
    for message in messages:
        if message["role"] == "assistant":
            found.append([])
        else:
            found[-1].append(message)
    return [part for part in found if part]
