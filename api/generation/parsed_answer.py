"""Parsing of one request's outputs into answer text, reasoning and tool calls."""

import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

from baton.actors import tokens
from baton.actors.requests import Output
from baton.api.generation.answers import Answer
from baton.api.generation.messages import Message, call_message
from baton.api.generation.request_builder import Prompt
from baton.api.generation.served_model import ServedModel
from baton.api.generation.tools import NO_TOOLS, ToolUse
from baton.models.text.formats.events import CallArguments, CallBegun, CallEnded, Content, OutputEvent, Reasoning
from baton.models.text.formats.parser import OutputParser

# Sizes in tokens. The marker that ends reasoning is searched for in overlapping windows. A marker with its surroundings
# is shorter than OVERLAP, so one window always contains all of it.
WINDOW, OVERLAP = 64, 32


@dataclass
class CalledTool:
    """A tool call in an answer."""

    id: str
    name: str
    namespace: str = ""
    pieces: list[str] = field(default_factory=list)  # parts of the arguments' JSON, in order
    whole: bool = False  # whether the arguments are a complete JSON object, rather than a part of one

    @property
    def arguments(self) -> str:
        return "".join(self.pieces)


class ParsedAnswer:
    """The parsed outputs of one request so far. The result does not depend on how the text is split into outputs."""

    def __init__(self, model: ServedModel, prompt: Prompt, use: ToolUse = NO_TOOLS, id: str = "") -> None:
        """prompt: says whether the output begins inside reasoning.

        use: the tools whose calls are recognized.
        id: id of the request, from which call ids derive; without an id they are random.
        """
        formats = model.formats
        self._id = id.replace("_", "-").partition("-")[2] or uuid.uuid4().hex
        schemas = {tool.name: tool.parameters for tool in use.callable}
        self._namespaces = {tool.name: tool.namespace for tool in use.callable}
        self.calls: list[CalledTool] = []
        """The calls so far; events name a call by its index. Cut-off calls are included, with `whole` False."""
        self.finish_reason: str | None = None
        """The finish_reason of the request, or "tool_calls" if the model stopped by itself after a complete call."""
        self._parser = OutputParser(formats.reasoning, prompt.in_reasoning, formats.tools if schemas else None, schemas)
        self._most = None if use.parallel else 1  # calls beyond this many are dropped
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._finished = False
        self._counter = ReasoningTokens(lambda ids: model.text.decode(ids, skip_special_tokens=False), formats.ending)

    @classmethod
    def of(cls, answer: Answer, model: ServedModel, prompt: Prompt, use: ToolUse = NO_TOOLS, id: str = "") -> Self:
        """Parse a complete answer."""
        parsed = cls(model, prompt, use, id)
        parsed.read(answer.text, answer.ids)
        parsed.finish(answer.finish_reason)
        return parsed

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def reasoning_tokens(self) -> int:
        """The number of tokens up to the end of reasoning, markers included; 0 without reasoning."""
        return self._counter.count if self._reasoning else 0

    @property
    def plain(self) -> bool:
        """Whether the output has neither reasoning nor tool calls. A call that was cut off counts as a call."""
        return not self._reasoning and not self.calls

    @property
    def message(self) -> Message:
        """The answer as a message for chat templates, without cut-off calls, which templates cannot show."""
        message: Message = {"role": "assistant", "content": self.content}
        if self._reasoning:
            message["reasoning_content"] = self.reasoning
        if calls := [call_message(call.id, call.name, call.arguments) for call in self.calls if call.whole]:
            message["tool_calls"] = calls
        return message

    @property
    def called(self) -> bool:
        """Whether the answer has at least one complete call."""
        return any(call.whole for call in self.calls)

    def add(self, output: Output) -> list[OutputEvent]:
        """Parse the next output. Return the events of all text that no later text can reinterpret."""
        events = self.read(output.text, tokens.unpack(output.tokens))
        if output.finish_reason is not None:
            events += self.finish(output.finish_reason)
        return events

    def read(self, text: str, ids: Sequence[int]) -> list[OutputEvent]:
        """Parse the next text. ids: the tokens of this text."""
        self._counter.add(ids)
        return self._note(self._parser.push(text))

    def finish(self, finish_reason: str | None) -> list[OutputEvent]:
        """Parse the text that was held back, once the request has ended or failed. Later calls do nothing."""
        if self._finished:
            return []
        self._finished = True
        events = self._note(self._parser.finish())
        self._counter.end()
        self.finish_reason = "tool_calls" if finish_reason == "stop" and self.called else finish_reason
        return events

    def _note(self, events: Sequence[OutputEvent]) -> list[OutputEvent]:
        events = [event for event in events if not self._is_one_too_many(event)]
        for event in events:
            if not isinstance(event, Reasoning):
                self._counter.end()
            match event:
                case Content(text):
                    self._content.append(text)
                case Reasoning(text):
                    self._reasoning.append(text)
                case CallBegun(_, name):
                    id = f"call_{self._id}_{len(self.calls)}"
                    self.calls.append(CalledTool(id, name, self._namespaces.get(name, "")))
                case CallArguments(index, json):
                    self.calls[index].pieces.append(json)
                case CallEnded(index, whole):
                    self.calls[index].whole = whole
        return events

    def _is_one_too_many(self, event: OutputEvent) -> bool:
        if isinstance(event, Content | Reasoning) or self._most is None:
            return False
        return event.index >= self._most


class ReasoningTokens:
    """A counter of the tokens up to the end of reasoning."""

    def __init__(self, decode: Callable[[Sequence[int]], str], ending: re.Pattern[str] | None) -> None:
        """decode: turns tokens into text, special tokens included.

        ending: matches the marker that ends reasoning; None if the model has none.
        """
        self._decode = decode
        self._ending = ending
        self._ids: list[int] = []
        self._count: int | None = None

    @property
    def count(self) -> int:
        """The number of reasoning tokens: all tokens so far until reasoning has ended."""
        return self._count if self._count is not None else len(self._ids)

    def add(self, ids: Sequence[int]) -> None:
        if self._count is None:
            self._ids += ids

    def end(self) -> None:
        """Find the end of reasoning in the tokens so far, because the parser has seen it."""
        if self._count is None:
            self._count = self._find()
            self._ids = []

    def _find(self) -> int:
        """Return the number of tokens up to and including the end marker, or of all tokens if there is no marker."""
        for begin in range(0, len(self._ids), WINDOW):
            first = max(begin - OVERLAP, 0)
            low, high = first, min(begin + WINDOW, len(self._ids))
            if not self._ends(first, high):
                continue
            while low + 1 < high:
                middle = (low + high) // 2
                low, high = (low, middle) if self._ends(first, middle) else (middle, high)
            return high
        return len(self._ids)

    def _ends(self, first: int, last: int) -> bool:
        return self._ending is not None and self._ending.search(self._decode(self._ids[first:last])) is not None
