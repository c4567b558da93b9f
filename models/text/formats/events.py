"""Events: the parts of a model's output, emitted while it is generated."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Content:
    """A further piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A further piece of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The beginning of a tool call. Its arguments follow, then its end; no two calls overlap."""

    index: int  # the call's number in the output, from 0
    name: str  # the tool's name


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A further piece of the JSON object with a call's arguments."""

    index: int
    json: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The end of a tool call."""

    index: int
    whole: bool  # whether the arguments are a JSON object; otherwise they are the beginning of one, and do not parse


OutputEvent = Content | Reasoning | CallBegun | CallArguments | CallEnded


class Events:
    """A collector of events. Adjacent text of one kind between two calls of `take` becomes one event."""

    def __init__(self) -> None:
        self._events: list[OutputEvent] = []
        self._calls = 0  # calls begun so far
        self._parts: list[str] = []  # text that will become one event, of the kind `_kind`
        self._kind: Literal["content", "reasoning", "arguments"] = "content"

    def content(self, text: str) -> None:
        self._add("content", text)

    def reasoning(self, text: str) -> None:
        self._add("reasoning", text)

    def arguments(self, json: str) -> None:
        """Add to the arguments of the call that was begun last."""
        self._add("arguments", json)

    def begin(self, name: str) -> None:
        self._join()
        self._events.append(CallBegun(self._calls, name))
        self._calls += 1

    def end(self, whole: bool) -> None:
        self._join()
        self._events.append(CallEnded(self._calls - 1, whole))

    def take(self) -> list[OutputEvent]:
        """Return the events since the previous `take`."""
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
