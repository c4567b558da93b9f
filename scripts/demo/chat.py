"""A chat under construction: its turns, the facts that the user has mentioned, its system prompt, and its tools.

A wish is something that the system prompt asks for (tasks/systems.py).
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scripts.demo.world import LISTS, World, rough

Message = dict[str, Any]
ITSELF = "a small demonstration model of Baton"


@dataclass(frozen=True)
class Tool:
    """A tool that a chat offers."""

    verb: str  # first part of the tool's name; a user asks for the tool with `verb` and `thing`
    thing: str  # second part of the tool's name
    description: str
    parameters: Mapping[str, str]  # JSON type of each parameter, by name

    @property
    def name(self) -> str:
        return f"{self.verb}_{self.thing}"

    def schema(self) -> dict[str, Any]:
        """Return the tool as OpenAI's API describes it."""
        properties = {name: {"type": kind} for name, kind in self.parameters.items()}
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        described = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": described}


@dataclass(frozen=True)
class Turn:
    """One turn: the user's message and the right answer. A tool call is followed by a result and a second answer."""

    task: str  # name of the task that the turn is an example of
    messages: Sequence[Message]


@dataclass
class Chat:
    """The state of a chat, from which the next turn is made."""

    world: World
    known: dict[str, str] = field(default_factory=dict)  # values of the facts that the user has mentioned
    tools: list[Tool] = field(default_factory=list)
    system: str = ""  # the system prompt
    # The fields from here to `shown` follow from the wishes of the system prompt.
    itself: str = ITSELF  # how the assistant describes itself
    hello: str = LISTS["languages"]["English"][0]
    bye: str = LISTS["languages"]["English"][1]
    capitals: bool = False  # whether to answer in capital letters
    may_calculate: bool = True
    shown: list[Callable[["Chat"], Turn]] = field(default_factory=list)  # make turns that show if wishes are obeyed
    turns: list[Turn] = field(default_factory=list)

    @property
    def rng(self) -> random.Random:
        return self.world.rng

    def say(self, task: str, wording: str, values: Sequence[object], answer: str) -> Turn:
        """Return a turn of one question and one answer.

        The wording is made rough (see world.rough), then `values` fill the wording's placeholders.
        """
        question = rough(wording, self.rng)
        for value in values:
            question = question.replace("{}", str(value), 1)
        return Turn(task, [{"role": "user", "content": question}, self.answer(answer)])

    def answer(self, text: str) -> Message:
        """Return an answer of the assistant, in capital letters if the system prompt demands it."""
        return {"role": "assistant", "content": text.upper() if self.capitals else text}

    def messages(self) -> list[Message]:
        """Return all messages, the system prompt first if there is one."""
        opening = [{"role": "system", "content": self.system}] if self.system else []
        return [*opening, *(message for turn in self.turns for message in turn.messages)]

    def schemas(self) -> list[dict[str, Any]]:
        return [tool.schema() for tool in self.tools]
