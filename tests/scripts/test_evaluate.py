"""scripts/evaluate against the API with a fake ring that always gives the same answer."""

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from baton.actors.requests import Request
from scripts.demo.exams import CALL, CALL_END, EXAMS, make_exam, read_call, score
from scripts.demo.tasks.tools import NO_TOOL
from scripts.demo.text import plain, render
from scripts.evaluating.asking import Client, examine, parts
from scripts.evaluating.table import HEAD, Row, line
from tests.api.fake_ring import Served, serving

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).resolve().parents[2]
CONSTANT = "no tool fits"
SAMPLES = 3


async def row_of(served: Served, turns: int, task: str = CONSTANT) -> Row:
    client = Client(served.client.session, base=served.url)
    return Row.of(task, turns, await examine(client, task, turns, SAMPLES, seed=0, at_once=1))


@pytest.mark.parametrize(("reply", "right"), [(NO_TOOL, SAMPLES), ("Yes.", 0)])
async def test_right_answers_are_counted(reply: str, right: int) -> None:
    async with serving(max_model_len=8192) as served:
        served.ring.reply, served.ring.cached = reply, 5
        row = await row_of(served, turns=3)
        assert row.right == (right, SAMPLES) and row.cold == row.forked == (SAMPLES, SAMPLES)
        assert row.formed == (0, 0) and row.cached[0] == 5 * SAMPLES
        assert row.reaches(0.5) == bool(right)
        assert len(served.sessions) == 0


async def test_a_first_question_has_nothing_to_fork() -> None:
    async with serving(max_model_len=8192) as served:
        row = await row_of(served, turns=1)
        assert row.forked == (0, 0) and row.cold == (SAMPLES, SAMPLES)


async def test_different_tokens_cold_are_noticed() -> None:
    """The fake ring gives a different answer to requests with another salt, which are the cold ones."""
    async with serving(max_model_len=8192) as served:
        start, usual = served.ring._start, list[str]()

        def by_salt(request: Request) -> None:
            usual.append(request.salt)
            served.ring.reply = NO_TOOL if request.salt == usual[0] else "Brr."
            start(request)

        served.ring._start = by_salt  # type: ignore[method-assign]
        row = await row_of(served, turns=3)
        assert row.right == (SAMPLES, SAMPLES) == row.forked and row.cold == (0, SAMPLES)
        assert not row.reaches(0.5)


async def run(url: str, *arguments: str) -> tuple[int | None, list[str]]:
    script = [sys.executable, str(ROOT / "scripts" / "evaluate"), "--url", url, "--samples", "2", *arguments]
    process = await asyncio.create_subprocess_exec(*script, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    return process.returncode, output.decode().splitlines()


async def test_the_command_prints_a_table_and_sets_its_exit_code() -> None:
    async with serving(max_model_len=8192) as served:
        served.ring.reply = NO_TOOL
        tasks = ("--task", CONSTANT, "--turns", "2")
        code, lines = await run(served.url, *tasks, "--least", "1")
        assert code == 0 and "\n".join(lines[:2]) == HEAD
        assert lines[2].startswith(f"| {CONSTANT} | 2 | 2 of 2 |  | 2 of 2 | 2 of 2 | ") and len(lines) == 3
        assert (await run(served.url, *tasks, "--task", "sums", "--least", "0.5"))[0] == 1
        assert (await run(served.url, "--task", "sums", "--turns", "1"))[0] == 0
        url = served.url
    assert (await run(url, *tasks))[0] == 2


@pytest.mark.parametrize("name", EXAMS)
@pytest.mark.parametrize("turns", [1, 5])
def test_the_expected_answer_of_a_question_is_right(name: str, turns: int) -> None:
    """Each expected answer is scored as right. Exams are reproducible, and render alike with and without tools."""
    for number in range(5):
        chat = make_exam(name, number, turns)
        assert chat.messages() == make_exam(name, number, turns).messages()
        messages = plain(chat.messages(), chat.schemas())
        assert render(messages, []) == render(chat.messages(), chat.schemas())
        found = score(chat.turns[-1].messages[-1], messages[-1]["content"])
        assert found.right and found.well_formed is (True if name == "tool calls" else None)
        assert not score(chat.turns[-1].messages[-1], messages[-1]["content"][:-1]).right
        assert len(chat.turns) >= turns and len(parts(messages)) == sum(m["role"] == "assistant" for m in messages)


def test_a_tool_call_is_compared_by_content() -> None:
    call = {"name": "get_rain", "arguments": {"city": "Oslo", "days": 3}}
    assert read_call(CALL + json.dumps(call, indent=1) + CALL_END) == call
    broken = ("", "{", "[]", '{"name": "x"}', '{"name": "x", "arguments": 3}', '{"name": "x", "arguments": {}, "a": 1}')
    for text in (json.dumps(call), *(CALL + each + CALL_END for each in broken)):
        assert read_call(text) is None
    expected = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
    other = CALL + json.dumps({**call, "arguments": {"city": "Oslo", "days": "3"}}) + CALL_END
    found = score(expected, other)
    assert (found.right, found.well_formed) == (False, True)


def test_a_line_of_the_table() -> None:
    row = Row("tool calls", 12, (95, 100), (99, 100), (100, 100), (100, 100), (300, 400))
    assert line(row) == "| tool calls | 12 | 95 of 100 | 99 of 100 | 100 of 100 | 100 of 100 | 75% |"
    assert line(replace(row, formed=(0, 0), forked=(0, 0), cached=(0, 0))).endswith("|  | 100 of 100 |  |  |")
    assert row.reaches(0.95) and not row.reaches(0.96)
    assert not replace(row, formed=(94, 100)).reaches(0.95) and not replace(row, forked=(99, 100)).reaches(0.95)
