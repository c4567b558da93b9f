"""Types for fields that the api's Structs leave open (`list[dict[str, Any]]`, ids), to draw values from."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, inspect

from baton.api.admin import AbortRequest
from baton.api.anthropic.request import MessagesRequest
from baton.api.generation.fields import Bias, RequestFields
from baton.api.generation.structured import StructuredFields
from baton.api.openai.chat import ChatRequest
from baton.api.openai.completions import CompletionRequest
from baton.api.openai.embeddings import EmbeddingRequest
from baton.api.responses.conversations import ConversationRequest, ItemsRequest
from baton.api.responses.request import ResponseRequest
from baton.api.sessions.turns import TurnRequest
from baton.api.sglang.generate import GenerateParams, GenerateRequest
from baton.api.sglang.sessions import CloseSessionRequest, SessionParams
from baton.api.tokenization import DetokenizeRequest, TokenizeRequest
from tests.fuzz.message_shapes import OF_MESSAGES
from tests.fuzz.values import TOKEN_KEYS

VOCAB = 259  # the vocabulary size of the hash model
BUNDLED_VOCAB = 768
SESSIONS = ("s0", "s1", "s2", "s3")
KNOWN_RESPONSE = "resp-known"  # replaced by the id of the last response that the server stored

TokenId = Annotated[int, Meta(ge=0, lt=VOCAB)]
TokenIds = Annotated[list[TokenId], Meta(min_length=1)]
TokenKey = Annotated[str, Meta(extra={"kind": TOKEN_KEYS})]
Offset = Annotated[int, Meta(ge=0, lt=64)]


class Part(Struct):
    type: Literal["text", "input_text", "output_text"]
    text: str


class Message(Struct):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]
    name: str | None = None
    reasoning_content: str | None = None


class Property(Struct):
    type: Literal["string", "integer", "object"]
    description: str | None = None


class Parameters(Struct):
    properties: dict[str, Property]
    type: Literal["object"] = "object"


class Function(Struct):
    """A function tool without `strict`: the hash model's output can be predicted only if no grammar constrains it."""

    name: Literal["a", "b_1"]
    description: str | None = None
    parameters: Parameters | None = None
    strict: Literal[False] | None = None


class OfferedFunction(Struct):
    type: Literal["function"]
    function: Function


class FlatFunction(Struct):
    type: Literal["function"]
    name: Literal["a", "b_1"]
    parameters: Parameters | None = None


class Effort(Struct):
    effort: Literal["none"]


class Generate(GenerateRequest):
    """A /generate request, including its session fields."""

    session_params: SessionParams | None = None


class Create(ResponseRequest):
    """A response.create event of the websocket."""

    stream_id: str | None = None


Messages = Annotated[list[Message], Meta(min_length=1)]
LogitBias = dict[TokenKey, Bias]
# Checkpoint positions that lie inside all but the shortest prompts.
Positions = Annotated[list[Annotated[int, Meta(ge=1, lt=3)]], Meta(max_length=4)]

# The type to draw a field from, by Struct and field name. A tuple stands for any one of its types.
TYPES: dict[tuple[type[Struct], str], Any] = {
    (ChatRequest, "messages"): Messages,
    (ChatRequest, "logprobs"): Literal[True],
    (TokenizeRequest, "messages"): Messages,
    (TurnRequest, "messages"): Messages,
    (TurnRequest, "input_ids"): TokenIds,
    (CompletionRequest, "prompt"): (str, TokenIds, list[str], list[TokenIds]),
    (EmbeddingRequest, "input"): (str, TokenIds, list[str], list[TokenIds]),
    (ResponseRequest, "input"): str | Messages,
    (Create, "input"): str | Messages,
    (ConversationRequest, "items"): list[Message],
    (ItemsRequest, "items"): Messages,
    (Generate, "input_ids"): (TokenIds, list[TokenIds]),
    (Generate, "token_ids_logprob"): (TokenIds, list[TokenIds]),
    (Generate, "return_logprob"): Literal[True],
    (Generate, "sampling_params"): GenerateParams | list[GenerateParams],
    (SessionParams, "offset"): Offset,
    (DetokenizeRequest, "tokens"): TokenIds,
    (CloseSessionRequest, "session_id"): Literal["s3", "a", "d_1"],
    (AbortRequest, "abort_all"): Literal[False],
} | OF_MESSAGES
for struct in (ChatRequest, ResponseRequest, Create, TurnRequest):
    offered = OfferedFunction if struct in (ChatRequest, TurnRequest) else FlatFunction
    TYPES[struct, "tools"] = Annotated[list[offered], Meta(max_length=1)]
    TYPES[struct, "tool_choice"] = Literal["none", "auto"]
    TYPES[struct, "reasoning"] = Effort
    TYPES[struct, "reasoning_effort"] = Literal["none"]
for struct in (ChatRequest, CompletionRequest, ResponseRequest, Create, MessagesRequest, TurnRequest, GenerateParams):
    TYPES[struct, "logit_bias"] = LogitBias
    TYPES[struct, "stop_token_ids"] = list[TokenId]
for struct in (ChatRequest, CompletionRequest, ResponseRequest, Create, TurnRequest, Generate):
    TYPES[struct, "checkpoints"] = Positions


def shape(kind: Any) -> inspect.Type:
    """Return msgspec's description of a type. A tuple may hold several list types, which a msgspec union may not."""
    if isinstance(kind, tuple):
        return inspect.UnionType(tuple(inspect.multi_type_info(kind)))
    return inspect.type_info(kind)


SHAPES: dict[tuple[type[Struct], str], inspect.Type] = {place: shape(kind) for place, kind in TYPES.items()}

LIKELY: dict[str, tuple[Any, ...]] = {
    "model": ("default",),
    "id": SESSIONS,
    "session_id": SESSIONS,
    "conversation": SESSIONS,
    "rid": ("r1", "r2", "r3", "r4"),
    "previous_response_id": (KNOWN_RESPONSE,),
    "response_id": (KNOWN_RESPONSE,),
    "stream_id": ("x", "y"),
    "best_of": (1,),
}
# For each Struct, the fields of which a request must have exactly one.
ONE_OF: dict[type[Struct], tuple[str, ...]] = {
    Generate: ("text", "input_ids"),
    TokenizeRequest: ("prompt", "messages"),
    TurnRequest: ("messages", "text", "input_ids"),
}
SELDOM = (set(StructuredFields.__struct_fields__) - set(RequestFields.__struct_fields__)) | {
    "json_schema",
    "regex",
    "ebnf",
}
