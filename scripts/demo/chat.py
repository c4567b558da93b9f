"""A chat as it grows: what has been said, what the user has told, what the system prompt asks for, and the tools."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scripts.demo.world import LISTS, World, rough

Message = dict[str, Any]
ITSELF = "a small demonstration model of Baton"


@dataclass(frozen=True)
class Tool:
    """A function that the chat's system part tells of; parameters: the JSON type of each.

    verb, thing: what its name is made of, and how a user asks for it.
    """

    verb: str
    thing: str
    description: str
    parameters: Mapping[str, str]

    @property
    def name(self) -> str:
        return f"{self.verb}_{self.thing}"

    def schema(self) -> dict[str, Any]:
        """As OpenAI's API has it."""
        properties = {name: {"type": kind} for name, kind in self.parameters.items()}
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        described = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": described}


@dataclass(frozen=True)
class Turn:
    """What the user says and what is to be answered: his message, then the assistant's, a tool's result between two.

    task: what it is an example of.
    """

    task: str
    messages: Sequence[Message]


@dataclass
class Chat:
    """The state of a chat.

    known: what the user has told, by the fact's name. What the system prompt has asked for: itself, what the assistant
    is to say that it is; hello, bye, its greetings; capitals, whether its answers are in capital letters;
    may_calculate; shown, turns that show it.
    """

    world: World
    known: dict[str, str] = field(default_factory=dict)
    tools: list[Tool] = field(default_factory=list)
    system: str = ""
    itself: str = ITSELF
    hello: str = LISTS["languages"]["English"][0]
    bye: str = LISTS["languages"]["English"][1]
    capitals: bool = False
    may_calculate: bool = True
    shown: list[Callable[["Chat"], Turn]] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    @property
    def rng(self) -> random.Random:
        return self.world.rng

    def say(self, task: str, wording: str, values: Sequence[object], answer: str) -> Turn:
        """A turn of one question and one answer. values: they fill the placeholders of the wording, made rough."""
        said = rough(wording, self.rng)
        for value in values:
            said = said.replace("{}", str(value), 1)
        return Turn(task, [{"role": "user", "content": said}, self.answer(answer)])

    def answer(self, text: str) -> Message:
        return {"role": "assistant", "content": text.upper() if self.capitals else text}

    def messages(self) -> list[Message]:
        """All of it, the system prompt first if there is one."""
        opening = [{"role": "system", "content": self.system}] if self.system else []
        return [*opening, *(message for turn in self.turns for message in turn.messages)]

    def schemas(self) -> list[dict[str, Any]]:
        return [tool.schema() for tool in self.tools]
