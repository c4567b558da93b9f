"""From the input items that clients send to the messages that chat templates read."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from baton.api import errors
from baton.api.generation.messages import (
    Message,
    call_message,
    read_content,
    read_each,
    read_message,
    read_object_at,
    read_string,
)
from baton.api.generation.served_model import ServedModel
from baton.api.responses.response_tools import prefix_of

NOT_SHOWN = ("type", "phase")
Item = Mapping[str, Any]
Find = Callable[[str, str], Item]  # returns the stored item of an id; its error names the field that is passed


async def read_input(model: ServedModel, content: str | Sequence[Item], find: Find) -> list[Message]:
    """Read a response's `input`. Raises ApiError: 400, which names the place; 404 for an unknown reference."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    items = [referred(item, find, f"input[{index}]") for index, item in enumerate(content)]
    return join_answers(await read_each(model, items, read_item, "input"))


def referred(item: Item, find: Find, at: str) -> Item:
    """Resolve an item_reference; return other items as they are. OpenAI's clients may leave out a reference's type."""
    if item.get("type") == "item_reference" or item.keys() == {"id"}:
        return find(read_string(item.get("id"), f"{at}.id"), f"{at}.id")
    return item


def read_item(item: Item, at: str, between: str) -> Message:
    """Read an item as a message.

    Reasoning and calls of an earlier response become messages of their own, which `join_answers` merges.
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
            id, output = read_string(item.get("call_id"), f"{at}.call_id"), item.get("output")
            return {"role": "tool", "content": read_content(output, f"{at}.output", between), "tool_call_id": id}
        case "reasoning":
            return {"role": "assistant", "content": "", "reasoning_content": read_reasoning(item, at)}
    known = "message, function_call, function_call_output, reasoning or item_reference"
    raise errors.unsupported(f"{at}.type", f"is {errors.shown(item['type'])}: expected {known}")


def read_reasoning(item: Mapping[str, Any], at: str) -> str:
    """Return the text of reasoning; empty if it has only a summary, or is encrypted by another server."""
    parts = item.get("content") or []
    if not isinstance(parts, list):
        raise errors.bad_request(f"{at}.content must be a list", f"{at}.content", "invalid_value")
    texts = []
    for index, part in enumerate(parts):
        place = f"{at}.content[{index}]"
        texts.append(read_string(read_object_at(part, place).get("text"), f"{place}.text"))
    return "".join(texts)


def join_answers(messages: Sequence[Message]) -> list[Message]:
    """Merge reasoning, text and calls that follow one another in this order into one message of the model."""
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
    """Return whether a message says anything. Reasoning that cannot be read leaves an empty one."""
    return message.get("reasoning_content") != "" or bool(message["content"] or message.get("tool_calls"))
