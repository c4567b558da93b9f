"""Time to first token of an agent's early step and of a late step.

Both steps add equally many tokens, but the late step adds them to a much longer chat.
"""

import argparse
import asyncio
import itertools
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from tokenizers import AddedToken, Tokenizer

from scripts.benchmarks.common.contenders import Workbench
from scripts.benchmarks.common.server import Served
from scripts.benchmarks.requests.grammars import with_bytes
from scripts.benchmarks.requests.sessions import compare, show
from scripts.demo.text import MARKS, SPECIALS, TEMPLATE

WORDS = "The file has a function that reads lines, counts words and gives them back in order. "
TOOLS = [
    {"type": "function", "function": {"name": f"tool_{index}", "description": WORDS, "parameters": {"type": "object"}}}
    for index in range(10)
]
EARLY = 2


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--turns", type=int, default=40, help="number of the late step")
    parser.add_argument("--result", type=int, default=600, help="characters of a tool's result; each step has one")


def run(options: argparse.Namespace, workbench: Workbench) -> None:
    vocabulary = workbench.config["vocab_size"]
    folder = with_chat(workbench.checkpoint, vocabulary) if options.model != "bundled" else workbench.checkpoint
    shape = Shape(options.turns, options.result)
    with Served(folder, options.threads, ["--log-format", "json"], workbench.log("agents")) as served:
        report(shape, asyncio.run(measure(served, shape, options.rounds or 7)))


@dataclass(frozen=True)
class Shape:
    """The sizes of the chats. Each step adds a tool call and the call's result."""

    steps: int  # number of the agent's step that is measured as the late one, from 1
    result: int  # characters of a tool's result


@dataclass
class Figures:
    """The figures of all rounds."""

    early: list[float] = field(default_factory=list)  # seconds to the first token of the early step
    late: list[float] = field(default_factory=list)  # seconds to the first token of the late step
    prompt: int = 0  # tokens of the late step's prompt
    cached: list[int] = field(default_factory=list)  # tokens of the late step's prompt that came from the cache


def with_chat(folder: Path, vocab_size: int) -> Path:
    """Return a copy of a model's folder with a byte tokenizer and the bundled model's chat template."""
    added = [*SPECIALS, *MARKS]
    copy = with_bytes(folder, vocab_size - len(added), "chat")
    tokenizer = Tokenizer.from_file(str(copy / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKS])
    tokenizer.save(str(copy / "tokenizer.json"))
    (copy / "tokenizer_config.json").unlink(missing_ok=True)
    (copy / "tokenizer_config.json").write_text(json.dumps({"eos_token": SPECIALS[2]}))
    (copy / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return copy


class Agent:
    """A chat that grows step by step, with the same words in each round.

    name: cache salt of the chat, which therefore shares no cached state with other chats.
    """

    def __init__(self, http: aiohttp.ClientSession, name: str, result: int) -> None:
        self._http = http
        self._name = name
        self._result = (WORDS * (result // len(WORDS) + 1))[:result]
        self._messages: list[dict[str, Any]] = [
            {"role": "system", "content": f"You are an agent. {WORDS * 5}"},
            {"role": "user", "content": "Go."},
        ]
        self._steps = itertools.count()

    async def step(self) -> tuple[float, dict[str, Any]]:
        """Run one step, then append a tool call and its result. Return the seconds to the first token and the usage."""
        body = {"messages": self._messages, "tools": TOOLS, "max_tokens": 1, "cache_salt": self._name}
        options = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True, "temperature": 0}
        began = time.perf_counter()
        async with self._http.post("/v1/chat/completions", json=body | options, raise_for_status=True) as answer:
            lines = [(time.perf_counter() - began, line) async for line in answer.content]
        events = [(at, json.loads(line.removeprefix(b"data: "))) for at, line in lines if line.startswith(b"data: {")]
        seconds = next(at for at, event in events if event["choices"] and event["choices"][0]["finish_reason"])
        self._append_call(next(self._steps))
        return seconds, events[-1][1]["usage"]

    def _append_call(self, step: int) -> None:
        function = {"name": f"tool_{step % len(TOOLS)}", "arguments": json.dumps({"step": step})}
        call = {"id": f"call_{step}", "type": "function", "function": function}
        self._messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        self._messages.append({"role": "tool", "tool_call_id": call["id"], "content": self._result})


async def measure(served: Served, shape: Shape, rounds: int) -> Figures:
    """Measure, in each round, one step of a new short chat and one of a new long chat. The first round warms up."""
    figures = Figures()
    async with aiohttp.ClientSession(served.url) as http:
        for number in range(rounds + 1):
            early, late = (Agent(http, f"{kind} {number}", shape.result) for kind in ("early", "late"))
            for agent, steps in ((late, shape.steps), (early, EARLY)):
                for _ in range(steps - 1):
                    await agent.step()
            order = (early, late) if number % 2 else (late, early)
            found = {agent: await agent.step() for agent in order}
            if number:
                figures.early.append(found[early][0])
                figures.late.append(found[late][0])
                usage = found[late][1]
                figures.prompt = usage["prompt_tokens"]
                figures.cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    return figures


def report(shape: Shape, figures: Figures) -> None:
    print(f"{'an agent, ms to first token':<44}{'median':>10}{'min':>10}{'max':>10}")
    show(f"step {EARLY}", figures.early)
    show(f"step {shape.steps}, a prompt of {figures.prompt:,} tokens", figures.late)
    print(f"of that prompt {100 * min(figures.cached) / figures.prompt:.1f} % came from the cache")
    ratios = [late / early for early, late in zip(figures.early, figures.late, strict=True)]
    compare(f"step {shape.steps} / step {EARLY}", ratios)
