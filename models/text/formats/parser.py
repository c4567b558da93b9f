"""A model's output as events, while it comes."""

from baton.models.text.formats.content import ToolFormat, read_content, read_plain
from baton.models.text.formats.events import Events, OutputEvent
from baton.models.text.formats.pieces import Pieces, Reading
from baton.models.text.formats.thinking import ReasoningFormat, read_reasoning
from baton.models.text.formats.values import Tools


class OutputParser:
    """Takes an output apart: reasoning first, then the answer with calls of tools in it.

    The events, joined, do not depend on how the text is split. Text waits only while it may begin a marker, or a call
    whose name is not known yet. No text raises; what is no well-formed call is content as it was written. A call that
    goes wrong or ends after its name was told keeps the arguments that were told, which do not parse (CallEnded.whole
    is False), and what follows them is content.

    reasoning, tool_format: None where that is not looked for. begun: reasoning, by the prompt.
    tools: the schema of each tool's parameters, by name. A call may name others.
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
        """More of the output, and what is certain by now."""
        self._pieces.give(text)
        next(self._reading)
        return self._events.take()

    def finish(self) -> list[OutputEvent]:
        """The output is over: what was held back. No push may follow."""
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
