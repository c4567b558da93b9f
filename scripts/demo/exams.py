"""Examinations on words, numbers and seeds that training never shows: chats whose last turn is the question."""

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
"""Fills a chat of so many turns, of which the last is the question."""


@dataclass(frozen=True)
class Score:
    """well_formed: None where there is no form but the answer's."""

    right: bool
    well_formed: bool | None = None


def make_exam(name: str, number: int, turns: int, seed: int = 0) -> Chat:
    """The chat `number` of an examination. It is the same for the same arguments."""
    chat = Chat(World(random.Random(f"exam {name} {turns} {seed} {number}"), held_out=True))
    EXAMS[name](chat, turns)
    return chat


def score(expected: Message, given: str) -> Score:
    """By the letter; a call by what it says, however that is laid out."""
    if not expected.get("tool_calls"):
        return Score(given == expected["content"])
    [call] = expected["tool_calls"]
    found = read_call(given)
    return Score(found == call["function"], well_formed=found is not None)


def read_call(text: str) -> dict[str, Any] | None:
    """The name and the arguments of a message that is one call and nothing else; None if it is none."""
    if not (text.startswith(CALL) and text.endswith(CALL_END)):
        return None
    try:
        call = json.loads(text[len(CALL) : -len(CALL_END)])
    except ValueError:
        return None
    formed = isinstance(call, dict) and call.keys() == {"name", "arguments"} and isinstance(call["arguments"], dict)
    return call if formed else None


def recall(count: int, among: tuple[str, ...] = tuple(facts.FACTS)) -> Question:
    """Tell facts, speak of other things, ask for them."""

    def fill(chat: Chat, turns: int) -> None:
        asked = chat.rng.sample(among, count)
        chat.turns.append(facts.tell_of(chat, asked))
        others(chat, turns - 2, kept=asked)
        chat.turns.append(facts.ask_for(chat, asked))

    return fill


def corrected(chat: Chat, turns: int) -> None:
    """A fact is told, later told otherwise, and asked for at the end."""
    key = chat.rng.choice(list(facts.FACTS))
    between = max(0, turns - 3)
    chat.turns.append(facts.tell_of(chat, [key]))
    others(chat, between // 2, kept=[key])
    chat.turns.append(facts.tell_of(chat, [key]))
    others(chat, between - between // 2, kept=[key])
    chat.turns.append(facts.ask_for(chat, [key]))


def never_told(chat: Chat, turns: int) -> None:
    key = chat.rng.choice(list(facts.FACTS))
    others(chat, turns - 1, kept=[key])
    chat.turns.append(facts.ask_for(chat, [key]))


def of_task(make: Callable[[Chat], Turn]) -> Question:
    """A question that stands for itself, behind other turns."""

    def fill(chat: Chat, turns: int) -> None:
        others(chat, turns - 1)
        chat.turns.append(make(chat))

    return fill


def system_prompts(chat: Chat, turns: int) -> None:
    systems.prompt(chat, wishes=1.0)
    others(chat, turns - 1, kept=["name"])
    chat.turns.append(systems.obey(chat))


def with_tools(make: Callable[[Chat], Turn]) -> Question:
    def fill(chat: Chat, turns: int) -> None:
        tools.equip(chat)
        others(chat, turns - 1)
        chat.turns.append(make(chat))

    return fill


def call(chat: Chat) -> Turn:
    """The call alone."""
    turn = tools.call(chat)
    return Turn(turn.task, turn.messages[:2])


def others(chat: Chat, count: int, kept: list[str] | None = None) -> None:
    """So many turns of any task, in which the facts `kept` are not told."""
    known = dict(chat.known)
    while count > 0:
        turn = a_turn(chat)
        if any(chat.known.get(key) != known.get(key) for key in kept or []):
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
"""What the bundled model has to reach: the part that is right, and of tool calls the part that is well formed."""
