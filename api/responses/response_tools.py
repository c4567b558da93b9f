"""The tools of a response, in the format of Responses: functions, namespaces of functions, and hosted tools."""

from collections.abc import Mapping
from typing import Any

from msgspec import structs

from baton.api import errors
from baton.api.generation.messages import read_object_at
from baton.api.generation.tools import NAME, Tool, read_function

# Tools that OpenAI's server runs itself. They are ignored instead of refused, because Codex always offers them.
HOSTED = frozenset({"web_search", "web_search_preview", "file_search", "code_interpreter", "image_generation"})


def read_response_tool(tool: object, at: str) -> list[Tool]:
    """Read a function, or a namespace {"type": "namespace", "name": …, "tools": […]}. Raises ApiError 400."""
    fields = read_object_at(tool, at)
    kind = fields.get("type")
    if kind == "namespace":
        return read_namespace(fields, at)
    return [] if kind in HOSTED else [read_named(fields, at)]


def read_namespace(fields: Mapping[str, Any], at: str) -> list[Tool]:
    """Read the functions of a namespace, which may contain nothing else. Raises ApiError 400."""
    name, tools = fields.get("name"), fields.get("tools")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        message = f"{at}.name must be 1 to 128 characters, each of A-Z a-z 0-9 _ . -"
        raise errors.bad_request(message, f"{at}.name", "invalid_value")
    if not isinstance(tools, list):
        raise errors.bad_request(f"{at}.tools must be a list", f"{at}.tools", "invalid_value")
    places = [f"{at}.tools[{index}]" for index in range(len(tools))]
    found = [read_named(read_object_at(tool, place), place) for tool, place in zip(tools, places, strict=True)]
    return [structs.replace(tool, name=prefix_of(name) + tool.name, namespace=name) for tool in found]


def read_named(fields: Mapping[str, Any], at: str) -> Tool:
    if fields.get("type") != "function":
        raise errors.unsupported(f"{at}.type", f"is {errors.shown(fields.get('type'))}: only functions are supported")
    return read_function(fields, at)


def prefix_of(namespace: str) -> str:
    """Return the prefix that the model sees before the names of a namespace's functions.

    It is the namespace and "__"; a namespace of an MCP server ends in underscores already.
    """
    return namespace if not namespace or namespace.endswith("_") else f"{namespace}__"
