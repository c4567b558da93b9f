"""The well-behaved client, in a process of its own so that only the server can delay it.

It prints a line for each answer; see Measurement.
"""

import asyncio
import itertools
import json
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import msgspec
from tokenizers import Tokenizer

from baton.models.hash_definition import expected_output
from tests.fuzz.shapes import VOCAB

TOKENS = 8
PAUSE_S = 0.03
AWAY_S = 0.05


class Measurement(msgspec.Struct):
    """A request and the result of its answer. Times are seconds of the monotonic clock."""

    began: float  # when the request was sent
    took: float  # time until the complete answer
    status: int  # 0 if there was no answer
    right: bool  # whether the answer was as predicted
    error: str = ""


class WellBehaved:
    """A client that sends one request at a time over a persistent connection, alternating tokens and chat."""

    def __init__(self, url_file: Path, model: Path, key: str) -> None:
        self._url_file = url_file
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._headers = {"Authorization": f"Bearer {key}"}
        self._random = Random(1)

    async def run(self) -> None:
        """Send requests until the process is terminated."""
        async with aiohttp.ClientSession(headers=self._headers) as http:
            for number in itertools.count():
                ask = self._ask_tokens if number % 2 else self._ask_chat
                began = time.monotonic()
                try:
                    status, right = await ask(http, self._url_file.read_text())
                    measurement = Measurement(began, time.monotonic() - began, status, right)
                except (aiohttp.ClientError, OSError) as error:
                    measurement = Measurement(began, time.monotonic() - began, 0, False, repr(error))
                    await asyncio.sleep(AWAY_S)
                print(msgspec.json.encode(measurement).decode(), flush=True)
                await asyncio.sleep(PAUSE_S)

    async def _ask_tokens(self, http: aiohttp.ClientSession, url: str) -> tuple[int, bool]:
        prompt = [self._random.randrange(250) for _ in range(self._random.randint(1, 40))]
        params = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": params}
        status, answer = await post(http, f"{url}/generate", body)
        return status, status != 200 or answer["output_ids"] == expected_output(prompt, TOKENS, VOCAB)

    async def _ask_chat(self, http: aiohttp.ClientSession, url: str) -> tuple[int, bool]:
        text = "".join(self._random.choices("abcdefgh ", k=self._random.randint(1, 20)))
        body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "ignore_eos": True}
        status, answer = await post(http, f"{url}/v1/chat/completions", body | {"max_tokens": TOKENS})
        prompt = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        expected = expected_output(self._tokenizer.encode(prompt).ids, TOKENS, VOCAB)
        return status, status != 200 or answer["choices"][0]["message"]["content"] == self._tokenizer.decode(expected)


async def post(http: aiohttp.ClientSession, url: str, body: Any) -> tuple[int, Any]:
    async with http.post(url, json=body) as response:
        return response.status, json.loads(await response.read())


if __name__ == "__main__":
    asyncio.run(WellBehaved(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]).run())
