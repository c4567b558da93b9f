"""Conversion of the chat messages that clients send into the messages that chat templates read.

at: the path of a value in the body, such as messages[0].content, which error messages name.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import msgspec

from baton.api import errors
from baton.api.generation.offload import off_loop
from baton.api.generation.request_builder import too_long
from baton.api.generation.served_model import ServedModel

# Maps each role that clients may send to the role that templates get.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
PASSED_ON = frozenset({"name"})  # optional strings that go to the template unchanged
OF_ASSISTANTS = ("reasoning_content", "reasoning")  # two names of the field with an assistant's reasoning
# Fields of an API's answers, which clients send back in their history. They are ignored.
IGNORED = frozenset(
    {
        "type",
        "annotations",
        "refusal",
        "parsed",
        "id",
        "status",
        "stop_reason",
        "provider_specific_fields",
        "thinking_blocks",
    }
)
TEXT_ONLY = "only text parts are supported"
# Types of parts that a tool may return, in any API, and that no model here can read; each with words for the model.
UNREADABLE = {
    **dict.fromkeys(("image", "image_url", "input_image"), "an image"),
    **dict.fromkeys(("document", "file", "input_file"), "a file"),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "a sound recording"),
    **dict.fromkeys(("video", "video_url", "input_video"), "a video"),
}
MESSAGE_SIZE = 100  # reading one message takes as long as encoding so many characters
MAX_CALLS = 128

T = TypeVar("T")
R = TypeVar("R")
Message: TypeAlias = dict[str, Any]


async def read_messages(model: ServedModel, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Read messages whose contents are text. Raises ApiError 400, which names the wrong field."""
    return await read_each(model, messages, read_message, "messages")


async def read_each(model: ServedModel, items: Sequence[T], read: Callable[[T, str, str], R], field: str) -> list[R]:
    """Return `read(item, at, between)` for each item; `between` is the template's separator of a text's parts.

    Each item has at least one token, so a list with more items than the model's length is refused unread.
    """
    if len(items) > model.max_model_len:
        raise too_long(model, f"{len(items)} messages", field)

    between = model.text.between_parts

    def work() -> list[R]:
        return [read(item, f"{field}[{index}]", between) for index, item in enumerate(items)]

    return await off_loop(len(items) * MESSAGE_SIZE, work)


def read_message(message: Mapping[str, Any], at: str, between: str = "") -> Message:
    """Read one message. Return the fields that templates read: role, content, and the fields that the role may have."""
    fields = {name: value for name, value in message.items() if value is not None and name not in IGNORED}
    role = read_role(fields.pop("role", None), f"{at}.role")
    own: Message = {}
    if role == "assistant":
        own = read_assistant(fields, at)
    elif role == "tool":
        own = read_answered(fields.pop("tool_call_id", None), fields.get("name"), f"{at}.tool_call_id")
    # Clients send content null if the assistant said nothing, or only called tools.
    silent = role == "assistant" and ("content" in message or "tool_calls" in own)
    content = fields.pop("content", "" if silent else None)
    if content is None:
        raise errors.bad_request(f"{at}.content is required", f"{at}.content", "missing_required_parameter")
    if fields.pop("audio", None):
        raise errors.unsupported(f"{at}.audio")
    passed = {name: read_string(fields.pop(name), f"{at}.{name}") for name in PASSED_ON & fields.keys()}
    if fields:
        field = f"{at}.{min(fields)}"
        raise errors.bad_request(f"unknown or unsupported field {field!r}", field, "unknown_parameter")
    read = read_result if role == "tool" else read_content
    return {"role": role, "content": read(content, f"{at}.content", between), **own, **passed}


def read_role(role: object, at: str) -> str:
    if role == "function":
        raise errors.unsupported(at, "'function' is not supported: send results of tools with the role tool")
    if not isinstance(role, str) or role not in ROLES:
        expected = f"{at}: expected one of {', '.join(ROLES)}, got {errors.shown(role)}"
        raise errors.bad_request(expected, at, "invalid_value")
    return ROLES[role]


