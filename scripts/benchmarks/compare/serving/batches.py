"""A queue for engines without a server, such as transformers: waiting requests form one static batch."""

import asyncio
import time
from typing import Self

from scripts.benchmarks.compare.serving.client import Answer
from scripts.benchmarks.peers.process import Peer

# A batch starts this many seconds after its first request; until then, more requests may join it.
GATHER_S = 0.02


class StaticBatches:
    """A Target (serving/client.py) that runs a peer's loop. Prompts are words of shapes.write_tokenizer."""

    def __init__(self, peer: Peer, rows: int) -> None:
        self._peer, self._rows = peer, rows
        self._waiting: asyncio.Queue[tuple[list[int], int, asyncio.Future[Answer], float]] = asyncio.Queue()

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()

    async def answer(self, prompt: str, tokens: int) -> Answer:
        ids = [int(word.removeprefix("t")) for word in prompt.split()]
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.put_nowait((ids, tokens, future, time.perf_counter()))
        return await future

    async def _run(self) -> None:
        while True:
            batch = [await self._waiting.get()]
            await asyncio.sleep(GATHER_S)
            while len(batch) < self._rows and not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            prompts, most = [ids for ids, *_ in batch], max(tokens for _, tokens, *_ in batch)
            began = time.perf_counter()
            try:
                generated = await asyncio.to_thread(self._peer.generate, prompts, most)
            except RuntimeError as error:
                for *_, future, begin in batch:
                    future.set_result(Answer(begin, error=str(error)))
                continue
            for row, (ids, tokens, future, begin) in enumerate(batch):
                arrivals = [began + at for at in generated.seconds[row][:tokens]]
                text = " ".join(f"t{id}" for id in generated.tokens[row][:tokens])
                future.set_result(Answer(begin, arrivals, text, len(ids), tokens, 0))
