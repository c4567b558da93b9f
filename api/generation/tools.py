"""The tools that a request offers to the model."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import Struct, field

from baton.api import errors
from baton.api.generation.messages import read_object_at
from baton.api.generation.offload import off_loop
from baton.api.generation.served_model import ServedModel

MAX_TOOLS = 512
MAX_BYTES = 2**20  # maximum size of all tools of a request, as JSON
MAX_DEPTH = 64  # maximum nesting of lists and objects in a schema
NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")

Mode: TypeAlias = Literal["none", "auto", "required"]
# A function that reads one entry of a request's tools. Arguments: the entry, and its path in the body for errors.
ReadTool: TypeAlias = Callable[[object, str], "list[Tool]"]


def no_parameters() -> dict[str, Any]:
    return {"type": "object", "properties": {}}


class Tool(Struct, frozen=True):
    """A tool: a function that the model may call."""

    name: str  # the name in the prompt, which includes the namespace
    description: str | None = None
    parameters: dict[str, Any] = field(default_factory=no_parameters)  # JSON schema of the arguments object
    strict: bool = False  # whether a grammar enforces the schema of the arguments
    namespace: str = ""  # the tool's namespace in Responses, which clients get apart from the rest of the name

    def shown(self) -> dict[str, Any]:
        """Return the tool in the format of chat templates."""
        described = {"description": self.description} if self.description is not None else {}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": self.parameters}}


class ToolUse(Struct, frozen=True):
    """The tools of a request, and how the model may use them."""

    tools: tuple[Tool, ...] = ()  # all tools that the prompt shows
    mode: Mode = "auto"  # none, auto or required: the model must not, may, or must call tools
    names: frozenset[str] | None = None  # names of the tools that the model may call; None: all
    parallel: bool = True  # whether one answer may have several calls

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that the model may call."""
        if self.mode == "none":
            return ()
        return tuple(tool for tool in self.tools if self.names is None or tool.name in self.names)


NO_TOOLS = ToolUse()


def read_tool(tool: object, at: str) -> list[Tool]:
    """Read a tool of chat completions: {"type": "function", "function": {…}}. Raises ApiError 400."""
    fields = read_object_at(tool, at)
    if fields.get("type") != "function":
        raise errors.unsupported(f"{at}.type", f"is {errors.shown(fields.get('type'))}: only functions are supported")
    return [read_function(read_object_at(fields.get("function"), f"{at}.function"), f"{at}.function")]


def read_function(function: Mapping[str, Any], at: str, parameters: str = "parameters") -> Tool:
    """Read {name, description, parameters, strict}. parameters: the API's name for that field. Raises ApiError 400."""
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        message = f"{at}.name must be 1 to 128 characters, each of A-Z a-z 0-9 _ . -"
        raise errors.bad_request(message, f"{at}.name", "invalid_value")
    if not isinstance(description, str | None):
        raise errors.bad_request(f"{at}.description must be a string", f"{at}.description", "invalid_value")
    strict = function.get("strict")
    if not isinstance(strict, bool | None):
        raise errors.bad_request(f"{at}.strict must be true or false", f"{at}.strict", "invalid_value")
    schema = function.get(parameters)
    checked = read_schema(schema, f"{at}.{parameters}") if schema is not None else no_parameters()
    return Tool(name, description, checked, bool(strict))


def read_schema(value: object, at: str) -> dict[str, Any]:
    """Check the outermost level and the depth of an object's JSON schema, and return it. Raises ApiError 400."""
    schema = read_object_at(value, at)
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if schema.get("type", "object") != "object" or not isinstance(properties, dict):
        raise errors.bad_request(f"{at} must be the JSON schema of an object", at, "invalid_value")
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise errors.bad_request(f"{at}.required must be a list of property names", f"{at}.required", "invalid_value")
    for name, property in properties.items():
        if not isinstance(property, dict | bool):
            raise errors.bad_request(
                f"{at}: property {name!r} must be a schema: an object or a boolean", f"{at}.properties", "invalid_value"
            )
        if isinstance(property, dict) and not isinstance(property.get("enum", []), list):
            raise errors.bad_request(
                f"{at}: the enum of property {name!r} must be a list", f"{at}.properties", "invalid_value"
            )
    if is_deeper(schema, MAX_DEPTH):
        raise errors.bad_request(f"{at} is nested deeper than {MAX_DEPTH} levels", at, "invalid_value")
    return schema


def is_deeper(value: object, depth: int) -> bool:
    """Return whether lists and objects are nested deeper than `depth` levels."""
    layer: list[object] = [value]
    for _ in range(depth + 1):
        inside = [
            inner
            for outer in layer
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not inside:
            return False
        layer = inside
    return True


async def read_tools(
    model: ServedModel, tools: Sequence[object], read: ReadTool, at: str = "tools"
) -> tuple[Tool, ...]:
    """Read all tools of a request with `read`. Raises ApiError 400."""
    if tools:
        check_model(model, at)
    if len(tools) > MAX_TOOLS:
        raise errors.bad_request(f"{at}: at most {MAX_TOOLS} tools, got {len(tools)}", at, "invalid_value")
    size = json_bytes(tools, at)
    if size > MAX_BYTES:
        raise errors.bad_request(f"{at}: at most {MAX_BYTES} bytes of JSON, got {size}", at, "invalid_value")

    def work() -> list[Tool]:
        return [each for index, tool in enumerate(tools) for each in read(tool, f"{at}[{index}]")]

    return check_names(await off_loop(size, work), at)


def json_bytes(value: object, at: str) -> int:
    try:
        return len(msgspec.json.encode(value))
    except RecursionError:
        raise errors.bad_request(f"{at}: nested too deeply", at, "invalid_value") from None


def check_model(model: ServedModel, at: str) -> None:
    """Raise ApiError 400 if the chat template cannot show tools, or the format of the model's calls is unknown."""
    if model.formats.tools is None:
        raise errors.unsupported(at, "is not supported: the format in which this model calls tools is unknown")
    if "tools" not in model.text.template_variables:
        raise errors.unsupported(at, "is not supported: the model's chat template does not show tools")


def check_names(tools: Sequence[Tool], at: str) -> tuple[Tool, ...]:
    """Return the tools. Raises ApiError 400 if two tools have the same name."""
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.name in seen:
            message = f"{at}[{index}]: there is another tool named {tool.name!r}"
            raise errors.bad_request(message, f"{at}[{index}]", "invalid_value")
        seen.add(tool.name)
    return tuple(tools)