def read_answered(id: object, name: object, at: str) -> Message:
    """Return the field that says which call a tool's result answers: none if the result has only the tool's name."""
    return {} if id is None and name else {"tool_call_id": read_string(id, at)}


def read_assistant(fields: Message, at: str) -> Message:
    """Remove from `fields` the reasoning and tool calls of an assistant's message, and return them."""
    if fields.pop("function_call", None):
        raise errors.unsupported(f"{at}.function_call", "is not supported: use tool_calls")
    calls = fields.pop("tool_calls", None)
    thoughts = {name: fields.pop(name) for name in OF_ASSISTANTS if name in fields}
    own: Message = {}
    for name, thought in thoughts.items():
        own["reasoning_content"] = read_string(thought, f"{at}.{name}")
    if calls:
        own["tool_calls"] = read_calls(calls, f"{at}.tool_calls")
    return own


def read_calls(calls: object, at: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise errors.bad_request(f"{at} must be a list", at, "invalid_value")
    if len(calls) > MAX_CALLS:
        raise errors.bad_request(f"{at}: at most {MAX_CALLS} calls, got {len(calls)}", at, "invalid_value")
    return [read_call(call, f"{at}[{index}]") for index, call in enumerate(calls)]


def read_call(call: object, at: str) -> dict[str, Any]:
    fields = read_object_at(call, at)
    if fields.get("type", "function") != "function":
        raise errors.unsupported(f"{at}.type", f"is {errors.shown(fields['type'])}: only functions are supported")
    function = read_object_at(fields.get("function"), f"{at}.function")
    id = read_string(fields.get("id"), f"{at}.id")
    name = read_string(function.get("name"), f"{at}.function.name")
    arguments = read_string(function.get("arguments", ""), f"{at}.function.arguments")
    return call_message(id, name, arguments)


def call_message(id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a tool call in the format of chat templates.

    arguments: a JSON object. Text that is no JSON object, as in a call that was cut off, is passed on as text.
    """
    try:
        parsed = msgspec.json.decode(arguments or "{}")
    except (msgspec.MsgspecError, ValueError, RecursionError):
        parsed = arguments
    shown = parsed if isinstance(parsed, dict) else arguments
    return {"id": id, "type": "function", "function": {"name": name, "arguments": shown}}


def read_object_at(value: object, at: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise errors.bad_request(f"{at} must be an object", at, "invalid_value")
    return value


def read_string(value: object, at: str) -> str:
    if value is None:
        raise errors.bad_request(f"{at} is required", at, "missing_required_parameter")
    if not isinstance(value, str):
        raise errors.bad_request(f"{at} must be a string", at, "invalid_value")
    return value


def read_content(content: object, at: str, between: str) -> str:
    """Return a message's content: a string as it is, or a list of text parts joined with `between`."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise errors.bad_request(f"{at} must be a string or a list of parts", at, "invalid_value")
    return between.join(read_part(part, f"{at}[{index}]") for index, part in enumerate(content))


def read_result(content: object, at: str, between: str) -> str:
    """Return a tool's result. Parts that the model cannot read are replaced by a text that says so.

    Such a part is no error: the client sends it again with every later turn, so the conversation would be over.
    """
    parts = [replaced(part) for part in content] if isinstance(content, list) else content
    return read_content(parts, at, between)


def replaced(part: object) -> object:
    """Return a text part in place of a part that the model cannot read, and any other part as it is."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in UNREADABLE:
        return part
    text = f"[The tool returned {UNREADABLE[kind]}. It was left out: this model reads only text.]"
    return {**part, "type": "text", "text": text} if isinstance(part, dict) else part


def read_part(part: object, at: str) -> str:
    if not isinstance(part, dict):
        raise errors.bad_request(f"{at} must be an object", at, "invalid_value")
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in TEXT_PARTS:
        raise errors.unsupported(at, f"has type {errors.shown(kind)}: {TEXT_ONLY}")
    if not isinstance(part.get("text"), str):
        raise errors.bad_request(f"{at}.text must be a string", f"{at}.text", "invalid_value")
    return str(part["text"])
