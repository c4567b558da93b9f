"""The tools that a response is offered, as Responses have them: functions, alone or in a namespace, and hosted ones."""

from collections.abc import Mapping
from typing import Any

from msgspec import structs

from baton.api import errors
from baton.api.generation.messages import read_object_at
from baton.api.generation.tools import NAME, Tool, read_function

# Whoever has these runs them itself, and the model of one that has not is not told of them: Codex offers them unasked.
HOSTED = frozenset({"web_search", "web_search_preview", "file_search", "code_interpreter", "image_generation"})


def read_response_tool(tool: object, at: str) -> list[Tool]:
    """{"type": "function", "name": …}, or {"type": "namespace", "name": …, "tools": […]}. Raises ApiError 400."""
    given = read_object_at(tool, at)
    kind = given.get("type")
    if kind == "namespace":
        return read_namespace(given, at)
    return [] if kind in HOSTED else [read_named(given, at)]


def read_namespace(given: Mapping[str, Any], at: str) -> list[Tool]:
    """Of functions only."""
    name, tools = given.get("name"), given.get("tools")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        message = f"{at}.name must be a string of 1 to 128 of A-Za-z0-9_.-"
        raise errors.bad_request(message, f"{at}.name", "invalid_value")
    if not isinstance(tools, list):
        raise errors.bad_request(f"{at}.tools must be a list", f"{at}.tools", "invalid_value")
    places = [f"{at}.tools[{index}]" for index in range(len(tools))]
    found = [read_named(read_object_at(tool, place), place) for tool, place in zip(tools, places, strict=True)]
    return [structs.replace(tool, name=prefix_of(name) + tool.name, namespace=name) for tool in found]


def read_named(given: Mapping[str, Any], at: str) -> Tool:
    if given.get("type") != "function":
        raise errors.unsupported(f"{at}.type", f"is {errors.shown(given.get('type'))}: only functions are supported")
    return read_function(given, at)


def prefix_of(namespace: str) -> str:
    """What the names of its functions begin with for the model. Those of MCP's servers end in underscores already."""
    return namespace if not namespace or namespace.endswith("_") else f"{namespace}__"
