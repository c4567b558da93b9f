"""The answer of the Messages API, both complete and as events of a stream."""

from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec
from msgspec import Struct, field

from baton.actors import tokens
from baton.actors.requests import Output
from baton.api.anthropic.blocks import BlockEvent, BlockWriter, WholeBlock
from baton.api.generation.answers import Answer
from baton.api.generation.outputs import Generation
from baton.api.generation.parsed_answer import ParsedAnswer

PING = b'event: ping\ndata: {"type":"ping"}\n\n'

StopReason: TypeAlias = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class OutputTokensDetails(Struct):
    thinking_tokens: int


class MessagesUsage(Struct, omit_defaults=True):
    """Token counts. The first three fields add up to the prompt. `lost` is an extension of Anthropic's format."""

    input_tokens: int  # prompt tokens that the next two fields do not count
    cache_creation_input_tokens: int  # computed tokens up to the last checkpoint that cache_control asks for
    cache_read_input_tokens: int  # tokens that were not computed, because a cached state had consumed them
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    lost: str = ""  # why fewer tokens were read from the cache than could be; empty if not


class ReplyMessage(Struct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[WholeBlock] = field(default_factory=list)
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessagesUsage


class MessageStart(Struct, tag_field="type", tag="message_start"):
    message: ReplyMessage


class StopDelta(Struct):
    stop_reason: StopReason | None
    stop_sequence: str | None


class MessageDelta(Struct, tag_field="type", tag="message_delta"):
    delta: StopDelta
    usage: MessagesUsage


class MessageStop(Struct, tag_field="type", tag="message_stop"):
    pass


class Reply:
    """Writer of one answer: `whole` returns it complete; opening, delta and closing return the events of a stream."""

    def __init__(
        self, id: str, model: str, parsed: ParsedAnswer, generation: Generation, prompt_only: bool = False
    ) -> None:
        """prompt_only: max_tokens is 0, so the prompt is only computed. The one token that is drawn is dropped."""
        self._id = id
        self._model = model
        self._parsed = parsed
        self._generation = generation
        self._prompt_only = prompt_only
        self._writer = BlockWriter(parsed.calls)
        self._stop = StopDelta(None, None)

    def opening(self) -> list[MessageStart]:
        return [MessageStart(ReplyMessage(id=self._id, model=self._model, usage=self._usage()))]

    def delta(self, index: int, output: Output) -> list[BlockEvent]:
        return self._read(output.text, tokens.unpack(output.tokens), output.finish_reason, output.stop_reason)

    def closing(self) -> list[MessageDelta | MessageStop]:
        return [MessageDelta(self._stop, self._usage()), MessageStop()]

    def whole(self, answer: Answer) -> ReplyMessage:
        """Return the complete answer."""
        self._read(answer.text, answer.ids, answer.finish_reason, answer.stop_reason)
        return ReplyMessage(
            id=self._id,
            model=self._model,
            content=[block.whole() for block in self._writer.blocks],
            stop_reason=self._stop.stop_reason,
            stop_sequence=self._stop.stop_sequence,
            usage=self._usage(),
        )

    def _read(
        self, text: str, ids: Sequence[int], finish_reason: str | None, stop_reason: str | int | None
    ) -> list[BlockEvent]:
        if self._prompt_only:
            text, ids, finish_reason = "", (), finish_reason and "length"
        events = self._writer.write(self._parsed.read(text, ids))
        if finish_reason is not None:
            events += [*self._writer.write(self._parsed.finish(finish_reason)), *self._writer.close()]
            self._stop = StopDelta(*stopped(self._parsed, stop_reason))
        return events

    def _usage(self) -> MessagesUsage:
        """Return the token counts so far."""
        [member] = self._generation.members
        read = member.cached_tokens
        created = max(max(member.request.checkpoints, default=0) - read, 0)
        details = OutputTokensDetails(self._parsed.reasoning_tokens)
        written = 0 if self._prompt_only else member.completion_tokens
        return MessagesUsage(member.prompt_tokens - read - created, created, read, written, details, member.miss_reason)


def stopped(parsed: ParsedAnswer, stop_reason: str | int | None) -> tuple[StopReason, str | None]:
    """Return Anthropic's stop reason, and the stop sequence if one ended the answer.

    stop_reason: the stop string or token id that the ring reports.
    """
    match parsed.finish_reason:
        case "tool_calls":
            return "tool_use", None
        case "stop":
            return ("stop_sequence", stop_reason) if isinstance(stop_reason, str) else ("end_turn", None)
        case _:
            return "max_tokens", None


def frames(events: Sequence[object]) -> bytes:
    """Encode events as SSE frames, each with its name, which the data repeat as `type`."""
    return b"".join([frame(event) for event in events])


def frame(event: object) -> bytes:
    assert isinstance(event, Struct)
    return f"event: {event.__struct_config__.tag}\ndata: ".encode() + msgspec.json.encode(event) + b"\n\n"
