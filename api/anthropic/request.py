"""The body of POST /v1/messages and of its count_tokens, and what of it is said to the template and to the ring."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from baton.api import errors
from baton.api.generation.chat_prompt import SWITCHES, effort_variables
from baton.api.generation.fields import Count, RequestFields, Salt
from baton.api.generation.messages import read_object_at
from baton.api.generation.served_model import ServedModel
from baton.api.generation.structured import Wanted, of_schema
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
    """budget_tokens, display: nobody holds the model to the one, and thoughts are always shown."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


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
    """max_tokens: required but for counting; 0 asks only for what the cache keeps of the prompt.

    cache_control: as if it stood at the last block.
    """

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    max_tokens: Count | None = None
    system: str | list[Any] = ""
    stop_sequences: list[str] = field(default_factory=list)
    tools: list[Any] = field(default_factory=list)
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None
    cache_salt: Salt = ""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def stop_strings(self) -> list[str]:
        return [*([self.stop] if isinstance(self.stop, str) else self.stop), *self.stop_sequences]


def wanted_in(asked: MessagesRequest) -> Wanted:
    """The schema that the answer is to follow, if there is one. Raises ApiError 400."""
    format = asked.output_config.format if asked.output_config is not None else None
    at = "output_config.format"
    return of_schema(format.type, format.schema, True, at, f"{at}.schema") if format is not None else {}


async def read_offer(model: ServedModel, asked: MessagesRequest) -> ToolUse:
    """The tools, and which of them are to be called. Raises ApiError 400."""
    choice = asked.tool_choice
    if choice is None:
        return await read_tool_use(model, asked.tools, None, True, read_custom_tool)
    wanted: str | dict[str, Any] = "required" if choice.type == "any" else choice.type
    if choice.type == "tool":
        wanted = {"type": "function", "name": choice.name}
    return await read_tool_use(model, asked.tools, wanted, not choice.disable_parallel_tool_use, read_custom_tool)


def read_custom_tool(tool: object, at: str) -> list[Tool]:
    """{name, description, input_schema, strict}. Raises ApiError 400, which names a tool that the server would run."""
    given = read_object_at(tool, at)
    kind = given.get("type")
    if kind not in (None, "custom"):
        raise errors.unsupported(f"{at}.type", f"is {errors.shown(kind)}: only custom tools are supported")
    if given.get("input_schema") is None:
        raise errors.bad_request(f"{at}.input_schema is required", f"{at}.input_schema", "missing_required_parameter")
    return [read_function(given, at, "input_schema")]


def thinking_variables(model: ServedModel, asked: MessagesRequest) -> dict[str, Any]:
    """What the template is told of whether and how much to think.

    What is enabled is a permission, of which a model that does not reason makes no use. Raises ApiError 400 where a
    model that always reasons is told not to.
    """
    effort = asked.output_config.effort if asked.output_config is not None else None
    if asked.thinking is not None and asked.thinking.type == "disabled":
        return effort_variables(model, "none", "thinking.type")
    known = model.text.template_variables
    if "reasoning_effort" in known:
        return effort_variables(model, effort, "output_config.effort")
    switches = [name for name in SWITCHES if name in known]
    return {switches[0]: True} if asked.thinking is not None and switches else {}
