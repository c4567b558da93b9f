"""Conversion of the input items that clients send into the messages that chat templates read."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from baton.api import errors
from baton.api.generation.messages import (
    Message,
    call_message,
    read_answered,
    read_each,
    read_message,
    read_object_at,
    read_result,
    read_string,
)
from baton.api.generation.served_model import ServedModel
from baton.api.responses.response_tools import prefix_of

NOT_SHOWN = ("type", "phase")
Item = Mapping[str, Any]
Find = Callable[[str, str], Item]  # function: (id, field for errors) to the stored item


async def read_input(model: ServedModel, content: str | Sequence[Item], find: Find) -> list[Message]:
    """Read a response's `input`. Raises ApiError 400, which names the wrong field, or 404 for an unknown reference."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    items = [referred(item, find, f"input[{index}]") for index, item in enumerate(content)]
    return join_answers(await read_each(model, items, read_item, "input"))


def referred(item: Item, find: Find, at: str) -> Item:
    """Return the item that an item_reference names, or any other item as it is. A reference may lack its type."""
    if item.get("type") == "item_reference" or item.keys() == {"id"}:
        return find(read_string(item.get("id"), f"{at}.id"), f"{at}.id")
    return item


def read_item(item: Item, at: str, between: str) -> Message:
    """Convert an item to a message. at: path of the item. between: separator of a text's parts.

    Reasoning and calls of an answer become separate messages, which `join_answers` merges.
    """
    match item.get("type", "message"):
        case "message":
            return read_message({name: value for name, value in item.items() if name not in NOT_SHOWN}, at, between)
        case "function_call":
            id, name, arguments = (
                read_string(item.get(key), f"{at}.{key}") for key in ("call_id", "name", "arguments")
            )
            full = prefix_of(read_string(item.get("namespace") or "", f"{at}.namespace")) + name
            return {"role": "assistant", "content": "", "tool_calls": [call_message(id, full, arguments)]}
        case "function_call_output":
            return read_output(item, at, between)
        case "reasoning":
            return {"role": "assistant", "content": "", "reasoning_content": read_reasoning(item, at)}
    known = "message, function_call, function_call_output, reasoning or item_reference"
    raise errors.unsupported(f"{at}.type", f"is {errors.shown(item['type'])}: expected {known}")


def read_output(item: Item, at: str, between: str) -> Message:
    """Return a tool's result as a message. Codex sends results without a call, which have only the tool's name."""
    space, name = (read_string(item.get(key) or "", f"{at}.{key}") for key in ("namespace", "name"))
    called = {"name": prefix_of(space) + name} if name else {}
    content = read_result(item.get("output"), f"{at}.output", between)
    return {"role": "tool", "content": content, **read_answered(item.get("call_id"), name, f"{at}.call_id"), **called}


def read_reasoning(item: Mapping[str, Any], at: str) -> str:
    """Return the text of a reasoning item. It is empty if the item has only a summary or encrypted content."""
    parts = item.get("content") or []
    if not isinstance(parts, list):
        raise errors.bad_request(f"{at}.content must be a list", f"{at}.content", "invalid_value")
    texts = []
    for index, part in enumerate(parts):
        place = f"{at}.content[{index}]"
        texts.append(read_string(read_object_at(part, place).get("text"), f"{place}.text"))
    return "".join(texts)


def join_answers(messages: Sequence[Message]) -> list[Message]:
    """Merge consecutive messages with reasoning, text and calls, in this order, into one message of the assistant."""
    joined: list[Message] = []
    for message in messages:
        last = joined[-1] if joined else None
        if last is None or not follows(last, message):
            joined.append(message)
            continue
        calls = [*last.get("tool_calls", ()), *message.get("tool_calls", ())]
        joined[-1] = {**last, "content": last["content"] or message["content"]} | (
            {"tool_calls": calls} if calls else {}
        )
    return [message for message in joined if message["role"] != "assistant" or is_something(message)]


def follows(last: Message, message: Message) -> bool:
    """Return whether `message` continues the answer that `last` begins."""
    if last["role"] != "assistant" or message["role"] != "assistant" or "reasoning_content" in message:
        return False
    if "tool_calls" in message:
        return True
    return "reasoning_content" in last and not last["content"] and "tool_calls" not in last


def is_something(message: Message) -> bool:
    """Return whether an assistant's message has any content. A reasoning item without text leaves an empty message."""
    return message.get("reasoning_content") != "" or bool(message["content"] or message.get("tool_calls"))
