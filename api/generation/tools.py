"""The tools that a request offers, and which of them are to be called."""

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
MAX_BYTES = 2**20
MAX_DEPTH = 64
NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")

Mode: TypeAlias = Literal["none", "auto", "required"]
ReadTool: TypeAlias = Callable[[object, str], "list[Tool]"]


def no_parameters() -> dict[str, Any]:
    return {"type": "object", "properties": {}}


class Tool(Struct, frozen=True):
    """A function that the model may call. parameters: the JSON schema of its arguments, an object's.

    strict: its arguments follow the schema. namespace: what its name begins with for the model, but not for the client.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] = field(default_factory=no_parameters)
    strict: bool = False
    namespace: str = ""

    def shown(self) -> dict[str, Any]:
        """As templates know it."""
        described = {"description": self.description} if self.description is not None else {}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": self.parameters}}


class ToolUse(Struct, frozen=True):
    """tools: all that the prompt shows. mode: whether some are to be called; names: of which, None for any.

    parallel: in one answer there may be several calls.
    """

    tools: tuple[Tool, ...] = ()
    mode: Mode = "auto"
    names: frozenset[str] | None = None
    parallel: bool = True

    @property
    def callable(self) -> tuple[Tool, ...]:
        """Those that the model may call."""
        if self.mode == "none":
            return ()
        return tuple(tool for tool in self.tools if self.names is None or tool.name in self.names)


NO_TOOLS = ToolUse()


def read_tool(tool: object, at: str) -> list[Tool]:
    """As chat completions have it: {"type": "function", "function": {…}}. Raises ApiError 400."""
    given = read_object_at(tool, at)
    if given.get("type") != "function":
        raise errors.unsupported(f"{at}.type", f"is {errors.shown(given.get('type'))}: only functions are supported")
    return [read_function(read_object_at(given.get("function"), f"{at}.function"), f"{at}.function")]


def read_function(function: Mapping[str, Any], at: str, parameters: str = "parameters") -> Tool:
    """{name, description, parameters, strict}; parameters: the name of that field. Raises ApiError 400."""
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        message = f"{at}.name must be a string of 1 to 128 of A-Z a-z 0-9 _ . -"
        raise errors.bad_request(message, f"{at}.name", "invalid_value")
    if not isinstance(description, str | None):
        raise errors.bad_request(f"{at}.description must be a string", f"{at}.description", "invalid_value")
    strict = function.get("strict")
    if not isinstance(strict, bool | None):
        raise errors.bad_request(f"{at}.strict must be true or false", f"{at}.strict", "invalid_value")
    given = function.get(parameters)
    schema = read_schema(given, f"{at}.{parameters}") if given is not None else no_parameters()
    return Tool(name, description, schema, bool(strict))


def read_schema(value: object, at: str) -> dict[str, Any]:
    """An object's, as far as its outermost part says. Raises ApiError 400."""
    schema = read_object_at(value, at)
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if schema.get("type", "object") != "object" or not isinstance(properties, dict):
        raise errors.bad_request(f"{at} must be the schema of an object", at, "invalid_value")
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise errors.bad_request(f"{at}.required must be a list of names", f"{at}.required", "invalid_value")
    for name, property in properties.items():
        if not isinstance(property, dict | bool):
            raise errors.bad_request(f"{at}: {name!r} has no schema", f"{at}.properties", "invalid_value")
        if isinstance(property, dict) and not isinstance(property.get("enum", []), list):
            raise errors.bad_request(f"{at}: the enum of {name!r} is no list", f"{at}.properties", "invalid_value")
    if is_deeper(schema, MAX_DEPTH):
        raise errors.bad_request(f"{at} is nested deeper than {MAX_DEPTH}", at, "invalid_value")
    return schema


def is_deeper(value: object, depth: int) -> bool:
    """Whether lists and objects are nested deeper than so many."""
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
    """What `read(tool, place)` makes of each that a request offers. Raises ApiError 400."""
    if tools:
        check_model(model, at)
    if len(tools) > MAX_TOOLS:
        raise errors.bad_request(f"{at}: at most {MAX_TOOLS} tools", at, "invalid_value")
    size = json_bytes(tools, at)
    if size > MAX_BYTES:
        raise errors.bad_request(f"{at}: more than {MAX_BYTES} bytes of JSON", at, "invalid_value")

    def work() -> list[Tool]:
        return [each for index, tool in enumerate(tools) for each in read(tool, f"{at}[{index}]")]

    return check_names(await off_loop(size, work), at)


def json_bytes(value: object, at: str) -> int:
    try:
        return len(msgspec.json.encode(value))
    except RecursionError:
        raise errors.bad_request(f"{at}: nested too deep", at, "invalid_value") from None


def check_model(model: ServedModel, at: str) -> None:
    """Raise ApiError 400 if the model cannot be shown tools, or nobody knows how it calls them."""
    if model.formats.tools is None:
        raise errors.unsupported(at, "is not supported: no format is known in which the model calls tools")
    if "tools" not in model.text.template_variables:
        raise errors.unsupported(at, "is not supported: the model's chat template shows no tools")


def check_names(tools: Sequence[Tool], at: str) -> tuple[Tool, ...]:
    """Raise ApiError 400 if two have the same."""
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.name in seen:
            message = f"{at}[{index}]: there are two tools {tool.name!r}"
            raise errors.bad_request(message, f"{at}[{index}]", "invalid_value")
        seen.add(tool.name)
    return tuple(tools)
