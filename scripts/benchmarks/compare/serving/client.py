"""Clients of any server with OpenAI's completions: they send a schedule's requests and note when tokens arrive."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp

from scripts.benchmarks.compare.serving.schedule import Conversation, Load


@dataclass
class Answer:
    """The answer to one request. Times are those of time.perf_counter."""

    begin: float  # when the request was sent
    arrivals: list[float] = field(default_factory=list)  # time of each event that has text
    text: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None  # prompt tokens found in the cache; None if the server does not report it
    error: str = ""


class Target(Protocol):
    """A contender that answers concurrent requests."""

    async def answer(self, prompt: str, tokens: int) -> Answer: ...


class OverHTTP:
    """Any server with /v1/completions, of which the first listed model is used."""

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self._http = http
        self._model = ""

    async def answer(self, prompt: str, tokens: int) -> Answer:
        """Stream one answer. Failures are noted in the answer, not raised."""
        self._model = self._model or await self._first_model()
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answer = Answer(time.perf_counter())
        try:
            async with self._http.post("/v1/completions", json=body) as response:
                if response.status != 200:
                    answer.error = f"{response.status} {(await response.text())[:200]}"
                    return answer
                lines = [(time.perf_counter(), line) async for line in response.content if line.startswith(b"data: {")]
        except (aiohttp.ClientError, OSError) as error:
            answer.error = repr(error)
            return answer
        # Parse after the stream has ended: the client shares the server's cores, and would slow the server down.
        for at, line in lines:
            read_event(answer, at, json.loads(line.removeprefix(b"data: ")))
        if not answer.arrivals:
            answer.error = answer.error or "it ended without a token"
        answer.completion_tokens = answer.completion_tokens or len(answer.arrivals)
        return answer

    async def _first_model(self) -> str:
        async with self._http.get("/v1/models", raise_for_status=True) as response:
            return str((await response.json())["data"][0]["id"])


def read_event(answer: Answer, at: float, event: dict[str, Any]) -> None:
    """Add one event of the stream, which arrived at time `at`, to an answer."""
    if "error" in event:
        answer.error = str(event["error"])[:200]
    text = "".join(choice.get("text") or "" for choice in event.get("choices", []))
    if text:
        answer.arrivals.append(at)
        answer.text += text
    if usage := event.get("usage"):
        answer.prompt_tokens = usage["prompt_tokens"]
        answer.completion_tokens = usage["completion_tokens"]
        details = usage.get("prompt_tokens_details") or {}
        answer.cached_tokens = details.get("cached_tokens", answer.cached_tokens)


async def drive(target: Target, conversations: Sequence[Conversation], load: Load) -> list[Answer]:
    """Run all conversations, and return all answers. Each turn is sent after the answer to the previous turn."""
    answers, began = list[Answer](), time.perf_counter()
    pending = iter(conversations)

    async def talk(conversation: Conversation) -> None:
        if conversation.begins is not None:
            await asyncio.sleep(began + conversation.begins - time.perf_counter())
        log = ""
        for turn in conversation.turns:
            log = f"{log} {turn}".strip()
            answer = await target.answer(log, load.answer)
            answers.append(answer)
            if answer.error:
                return
            log = f"{log} {answer.text.strip()}"

    async def stream() -> None:
        for conversation in pending:
            await talk(conversation)

    async with asyncio.TaskGroup() as tasks:
        if load.rate:
            for conversation in conversations:
                tasks.create_task(talk(conversation))
        else:
            for _ in range(load.streams):
                tasks.create_task(stream())
    return answers
