"""A response's input: items as clients send them, made into the messages that templates show."""

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
from baton.api.responses.offered import prefix_of

NOT_SHOWN = ("type", "phase")
Item = Mapping[str, Any]
Find = Callable[[str, str], Item]


async def read_input(model: ServedModel, given: str | Sequence[Item], find: Find) -> list[Message]:
    """find: the item of an id, for a field that its error names. Raises ApiError: 400 naming the place, 404 by find."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    items = [referred(item, find, f"input[{index}]") for index, item in enumerate(given)]
    return join_answers(await read_each(model, items, read_item, "input"))


def referred(item: Item, find: Find, at: str) -> Item:
    """The item itself, or the one that it stands for. OpenAI's clients may leave out the type of a reference."""
    if item.get("type") == "item_reference" or item.keys() == {"id"}:
        return find(read_string(item.get("id"), f"{at}.id"), f"{at}.id")
    return item


def read_item(item: Item, at: str, between: str) -> Message:
    """A message, or a part of one: the reasoning or a call of an earlier response, the result of a call."""
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
    """Its text; nothing where there is only a summary, or what another server has encrypted."""
    parts = item.get("content") or []
    if not isinstance(parts, list):
        raise errors.bad_request(f"{at}.content must be a list", f"{at}.content", "invalid_value")
    texts = []
    for index, part in enumerate(parts):
        place = f"{at}.content[{index}]"
        texts.append(read_string(read_object_at(part, place).get("text"), f"{place}.text"))
    return "".join(texts)


def join_answers(messages: Sequence[Message]) -> list[Message]:
    """Reasoning, text and calls that follow one another in this order are one message of the model."""
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
    if last["role"] != "assistant" or message["role"] != "assistant" or "reasoning_content" in message:
        return False
    if "tool_calls" in message:
        return True
    return "reasoning_content" in last and not last["content"] and "tool_calls" not in last


def is_something(message: Message) -> bool:
    """Not what is left of reasoning that cannot be read."""
    return message.get("reasoning_content") != "" or bool(message["content"] or message.get("tool_calls"))
