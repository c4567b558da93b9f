"""Clients who chat, as there are beside the one that is measured, in its calm and under hostility alike."""

import asyncio
from random import Random

from tests.reliability.lives import TENANTS, Caller, Lives

PAUSE_S = 0.1


async def chat(lives: Lives, seed: int) -> None:
    """Until cancelled."""
    random = Random(seed)
    key = random.choice(TENANTS)
    async with Caller(lives, key, "chat") as caller:
        while True:
            said = "".join(random.choices("abcdefgh ", k=random.randint(1, 80)))
            body = {"messages": [{"role": "user", "content": said}], "max_tokens": random.randint(1, 24)}
            told = await caller.ask("POST", "/v1/chat/completions", body)
            if told is not None and told[0] not in (200, 429, 503):
                lives.figures.complain(f"chat: {told}")
            await asyncio.sleep(random.uniform(0, PAUSE_S))
