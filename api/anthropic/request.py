"""The body of /v1/messages and /v1/messages/count_tokens, and how its fields are read."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from baton.api import errors
from baton.api.generation.chat_prompt import SWITCHES, effort_variables
from baton.api.generation.fields import Count, RequestFields, Salt
from baton.api.generation.messages import read_object_at
from baton.api.generation.served_model import ServedModel
from baton.api.generation.structured import GrammarWriters, of_schema
from baton.api.generation.tool_choice import read_tool_use
from baton.api.generation.tools import Tool, ToolUse, read_function
from baton.api.parsing import Unsupported

IGNORED = frozenset(
    {
        "metadata", "service_tier", "inference_geo", "speed", "diagnostics", "user_profile_id", "workspace_id",
        "context_management",
    }
)  # fmt: skip
UNSUPPORTED: Unsupported = {"container": (), "mcp_servers": ([],)}


class Thinking(Struct, forbid_unknown_fields=True):
    """The field `thinking`: whether the model reasons before it answers."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=1, lt=2**31)] | None = None  # ignored if reasoning cannot be limited
    display: Literal["summarized", "omitted"] | None = None  # accepted, but reasoning is always shown


class MessagesToolChoice(Struct, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class OutputFormat(Struct, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, forbid_unknown_fields=True):
    effort: str | None = None
    format: OutputFormat | None = None


class MessagesRequest(RequestFields, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/messages and POST /v1/messages/count_tokens."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    max_tokens: Count | None = None  # required by /v1/messages; with 0 the prompt is only computed and cached
    system: str | list[Any] = ""
    stop_sequences: list[str] = field(default_factory=list)
    tools: list[Any] = field(default_factory=list)
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None  # same effect as a cache_control in the last block
    cache_salt: Salt = ""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    preserve_reasoning: bool | None = None  # show the reasoning of earlier turns; None: as --preserve-reasoning says

    @property
    def stop_strings(self) -> list[str]:
        """The stop strings of both fields: `stop`, which all endpoints have, and Anthropic's `stop_sequences`."""
        return [*([self.stop] if isinstance(self.stop, str) else self.stop), *self.stop_sequences]


def wanted_in(body: MessagesRequest) -> GrammarWriters:
    """Read output_config.format, the schema that the answer must follow, if there is one. Raises ApiError 400."""
    format = body.output_config.format if body.output_config is not None else None
    at = "output_config.format"
    return of_schema(format.type, format.schema, True, at, f"{at}.schema") if format is not None else {}


async def read_offer(model: ServedModel, body: MessagesRequest) -> ToolUse:
    """Read the fields tools and tool_choice. Raises ApiError 400."""
    choice = body.tool_choice
    if choice is None:
        return await read_tool_use(model, body.tools, None, True, read_custom_tool)
    # Translate the choice into the format of OpenAI's tool_choice.
    mode: str | dict[str, Any] = "required" if choice.type == "any" else choice.type
    if choice.type == "tool":
        mode = {"type": "function", "name": choice.name}
    return await read_tool_use(model, body.tools, mode, not choice.disable_parallel_tool_use, read_custom_tool)


def read_custom_tool(tool: object, at: str) -> list[Tool]:
    """Read a tool {name, description, input_schema, strict}. Raises ApiError 400, also for Anthropic's server tools."""
    fields = read_object_at(tool, at)
    kind = fields.get("type")
    if kind not in (None, "custom"):
        raise errors.unsupported(f"{at}.type", f"is {errors.shown(kind)}: only custom tools are supported")
    if fields.get("input_schema") is None:
        raise errors.bad_request(f"{at}.input_schema is required", f"{at}.input_schema", "missing_required_parameter")
    return [read_function(fields, at, "input_schema")]


def thinking_variables(model: ServedModel, body: MessagesRequest) -> dict[str, Any]:
    """Return the chat template variables that set whether and how much the model reasons.

    A model that does not reason ignores an enabled `thinking`. Raises ApiError 400 if thinking is disabled and the
    model always reasons.
    """
    effort = body.output_config.effort if body.output_config is not None else None
    if body.thinking is not None and body.thinking.type == "disabled":
        return effort_variables(model, "none", "thinking.type")
    known = model.text.template_variables
    if "reasoning_effort" in known:
        return effort_variables(model, effort, "output_config.effort")
    switches = [name for name in SWITCHES if name in known]
    return {switches[0]: True} if body.thinking is not None and switches else {}
