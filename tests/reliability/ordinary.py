"""Ordinary clients: they chat while the well-behaved client is measured, with and without hostile clients."""

import asyncio
from random import Random

from tests.reliability.lives import TENANTS, Caller, Lives

PAUSE_S = 0.1


async def chat(lives: Lives, seed: int) -> None:
    """Chat with short messages until cancelled."""
    random = Random(seed)
    key = random.choice(TENANTS)
    async with Caller(lives, key, "chat") as caller:
        while True:
            text = "".join(random.choices("abcdefgh ", k=random.randint(1, 80)))
            body = {"messages": [{"role": "user", "content": text}], "max_tokens": random.randint(1, 24)}
            answer = await caller.ask("POST", "/v1/chat/completions", body)
            if answer is not None and answer[0] not in (200, 429, 503):
                lives.figures.complain(f"chat: {answer}")
            await asyncio.sleep(random.uniform(0, PAUSE_S))
