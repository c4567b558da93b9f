"""Which of the tools a request wants called, and the grammar that makes a model call them."""

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from baton.api import errors
from baton.api.generation.messages import read_object_at, read_string
from baton.api.generation.request_builder import Prompt
from baton.api.generation.served_model import ServedModel
from baton.api.generation.structured import Wanted, check_one
from baton.api.generation.tools import Mode, ReadTool, ToolUse, read_tools
from baton.models.text.formats.grammars import CallableTool, WantedCalls, output_grammar


async def read_tool_use(
    model: ServedModel,
    tools: Sequence[object],
    choice: str | Mapping[str, Any] | None,
    parallel: bool,
    read: ReadTool,
) -> ToolUse:
    """A request's fields tools, tool_choice and parallel_tool_calls, as OpenAI has them. Raises ApiError 400."""
    offered = await read_tools(model, tools, read)
    mode, names = read_choice(choice)
    known = {tool.name for tool in offered}
    if not offered and (mode == "required" or names is not None):
        raise errors.bad_request("tool_choice: there are no tools to call", "tool_choice", "invalid_value")
    for name in sorted((names or frozenset()) - known):
        raise errors.bad_request(f"tool_choice: there is no tool {name!r}", "tool_choice", "invalid_value")
    return ToolUse(offered, mode, names, parallel)


def read_choice(choice: str | Mapping[str, Any] | None) -> tuple[Mode, frozenset[str] | None]:
    """Whether tools are to be called, and which, None for any; in the form of chat completions or of Responses."""
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
                message = "tool_choice.tools must be a list with a tool at least"
                raise errors.bad_request(message, "tool_choice.tools", "invalid_value")
            places = [(tool, f"tool_choice.tools[{index}]") for index, tool in enumerate(tools)]
            names = frozenset(read_name(read_object_at(tool, at), at) for tool, at in places)
            return read_mode(allowed.get("mode"), "tool_choice.mode", ("auto", "required")), names
    raise errors.unsupported("tool_choice", f"is of type {errors.shown(choice.get('type'))}")


def read_mode(mode: object, at: str, modes: Sequence[Mode] = get_args(Mode)) -> Mode:
    for known in modes:
        if mode == known:
            return known
    message = f"{at}: expected one of {', '.join(modes)}, got {errors.shown(mode)}"
    raise errors.bad_request(message, at, "invalid_value")


def read_name(tool: Mapping[str, Any], at: str) -> str:
    """Of {"type": "function", "name": …} or {"type": "function", "function": {"name": …}}."""
    if tool.get("type") != "function":
        raise errors.unsupported(f"{at}.type", f"is {errors.shown(tool.get('type'))}: only functions are supported")
    inner = tool.get("function", tool)
    return read_string(read_object_at(inner, f"{at}.function").get("name"), f"{at}.name")


async def grammar_of(model: ServedModel, prompt: Prompt, use: ToolUse, wanted: Wanted) -> str:
    """What the output must follow, compiled, for SamplingParams; empty if it may be anything. Raises ApiError 400.

    wanted: what the answer is to follow. Calls that must be there follow their schemas, and so do all calls where one
    of the tools is strict, not all are allowed, or an answer is wanted, in whose place they stand. Reasoning may come
    before.
    """
    calls = calls_of(model, use, answers=bool(wanted))
    if not wanted and calls is None:
        return ""
    field = check_one(wanted) if wanted and not (calls and calls.required) else None

    def write() -> str:
        answer = wanted[field]() if field is not None else None
        return output_grammar(answer, calls, model.text.added_tokens, model.formats.reasoning, prompt.in_reasoning)

    return await model.grammars.compiled(write, field or "tools")


def calls_of(model: ServedModel, use: ToolUse, answers: bool) -> WantedCalls | None:
    """The calls that a grammar is to have, if it is to have some. answers: whether there is one for the answer."""
    format, tools, required = model.formats.tools, use.callable, use.mode == "required"
    bound = required or answers or use.names is not None or any(tool.strict for tool in tools)
    if format is None or not tools or not bound:
        return None
    known = [CallableTool(tool.name, tool.parameters, tool.strict) for tool in tools]
    return WantedCalls(known, format.begins[0], format.rules, model.text.added_tokens, required, use.parallel)
