"""The content blocks of an answer, both as events of a stream and as complete blocks."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from msgspec import Raw, Struct

from baton.api.generation.parsed_answer import CalledTool
from baton.models.text.formats.events import CallArguments, CallBegun, CallEnded, Content, OutputEvent, Reasoning

NO_INPUT = Raw(b"{}")
# One token of JSON: a bracket, a comma or colon, or a complete value.
PIECE = re.compile(
    r"""[ \t\r\n]*(?:(?P<opens>[{\[])|(?P<closes>[}\]])|(?P<mark>[:,])
    |(?P<value>"[^"\\]*(?:\\.[^"\\]*)*"|(?:true|false|null|-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)(?![0-9.eE+-])))""",
    re.VERBOSE,
)


class ReplyText(Struct, tag_field="type", tag="text"):
    text: str


class ReplyThinking(Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class ReplyToolUse(Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: Raw


WholeBlock: TypeAlias = ReplyText | ReplyThinking | ReplyToolUse


class TextDelta(Struct, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(Struct, tag_field="type", tag="signature_delta"):
    signature: str


class InputJsonDelta(Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


class BlockStart(Struct, tag_field="type", tag="content_block_start"):
    index: int
    content_block: WholeBlock


class BlockDelta(Struct, tag_field="type", tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class BlockStop(Struct, tag_field="type", tag="content_block_stop"):
    index: int


BlockEvent: TypeAlias = BlockStart | BlockDelta | BlockStop


@dataclass
class ReplyBlock:
    """A content block of an answer, which may still grow."""

    kind: Literal["text", "thinking", "tool_use"]
    call: CalledTool | None = None  # the tool call of a tool_use block
    pieces: list[str] = field(default_factory=list)  # parts of the text, or of a tool's input as JSON

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def empty(self) -> WholeBlock:
        """Return the block without content, as content_block_start announces it."""
        if self.call is not None:
            return ReplyToolUse(tool_use_id(self.call), self.call.name, NO_INPUT)
        return ReplyThinking("", "") if self.kind == "thinking" else ReplyText("")

    def whole(self) -> WholeBlock:
        if self.call is not None:
            arguments = self.text if self.call.whole else completed(self.text)
            return ReplyToolUse(tool_use_id(self.call), self.call.name, Raw(arguments.encode()))
        return ReplyThinking(self.text, signature(self.text)) if self.kind == "thinking" else ReplyText(self.text)

    def delta(self, piece: str) -> TextDelta | ThinkingDelta | InputJsonDelta:
        match self.kind:
            case "text":
                return TextDelta(piece)
            case "thinking":
                return ThinkingDelta(piece)
            case "tool_use":
                return InputJsonDelta(piece)


class BlockWriter:
    """Writer of an answer's parts as consecutive content blocks."""

    def __init__(self, calls: Sequence[CalledTool]) -> None:
        """calls: the tool calls of the answer; the parser appends to this list."""
        self.blocks: list[ReplyBlock] = []
        self._calls = calls
        self._open = False

    def write(self, events: Sequence[OutputEvent]) -> list[BlockEvent]:
        return [event for each in events for event in self._write(each)]

    def close(self) -> list[BlockEvent]:
        """End the open block, if there is one."""
        if not self._open:
            return []
        self._open = False
        index, block = len(self.blocks) - 1, self.blocks[-1]
        stop = BlockStop(index)
        return [BlockDelta(index, SignatureDelta(signature(block.text))), stop] if block.kind == "thinking" else [stop]

    def _write(self, event: OutputEvent) -> list[BlockEvent]:
        match event:
            case Content(text):
                return [*self._begin("text"), self._add(text)]
            case Reasoning(text):
                return [*self._begin("thinking"), self._add(text)]
            case CallBegun(index, _):
                return [*self.close(), self._start(ReplyBlock("tool_use", self._calls[index]))]
            case CallArguments(_, json):
                return [self._add(json)]
            case CallEnded():
                return self.close()

    def _begin(self, kind: Literal["text", "thinking"]) -> list[BlockEvent]:
        """Open a block of this kind, unless the open block has this kind already, and return the events for that."""
        if self._open and self.blocks[-1].kind == kind:
            return []
        return [*self.close(), self._start(ReplyBlock(kind))]

    def _start(self, block: ReplyBlock) -> BlockEvent:
        self.blocks.append(block)
        self._open = True
        return BlockStart(len(self.blocks) - 1, block.empty())

    def _add(self, piece: str) -> BlockEvent:
        self.blocks[-1].pieces.append(piece)
        return BlockDelta(len(self.blocks) - 1, self.blocks[-1].delta(piece))


def tool_use_id(call: CalledTool) -> str:
    return f"toolu_{call.id.removeprefix('call_')}"


def signature(thinking: str) -> str:
    """Return a signature of a thinking block. Clients send no thinking block back without one; it is never verified."""
    return hashlib.sha256(thinking.encode()).hexdigest()


def completed(json: str) -> str:
    """Complete a JSON object that was cut off: keep all complete values, and close the open brackets.

    Anthropic's client does the same with a stream. A key without its value is dropped, because only a complete value
    or a bracket moves `end`, where the text is cut.
    """
    end, open_, closers = 0, "", list[str]()
    at, is_key = 0, False
    while piece := PIECE.match(json, at):
        at = piece.end()
        match piece.lastgroup:
            case "opens":
                closers.append("}" if piece["opens"] == "{" else "]")
                is_key = piece["opens"] == "{"
            case "closes":
                closers.pop()
                is_key = False
            case "mark":
                is_key = piece["mark"] == "," and closers[-1] == "}"
        if piece.lastgroup == "opens" or piece.lastgroup == "closes" or (piece.lastgroup == "value" and not is_key):
            end, open_ = at, "".join(reversed(closers))
    return json[:end] + open_ if end else "{}"
