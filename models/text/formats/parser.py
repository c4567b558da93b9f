"""A parser that turns a model's output into events while it is generated."""

from baton.models.text.formats.content import ToolFormat, read_content, read_plain
from baton.models.text.formats.events import Events, OutputEvent
from baton.models.text.formats.pieces import Pieces, Reading
from baton.models.text.formats.thinking import ReasoningFormat, read_reasoning
from baton.models.text.formats.values import Tools


class OutputParser:
    """A parser of one output: reasoning first, then the answer with tool calls in it.

    The events, joined, do not depend on how the text is split into pushes. Text is held back only while it may begin a
    marker, or a call whose name is not known yet. No text raises an error: what is not a well-formed call is content,
    exactly as written. A call that goes wrong, or is cut off, after its name was emitted keeps the arguments emitted so
    far, which do not parse (CallEnded.whole is False); text after them is content.

    reasoning: the format of reasoning; None if the output is not searched for any.
    begun: whether the prompt has already opened the reasoning.
    tool_format: the format of tool calls; None if the output is not searched for any.
    tools: the schema of each tool's parameters, by the tool's name. A call may also name other tools.
    """

    def __init__(
        self,
        reasoning: ReasoningFormat | None = None,
        begun: bool = False,
        tool_format: ToolFormat | None = None,
        tools: Tools | None = None,
    ) -> None:
        self._pieces = Pieces()
        self._events = Events()
        self._reading = self._read(reasoning, begun, tool_format, tools or {})
        next(self._reading)

    def push(self, text: str) -> list[OutputEvent]:
        """Add text of the output, and return the events that are certain by now."""
        self._pieces.give(text)
        next(self._reading)
        return self._events.take()

    def finish(self) -> list[OutputEvent]:
        """End the output, and return the events of the text that was held back. No push may follow."""
        self._pieces.end()
        next(self._reading, None)
        return self._events.take()

    def _read(
        self, reasoning: ReasoningFormat | None, begun: bool, tool_format: ToolFormat | None, tools: Tools
    ) -> Reading[None]:
        pieces, events = self._pieces, self._events
        if reasoning is not None:
            call = () if tool_format is None else tool_format.ends_reasoning
            yield from read_reasoning(pieces, events, reasoning, begun, call)
        if tool_format is None:
            yield from read_plain(pieces, events)
        else:
            yield from read_content(pieces, events, tool_format, tools)
