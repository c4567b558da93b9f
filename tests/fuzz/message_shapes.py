"""Types from which the open fields of Messages requests are drawn. A tuple stands for any one of its types."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from baton.api.anthropic.request import MessagesRequest, MessagesToolChoice, OutputConfig, Thinking


class CacheMark(Struct):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class MarkedText(Struct):
    type: Literal["text"]
    text: str
    cache_control: CacheMark | None = None


class Thought(Struct):
    type: Literal["thinking"]
    thinking: str
    signature: str


class Called(Struct):
    type: Literal["tool_use"]
    id: Literal["t_1", "t_2"]
    name: Literal["a", "b_1"]
    input: dict[str, str]


class Came(Struct):
    type: Literal["tool_result"]
    tool_use_id: Literal["t_1", "t_2"]
    content: str | list[MarkedText] | None = None
    is_error: bool | None = None
    cache_control: CacheMark | None = None


class Asking(Struct):
    role: Literal["user", "assistant"]
    content: str | list[MarkedText]


class Thinker(Struct):
    role: Literal["assistant"]
    content: list[Thought]


class Caller(Struct):
    role: Literal["assistant"]
    content: list[Called]


class Answering(Struct):
    role: Literal["user"]
    content: list[Came]


class InputSchema(Struct):
    properties: dict[str, dict[str, str]]
    type: Literal["object"] = "object"


class CustomTool(Struct):
    name: Literal["a", "b_1"]
    input_schema: InputSchema
    description: str | None = None
    cache_control: CacheMark | None = None


def several(kind: type[Struct]) -> Any:
    return Annotated[list[kind], Meta(min_length=1)]  # type: ignore[valid-type]


OF_MESSAGES: dict[tuple[type[Struct], str], Any] = {
    (MessagesRequest, "messages"): (
        several(Asking),
        several(Asking),
        several(Thinker),
        several(Caller),
        several(Answering),
    ),
    (MessagesRequest, "system"): (str, list[MarkedText]),
    (MessagesRequest, "tools"): Annotated[list[CustomTool], Meta(max_length=1)],
    (MessagesRequest, "cache_control"): CacheMark,
    (MessagesToolChoice, "type"): Literal["auto", "none"],
    (MessagesToolChoice, "name"): Literal["a", "b_1"],
    (OutputConfig, "effort"): Literal["low", "high"],
    (Thinking, "type"): Literal["enabled", "adaptive"],
}
