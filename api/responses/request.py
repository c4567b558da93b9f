"""The body of POST /v1/responses: its fields, and the fields that are ignored or refused."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from baton.api import errors
from baton.api.generation.fields import Count, RequestFields, Salt, SamplingParams, TopLogprobs, request_params
from baton.api.generation.messages import read_string
from baton.api.generation.structured import GrammarWriters, of_text
from baton.api.openai.fields import IGNORED as IGNORED_EVERYWHERE
from baton.api.parsing import Unsupported, convert

LOGPROBS = "message.output_text.logprobs"
OF_REASONING = frozenset({"effort", "summary", "generate_summary", "context", "max_tokens"})
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
    """The field `text`: the format of the answer's text."""

    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None  # accepted, without effect


class ReasoningLimitField(Struct):
    """The part of the field `reasoning` that limits its tokens."""

    max_tokens: Count | None = None


class Conversation(Struct, forbid_unknown_fields=True):
    id: str


class ResponseRequest(RequestFields, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/responses: OpenAI's fields, plus the sampling fields of all endpoints."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | Conversation | None = None  # the session whose next turn is this response
    after: Count | None = None  # number of the last turn that the client knows; 409 if the last turn is another
    store: bool = True
    background: bool = False  # the response runs to its end even if the client disconnects
    generate: bool = True  # False: only compute the prompt and cache its state
    max_output_tokens: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    text: TextOptions = field(default_factory=TextOptions)
    include: list[str] = field(default_factory=list)
    top_logprobs: TopLogprobs = 0
    metadata: dict[str, str] = field(default_factory=dict)
    cache_salt: Salt = ""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    preserve_reasoning: bool | None = None  # show the reasoning of earlier turns; None: as --preserve-reasoning says
    tools: list[Any] = field(default_factory=list)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    reasoning: dict[str, Any] = field(default_factory=dict)
    thinking_token_budget: Count | None = None  # the same as OpenRouter's reasoning.max_tokens
    truncation: Literal["auto", "disabled"] = "disabled"

    @property
    def effort(self) -> str | None:
        effort = self.reasoning.get("effort")
        return effort if effort is None else read_string(effort, "reasoning.effort")

    @property
    def budget(self) -> tuple[int | None, str]:
        """The most tokens of reasoning, and the name of the field that says so. Raises ApiError 400."""
        limit = {name: value for name, value in self.reasoning.items() if name == "max_tokens"}
        own = convert(limit, ReasoningLimitField, at="reasoning").max_tokens
        if own is None:
            return self.thinking_token_budget, "thinking_token_budget"
        if self.thinking_token_budget is not None:
            message = "give only one of reasoning.max_tokens and thinking_token_budget"
            raise errors.bad_request(message, "thinking_token_budget", "mutually_exclusive_parameters")
        return own, "reasoning.max_tokens"

    @property
    def logprobs(self) -> bool:
        return bool(self.top_logprobs) or LOGPROBS in self.include

    @property
    def session(self) -> str | None:
        return self.conversation.id if isinstance(self.conversation, Conversation) else self.conversation


def read_request(fields: Mapping[str, Any]) -> ResponseRequest:
    """Read the body of a request that creates a response. Raises ApiError 400."""
    body = convert(fields, ResponseRequest, IGNORED, UNSUPPORTED)
    if not body.input:
        raise errors.bad_request("input is empty: there is nothing to answer", "input", "empty_input")
    check(body)
    return body


def check(body: ResponseRequest) -> None:
    """Check rules that concern several fields. Raises ApiError 400."""
    if body.session is not None and body.previous_response_id is not None:
        message = "give only one of previous_response_id and conversation"
        raise errors.bad_request(message, "previous_response_id", "mutually_exclusive_parameters")
    if body.session is not None and body.cache_salt:
        message = "cache_salt cannot be set with a conversation, which has its session's own"
        raise errors.bad_request(message, "cache_salt", "invalid_value")
    if body.session is None and body.after is not None:
        raise errors.bad_request("after needs a conversation", "after", "invalid_value")
    if body.background and not body.store:
        raise errors.bad_request("background: true needs store: true", "store", "invalid_value")
    if unknown := body.reasoning.keys() - OF_REASONING:
        field = f"reasoning.{min(unknown)}"
        raise errors.bad_request(f"unknown or unsupported field {field!r}", field, "unknown_parameter")


def wanted_in(body: ResponseRequest) -> GrammarWriters:
    """Return the grammar writer for text.format, if it needs one. Raises ApiError 400."""
    return of_text(body.text.format, "text.format") if body.text.format else {}


def params_of(body: ResponseRequest, salt: str, grammar: str) -> SamplingParams:
    return request_params(
        body,
        max_tokens=body.max_output_tokens if body.generate else 0,
        salt=salt,
        logprobs=body.top_logprobs if body.logprobs else None,
        grammar=grammar,
        names={"prompt": "input", "max_tokens": "max_output_tokens"},
    )
