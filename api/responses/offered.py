"""The tools that a response is offered, as Responses have them: functions, alone or in a namespace, and hosted ones."""

from collections.abc import Mapping
from typing import Any

from msgspec import structs

from api import errors
from api.generation.messages import read_object_at, read_string
from api.generation.tools import Tool, read_function

# Whoever has these runs them itself, and the model of one that has not is not told of them: Codex offers them unasked.
HOSTED = frozenset({"web_search", "web_search_preview", "file_search", "code_interpreter", "image_generation"})


def read_response_tool(tool: object, at: str) -> list[Tool]:
    """{"type": "function", "name": …}, or {"type": "namespace", "name": …, "tools": […]}. Raises ApiError 400."""
    given = read_object_at(tool, at)
    kind = given.get("type")
    if kind == "namespace":
        return read_namespace(given, at)
    if kind in HOSTED:
        return []
    if kind != "function":
        raise errors.unsupported(f"{at}.type", f"is {errors.shown(kind)}: only functions are supported")
    return [read_function(given, at)]


def read_namespace(given: Mapping[str, Any], at: str) -> list[Tool]:
    prefix, tools = prefix_of(read_string(given.get("name"), f"{at}.name")), given.get("tools")
    if not isinstance(tools, list):
        raise errors.bad_request(f"{at}.tools must be a list", f"{at}.tools", "invalid_value")
    found = [tool for index, each in enumerate(tools) for tool in read_response_tool(each, f"{at}.tools[{index}]")]
    return [structs.replace(tool, name=prefix + tool.name, namespace=given["name"]) for tool in found]


def prefix_of(namespace: str) -> str:
    """What the names of its functions begin with for the model. Those of MCP's servers end in underscores already."""
    return namespace if not namespace or namespace.endswith("_") else f"{namespace}__"
