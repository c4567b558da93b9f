"""What a client asks of /v1/responses: the body's fields, those that are refused, and those that are ignored."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from baton.api import errors
from baton.api.generation.fields import Count, RequestFields, Salt, SamplingParams, TopLogprobs, request_params
from baton.api.generation.messages import read_string
from baton.api.generation.structured import Wanted, of_text
from baton.api.openai.fields import IGNORED as IGNORED_EVERYWHERE
from baton.api.parsing import Unsupported, convert

LOGPROBS = "message.output_text.logprobs"
OF_REASONING = frozenset({"effort", "summary", "generate_summary", "context"})
IGNORED = (IGNORED_EVERYWHERE - {"metadata", "parallel_tool_calls"}) | {
    "max_tool_calls",
    "stream_options",
    "client_metadata",
}
UNSUPPORTED: Unsupported = {
    "context_management": ([],),
    "prompt": (),
    "moderation": (),
    "image": (),
    "access_programs": (),
}


class TextOptions(Struct, forbid_unknown_fields=True):
    """verbosity is ignored."""

    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Conversation(Struct, forbid_unknown_fields=True):
    id: str


class ResponseRequest(RequestFields, forbid_unknown_fields=True, kw_only=True):
    """As OpenAI has it, and with the sampling fields that the other endpoints know.

    conversation: a session, of which the response is the next turn; after: the last turn that the client knows of.
    """

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | Conversation | None = None
    after: Count | None = None
    store: bool = True
    background: bool = False
    generate: bool = True
    max_output_tokens: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    text: TextOptions = field(default_factory=TextOptions)
    include: list[str] = field(default_factory=list)
    top_logprobs: TopLogprobs = 0
    metadata: dict[str, str] = field(default_factory=dict)
    cache_salt: Salt = ""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    tools: list[Any] = field(default_factory=list)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    reasoning: dict[str, Any] = field(default_factory=dict)
    truncation: Literal["auto", "disabled"] = "disabled"

    @property
    def effort(self) -> str | None:
        effort = self.reasoning.get("effort")
        return effort if effort is None else read_string(effort, "reasoning.effort")

    @property
    def logprobs(self) -> bool:
        return bool(self.top_logprobs) or LOGPROBS in self.include

    @property
    def session(self) -> str | None:
        return self.conversation.id if isinstance(self.conversation, Conversation) else self.conversation


def read_request(body: Mapping[str, Any]) -> ResponseRequest:
    """Raises 400."""
    asked = convert(body, ResponseRequest, IGNORED, UNSUPPORTED)
    if not asked.input:
        raise errors.bad_request("input: there is nothing to answer", "input", "empty_input")
    check(asked)
    return asked


def check(asked: ResponseRequest) -> None:
    """What single fields cannot say."""
    if asked.session is not None and asked.previous_response_id is not None:
        message = "give one of previous_response_id and conversation"
        raise errors.bad_request(message, "previous_response_id", "mutually_exclusive_parameters")
    if asked.session is not None and asked.cache_salt:
        raise errors.bad_request("a conversation has the cache_salt of its session", "cache_salt", "invalid_value")
    if asked.session is None and asked.after is not None:
        raise errors.bad_request("after needs a conversation", "after", "invalid_value")
    if asked.background and not asked.store:
        raise errors.bad_request("a response in the background is stored: leave out store", "store", "invalid_value")
    if unknown := asked.reasoning.keys() - OF_REASONING:
        field = f"reasoning.{min(unknown)}"
        raise errors.bad_request(f"unknown or unsupported field {field!r}", field, "unknown_parameter")


def wanted_in(asked: ResponseRequest) -> Wanted:
    """What text.format asks for. Raises ApiError 400."""
    return of_text(asked.text.format, "text.format") if asked.text.format else {}


def params_of(asked: ResponseRequest, salt: str, grammar: str) -> SamplingParams:
    return request_params(
        asked,
        max_tokens=asked.max_output_tokens if asked.generate else 0,
        salt=salt,
        logprobs=asked.top_logprobs if asked.logprobs else None,
        grammar=grammar,
        names={"prompt": "input", "max_tokens": "max_output_tokens"},
    )
