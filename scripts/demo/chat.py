"""A chat under construction: its messages, known facts, the wishes of its system prompt, and its tools."""

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

    verb: str  # first part of its name, and how a user asks for it
    thing: str  # second part of its name, and how a user asks for it
    description: str
    parameters: Mapping[str, str]  # name: JSON type

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
    """One turn: the user's message and the right answer. A tool call adds its result and a second answer."""

    task: str  # that it is an example of
    messages: Sequence[Message]


@dataclass
class Chat:
    """The state of a chat."""

    world: World
    known: dict[str, str] = field(default_factory=dict)  # facts that the user has mentioned, by name
    tools: list[Tool] = field(default_factory=list)
    system: str = ""  # the system prompt
    # Wishes of the system prompt:
    itself: str = ITSELF  # what the assistant says that it is
    hello: str = LISTS["languages"]["English"][0]
    bye: str = LISTS["languages"]["English"][1]
    capitals: bool = False  # answer in capital letters
    may_calculate: bool = True
    shown: list[Callable[["Chat"], Turn]] = field(default_factory=list)  # make turns that show whether it is obeyed
    turns: list[Turn] = field(default_factory=list)

    @property
    def rng(self) -> random.Random:
        return self.world.rng

    def say(self, task: str, wording: str, values: Sequence[object], answer: str) -> Turn:
        """Return a turn of one question and one answer.

        The wording is made rough (see world.rough), then `values` fill its placeholders.
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
