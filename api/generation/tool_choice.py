"""The field tool_choice: which tools the model may or must call, and the grammar that enforces the choice."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, get_args

from baton.api import errors
from baton.api.generation.messages import read_object_at, read_string
from baton.api.generation.request_builder import Prompt
from baton.api.generation.served_model import ServedModel
from baton.api.generation.structured import GrammarWriters, write_one
from baton.api.generation.tools import Mode, ReadTool, ToolUse, read_tools
from baton.models.text.formats.grammars import (
    CallableTool,
    ReasoningLimit,
    WantedCalls,
    arguments_grammar,
    output_grammar,
)


async def read_tool_use(
    model: ServedModel,
    tools: Sequence[object],
    choice: str | Mapping[str, Any] | None,
    parallel: bool,
    read: ReadTool,
) -> ToolUse:
    """Read the fields tools, tool_choice and parallel_tool_calls of a body. Raises ApiError 400.

    choice: in OpenAI's format.
    read: reads one entry of `tools`, in the format of the endpoint's API.
    """
    offered = await read_tools(model, tools, read)
    mode, names = read_choice(choice)
    known = {tool.name for tool in offered}
    if not offered and (mode == "required" or names is not None):
        raise errors.bad_request("tool_choice asks for a call, but there are no tools", "tool_choice", "invalid_value")
    for name in sorted((names or frozenset()) - known):
        raise errors.bad_request(f"tool_choice: there is no tool {name!r} in tools", "tool_choice", "invalid_value")
    return ToolUse(offered, mode, names, parallel)


def read_choice(choice: str | Mapping[str, Any] | None) -> tuple[Mode, frozenset[str] | None]:
    """Return whether the model may or must call tools, and the names of the allowed tools (None: all).

    choice: in the format of chat completions or of Responses.
    """
    if choice is None:
        return "auto", None
    if isinstance(choice, str):
        return read_mode(choice, "tool_choice"), None
    match choice.get("type"):
        case "function":
            return "required", frozenset([read_name(choice, "tool_choice")])
        case "allowed_tools":
            allowed = read_object_at(choice.get("allowed_tools", choice), "tool_choice.allowed_tools")
            tools = allowed.get("tools")
            if not isinstance(tools, list) or not tools:
                message = "tool_choice.tools must be a list of at least one tool"
                raise errors.bad_request(message, "tool_choice.tools", "invalid_value")
            places = [(tool, f"tool_choice.tools[{index}]") for index, tool in enumerate(tools)]
            names = frozenset(read_name(read_object_at(tool, at), at) for tool, at in places)
            return read_mode(allowed.get("mode"), "tool_choice.mode", ("auto", "required")), names
    kind = errors.shown(choice.get("type"))
    raise errors.unsupported("tool_choice", f"has type {kind}: expected function or allowed_tools")


def read_mode(mode: object, at: str, modes: Sequence[Mode] = get_args(Mode)) -> Mode:
    for known in modes:
        if mode == known:
            return known
    message = f"{at}: expected one of {', '.join(modes)}, got {errors.shown(mode)}"
    raise errors.bad_request(message, at, "invalid_value")


def read_name(tool: Mapping[str, Any], at: str) -> str:
    """Return the name in {"type": "function", "name": …} or {"type": "function", "function": {"name": …}}."""
    if tool.get("type") != "function":
        raise errors.unsupported(f"{at}.type", f"is {errors.shown(tool.get('type'))}: only functions are supported")
    inner = tool.get("function", tool)
    return read_string(read_object_at(inner, f"{at}.function").get("name"), f"{at}.name")


async def grammar_of(
    model: ServedModel, prompt: Prompt, use: ToolUse, output: GrammarWriters, budget: int | None = None
) -> str:
    """Compile the grammar of the whole output. Return its text for SamplingParams, or "" if any output is allowed.

    Reasoning may come first. Calls follow the schemas of their tools if a call is required, a tool is strict, not all
    tools are allowed, or the answer has a required format. With a format, the output is either an answer in this format
    or calls; if a call is required, the format is ignored.

    output: the required format of the answer.
    budget: the most tokens of reasoning; None: those of --reasoning-budget.
    Raises ApiError: 400, 503.
    """
    calls = calls_of(model, use, answers=bool(output))
    limit = limit_of(model, model.reasoning_budget if budget is None else budget)
    if not output and calls is None and limit is None:
        return ""
    field = next(iter(output)) if output and not (calls and calls.required) else None

    def write() -> str:
        answer = write_one(output) if field is not None else None
        reasoning = model.formats.reasoning
        return output_grammar(answer, calls, model.text.added_tokens, reasoning, prompt.in_reasoning, limit)

    tools = {each.name: partial(arguments_grammar, each) for each in (calls.tools if calls is not None else ())}
    named = field or ("tools" if calls is not None else "thinking_token_budget")
    return await model.grammars.compiled(write, named, tools)


def read_budget(model: ServedModel, budget: int | None, at: str) -> int | None:
    """Return a request's budget of reasoning. Raises ApiError 400 if the model's reasoning cannot be limited."""
    if budget is not None and limit_of(model, budget) is None:
        raise errors.unsupported(at, "cannot be kept: the model does not reason between two tokens that mark it")
    return budget


def limit_of(model: ServedModel, budget: int | None) -> ReasoningLimit | None:
    """Return the limit of reasoning; None without a budget, or if the model's markers are no tokens of their own."""
    format = model.formats.reasoning
    if budget is None or format is None or not {format.begin, format.end} <= model.text.added_tokens:
        return None
    [begin] = model.text.encode(format.begin, add_special_tokens=False)
    return ReasoningLimit(budget, begin)


def calls_of(model: ServedModel, use: ToolUse, answers: bool) -> WantedCalls | None:
    """Return the tool calls that a grammar has to describe; None if calls stay unconstrained.

    answers: whether the answer has a required format.
    """
    format, tools, required = model.formats.tools, use.callable, use.mode == "required"
    bound = required or answers or use.names is not None or any(tool.strict for tool in tools)
    if format is None or not tools or not bound:
        return None
    known = [CallableTool(tool.name, tool.parameters, tool.strict) for tool in tools]
    return WantedCalls(known, format.begins[0], format.rules, model.text.added_tokens, required, use.parallel)
