"""The answers of chat completions, both complete and as chunks of a stream."""

import time
from collections.abc import Sequence
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from baton.actors.requests import Output, TokenLogprob
from baton.api.generation.answers import Answer, Usage, finite, token_bytes, token_text, usage
from baton.api.generation.outputs import Generation
from baton.api.generation.parsed_answer import CalledTool, ParsedAnswer
from baton.api.generation.served_model import Text
from baton.api.openai.fields import StreamOptions
from baton.models.text.formats.events import CallArguments, CallBegun, CallEnded, Content, OutputEvent, Reasoning


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(Struct):
    content: list[ChatTokenLogprob]
    refusal: None = None


class CalledFunction(Struct, omit_defaults=True):
    """The function of a tool call. In a stream the first delta has the name, later ones have parts of the arguments."""

    name: str | None = None
    arguments: str | None = None


class ChatToolCall(Struct):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ToolCallDelta(Struct, omit_defaults=True):
    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction | None = None


class ChatMessage(Struct):
    """The message of a choice. `reasoning_content` and `tool_calls` are left out if there are none."""

    role: str
    content: str | None  # null if there are tool calls and no text
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ChatToolCall] | UnsetType = UNSET


class ChatChoice(Struct):
    index: int
    message: ChatMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None


class ChatCompletion(Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChunkChoice(Struct):
    index: int
    delta: ChatDelta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET


class ChatChunk(Struct, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET


def choice_logprobs(text: Text, items: Sequence[TokenLogprob]) -> ChoiceLogprobs:
    return ChoiceLogprobs([token_logprob(text, item) for item in items])


def token_logprob(text: Text, item: TokenLogprob) -> ChatTokenLogprob:
    top = [TopLogprob(token_text(text, id), finite(at), token_bytes(text, id)) for id, at in item.top]
    logprob = finite(item.logprob) if item.logprob is not None else 0.0
    return ChatTokenLogprob(token_text(text, item.token), logprob, token_bytes(text, item.token), top)


def choice_of(index: int, answer: Answer, parsed: ParsedAnswer, logprobs: ChoiceLogprobs | None) -> ChatChoice:
    return ChatChoice(index, message_of(parsed), logprobs, parsed.finish_reason, answer.stop_reason)


def message_of(parsed: ParsedAnswer) -> ChatMessage:
    """Return the message of a complete answer."""
    calls = [ChatToolCall(call.id, CalledFunction(call.name, call.arguments)) for call in parsed.calls]
    return ChatMessage(
        "assistant",
        parsed.content or (None if calls else ""),
        reasoning_content=parsed.reasoning or UNSET,
        tool_calls=calls or UNSET,
    )


def delta_of(events: Sequence[OutputEvent], calls: Sequence[CalledTool]) -> ChatDelta:
    """Merge events into one delta. calls: the tool calls so far, to which events refer by index."""
    delta = ChatDelta()
    for event in events:
        match event:
            case Content(text):
                delta.content = (delta.content or "") + text
            case Reasoning(text):
                delta.reasoning_content = (delta.reasoning_content or "") + text
            case CallBegun(index, name):
                begun = ToolCallDelta(index, calls[index].id, "function", CalledFunction(name, ""))
                delta.tool_calls = [*(delta.tool_calls or ()), begun]
            case CallArguments(index, json):
                add_arguments(delta, index, json)
            case CallEnded():
                pass
    return delta


def add_arguments(delta: ChatDelta, index: int, json: str) -> None:
    """Append arguments to the last call of the delta, or add an entry if the call began in an earlier delta."""
    last = delta.tool_calls[-1] if delta.tool_calls else None
    if last is None or last.index != index or last.function is None:
        more = ToolCallDelta(index, function=CalledFunction(arguments=json))
        delta.tool_calls = [*(delta.tool_calls or ()), more]
    else:
        last.function.arguments = (last.function.arguments or "") + json


class ChatEncoder:
    """Encoder of a streamed chat completion."""

    def __init__(
        self,
        id: str,
        model: str,
        text: Text,
        parsed: Sequence[ParsedAnswer],
        generation: Generation,
        logprobs: bool,
        options: StreamOptions,
    ) -> None:
        """parsed: one parser for each choice."""
        self._id = id
        self._model = model
        self._created = int(time.time())
        self._text = text
        self._parsed = parsed
        self._generation = generation
        self._logprobs = logprobs
        self._usage = options.include_usage or options.continuous_usage_stats
        self._continuous = options.continuous_usage_stats

    def opening(self) -> list[ChatChunk]:
        return [self._chunk(ChunkChoice(index, ChatDelta("assistant", ""))) for index in range(len(self._parsed))]

    def delta(self, index: int, output: Output) -> list[ChatChunk]:
        chunks, parsed = [], self._parsed[index]
        delta = delta_of(parsed.add(output), parsed.calls)
        logprobs = choice_logprobs(self._text, output.logprobs) if self._logprobs and output.logprobs else None
        if delta != ChatDelta() or logprobs:
            chunks.append(self._chunk(ChunkChoice(index, delta, logprobs)))
        if output.finish_reason is not None:
            reason = output.stop_reason if output.finish_reason == "stop" else None
            chunks.append(self._chunk(ChunkChoice(index, ChatDelta(), None, parsed.finish_reason, reason)))
        return chunks

    def closing(self) -> list[ChatChunk]:
        if not self._usage:
            return []
        return [self._chunk_of([], self._total())]

    def _chunk(self, choice: ChunkChoice) -> ChatChunk:
        return self._chunk_of([choice], self._total() if self._continuous else None if self._usage else UNSET)

    def _chunk_of(self, choices: list[ChunkChoice], so_far: Usage | UnsetType | None) -> ChatChunk:
        return ChatChunk(id=self._id, created=self._created, model=self._model, choices=choices, usage=so_far)

    def _total(self) -> Usage:
        reasoning = sum(parsed.reasoning_tokens for parsed in self._parsed)
        return usage(self._generation, len(self._parsed), reasoning_tokens=reasoning)
