"""What a model's output is made of, as it comes."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Content:
    """More of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call of the tool `name`, the index-th of this output, from 0. Its arguments follow; no two calls overlap."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON object that a call's arguments are."""

    index: int
    json: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """whole: its arguments are a JSON object; else they are only the beginning of one, which does not parse."""

    index: int
    whole: bool


OutputEvent = Content | Reasoning | CallBegun | CallArguments | CallEnded


class Events:
    """Events on their way out. What comes of one kind between two calls of `take` is one event."""

    def __init__(self) -> None:
        self._events: list[OutputEvent] = []
        self._calls = 0
        # Text that is to be one event, and of what kind.
        self._parts: list[str] = []
        self._kind: Literal["content", "reasoning", "arguments"] = "content"

    def content(self, text: str) -> None:
        self._add("content", text)

    def reasoning(self, text: str) -> None:
        self._add("reasoning", text)

    def arguments(self, json: str) -> None:
        """More of those of the call that was begun last."""
        self._add("arguments", json)

    def begin(self, name: str) -> None:
        self._join()
        self._events.append(CallBegun(self._calls, name))
        self._calls += 1

    def end(self, whole: bool) -> None:
        self._join()
        self._events.append(CallEnded(self._calls - 1, whole))

    def take(self) -> list[OutputEvent]:
        """All events since the last time."""
        self._join()
        events, self._events = self._events, []
        return events

    def _add(self, kind: Literal["content", "reasoning", "arguments"], text: str) -> None:
        if kind != self._kind:
            self._join()
            self._kind = kind
        self._parts.append(text)

    def _join(self) -> None:
        text = "".join(self._parts)
        self._parts.clear()
        if not text:
            return
        match self._kind:
            case "content":
                self._events.append(Content(text))
            case "reasoning":
                self._events.append(Reasoning(text))
            case "arguments":
                self._events.append(CallArguments(self._calls - 1, text))
