"""Exams: chats whose last turn is the question. They use words, numbers and seeds that training never shows."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from scripts.demo.chat import Chat, Message, Turn
from scripts.demo.tasks import a_turn, arithmetic, facts, lists, manners, systems, tools
from scripts.demo.world import World

CALL = "<tool_call>\n"
CALL_END = "\n</tool_call>"
Question = Callable[[Chat, int], None]
"""A function that fills a chat with a number of turns; the last turn is the question."""


@dataclass(frozen=True)
class Score:
    """The score of one answer."""

    right: bool
    well_formed: bool | None = None  # whether a tool call is well formed; None if the right answer is text


def make_exam(name: str, number: int, turns: int, seed: int = 0) -> Chat:
    """Return chat `number` of an exam, always the same for the same arguments."""
    chat = Chat(World(random.Random(f"exam {name} {turns} {seed} {number}"), held_out=True))
    EXAMS[name](chat, turns)
    return chat


def score(expected: Message, answer: str) -> Score:
    """Score an answer: text must be equal; a tool call must have the same content, in any JSON layout."""
    if not expected.get("tool_calls"):
        return Score(answer == expected["content"])
    [call] = expected["tool_calls"]
    found = read_call(answer)
    return Score(found == call["function"], well_formed=found is not None)


def read_call(text: str) -> dict[str, Any] | None:
    """Return the name and arguments of a tool call, or None if the message is not exactly one tool call."""
    if not (text.startswith(CALL) and text.endswith(CALL_END)):
        return None
    try:
        call = json.loads(text[len(CALL) : -len(CALL_END)])
    except ValueError:
        return None
    formed = isinstance(call, dict) and call.keys() == {"name", "arguments"} and isinstance(call["arguments"], dict)
    return call if formed else None


def recall(count: int, among: tuple[str, ...] = tuple(facts.FACTS)) -> Question:
    """Return an exam: the user mentions `count` facts, other turns follow, then the user asks for the facts."""

    def fill(chat: Chat, turns: int) -> None:
        keys = chat.rng.sample(among, count)
        chat.turns.append(facts.tell_of(chat, keys))
        others(chat, turns - 2, fixed=keys)
        chat.turns.append(facts.ask_for(chat, keys))

    return fill


def corrected(chat: Chat, turns: int) -> None:
    """Fill a chat: mention a fact, later correct it, and ask for it at the end."""
    key = chat.rng.choice(list(facts.FACTS))
    between = max(0, turns - 3)
    chat.turns.append(facts.tell_of(chat, [key]))
    others(chat, between // 2, fixed=[key])
    chat.turns.append(facts.tell_of(chat, [key]))
    others(chat, between - between // 2, fixed=[key])
    chat.turns.append(facts.ask_for(chat, [key]))


def never_told(chat: Chat, turns: int) -> None:
    """Fill a chat: after other turns, ask for a fact that the user has not mentioned."""
    key = chat.rng.choice(list(facts.FACTS))
    others(chat, turns - 1, fixed=[key])
    chat.turns.append(facts.ask_for(chat, [key]))


def of_task(make: Callable[[Chat], Turn]) -> Question:
    """Return an exam: other turns, then a self-contained question that `make` makes."""

    def fill(chat: Chat, turns: int) -> None:
        others(chat, turns - 1)
        chat.turns.append(make(chat))

    return fill


def system_prompts(chat: Chat, turns: int) -> None:
    """Fill a chat: after other turns, ask something that shows whether the system prompt is obeyed."""
    systems.prompt(chat, wishes=1.0)
    others(chat, turns - 1, fixed=["name"])
    chat.turns.append(systems.obey(chat))


def with_tools(make: Callable[[Chat], Turn]) -> Question:
    """Return an exam in a chat with tools: other turns, then a question that `make` makes."""

    def fill(chat: Chat, turns: int) -> None:
        tools.equip(chat)
        others(chat, turns - 1)
        chat.turns.append(make(chat))

    return fill


def call(chat: Chat) -> Turn:
    """Make a turn of a request and the tool call that answers it, without the tool's result."""
    turn = tools.call(chat)
    return Turn(turn.task, turn.messages[:2])


def others(chat: Chat, count: int, fixed: list[str] | None = None) -> None:
    """Add `count` turns of any tasks that leave the facts `fixed` unchanged."""
    known = dict(chat.known)
    while count > 0:
        turn = a_turn(chat)
        if any(chat.known.get(key) != known.get(key) for key in fixed or []):
            chat.known = known
            continue
        known, count = dict(chat.known), count - 1
        chat.turns.append(turn)


EXAMS: dict[str, Question] = {
    "recall": recall(1),
    "recall of a name": recall(1, ("name",)),
    "recall of two facts": recall(2),
    "recall of a corrected fact": corrected,
    "facts never told": never_told,
    "sums": of_task(arithmetic.add),
    "differences": of_task(arithmetic.subtract),
    "the larger": of_task(arithmetic.compare),
    "beyond its arithmetic": of_task(arithmetic.beyond),
    "repeating": of_task(lists.echo),
    "spelling": of_task(lists.spell),
    "spelling backwards": of_task(lists.backwards),
    "counting letters": of_task(lists.count_letters),
    "counting": of_task(lists.count_to),
    "counting things": of_task(lists.count_items),
    "sorting numbers": of_task(lists.sort_numbers),
    "sorting words": of_task(lists.sort_words),
    "courtesy": of_task(manners.courtesy),
    "questions outside its world": of_task(manners.unknown),
    "system prompts": system_prompts,
    "tool calls": with_tools(call),
    "tool results": with_tools(tools.call),
    "no tool fits": with_tools(tools.none_fits),
}
LEAST = {"recall": 0.98, "recall of a name": 0.98, "sums": 0.98, "tool calls": 0.95}
WELL_FORMED = 0.98
"""The goals of the bundled model: LEAST, the share of right answers; WELL_FORMED, the share of well-formed calls."""
