"""Conversion of the content blocks that clients send into the messages that chat templates read.

A block with a cache_control is marked. A *beginning* is the part of the chat up to a marked block or tool: the client
asks for a checkpoint at its end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal, TypeAlias

from baton.api import errors
from baton.api.anthropic.request import MessagesRequest
from baton.api.generation.messages import MESSAGE_SIZE, Message, read_object_at, read_string, replaced
from baton.api.generation.offload import off_loop
from baton.api.generation.request_builder import too_long
from baton.api.generation.served_model import ServedModel
from baton.api.generation.tools import Tool
from baton.models.text.template import Beginning

BILLING = "x-anthropic-billing-header:"
MAX_MARKS = 4  # maximum blocks with cache_control in one request
TTLS = (None, "5m", "1h")
NO_QUESTION: Message = {"role": "user", "content": ""}  # many templates refuse a chat without a user's message
# Block types that only one role may send, and that role.
WHERE = {"thinking": "assistant", "redacted_thinking": "assistant", "tool_use": "assistant", "tool_result": "user"}

TurnRole: TypeAlias = Literal["system", "user", "assistant"]


@dataclass(frozen=True)
class InputBlock:
    """A content block that a client sent."""

    type: str
    text: str = ""  # content of a text, thinking or tool_result block
    call: Message | None = None  # the tool call of a tool_use block, in the format of chat templates
    call_id: str = ""  # id of the call that a tool_result block answers
    marked: bool = False  # the block has a cache_control


@dataclass(frozen=True)
class ChatTurn:
    """The content blocks of consecutive messages with the same role."""

    role: TurnRole
    blocks: Sequence[InputBlock]

    def messages(self) -> list[Message]:
        """Return the turn as messages for chat templates."""
        if self.role == "assistant":
            return [assistant_message(self.blocks)]
        if not any(block.type == "tool_result" for block in self.blocks):
            return [{"role": self.role, "content": joined(self.blocks)}]
        return user_messages(self.blocks)

    def beginning(self, last: int) -> "ChatTurn":
        """Return the turn up to and including the block with index `last`."""
        return ChatTurn(self.role, self.blocks[: last + 1])


@dataclass(frozen=True)
class ReadChat:
    """The system text and the messages of a body, in the format of chat templates."""

    messages: list[Message]  # the whole chat, system text included
    beginnings: list[Beginning]  # parts of the chat after which cache_control asks for a checkpoint


async def read_conversation(model: ServedModel, body: MessagesRequest, tools: Sequence[Tool]) -> ReadChat:
    """Read the body's system text and messages. Raises ApiError 400, which names the wrong field."""
    if len(body.messages) > model.max_model_len:
        raise too_long(model, f"{len(body.messages)} messages", "messages")
    system = body.system if isinstance(body.system, list) else []
    contents = [message.get("content") for message in body.messages]
    blocks = sum(len(content) if isinstance(content, list) else 1 for content in [*contents, system])
    return await off_loop(blocks * MESSAGE_SIZE, lambda: conversation(body, tools))


def conversation(body: MessagesRequest, tools: Sequence[Tool]) -> ReadChat:
    """Read the system text, the messages, and the beginnings that cache_control marks. Raises ApiError 400."""
    system = read_system(body.system)
    turns = together([read_turn(message, f"messages[{index}]") for index, message in enumerate(body.messages)])
    if read_mark(body.cache_control, "cache_control"):
        turns[-1] = with_mark(turns[-1])
    marked_tools = [read_mark(tool.get("cache_control"), f"tools[{at}]") for at, tool in enumerate(body.tools)]
    check_marks(marked_tools, [*system, *turns])
    messages = [message for turn in [*system, *turns] for message in turn.messages()]
    return ReadChat(messages, [*of_tools(system, tools, marked_tools), *of_system(system), *of_turns(system, turns)])


def read_system(system: str | list[Any]) -> list[ChatTurn]:
    """Read the system text as a list of one turn; return an empty list if there is no text."""
    blocks = [without_billing(block) for block in read_blocks(system, "system", "system")] if system else []
    filled = [block for block in blocks if block.text]
    return [ChatTurn("system", filled)] if filled else []


def without_billing(block: InputBlock) -> InputBlock:
    """Remove Claude Code's billing line. It differs in each request, so no prompt would match the cache beyond it."""
    return replace(block, text=block.text.partition("\n")[2]) if block.text.startswith(BILLING) else block


def read_turn(message: Mapping[str, Any], at: str) -> ChatTurn:
    """Read one message. at: path of the message in the body, such as messages[0]. Raises ApiError 400."""
    role = message.get("role")
    if role != "user" and role != "assistant" and role != "system":
        text = f"{at}.role: expected one of user, assistant, system, got {errors.shown(role)}"
        raise errors.bad_request(text, f"{at}.role", "invalid_value")
    if unknown := sorted(message.keys() - {"role", "content"}):
        field = f"{at}.{unknown[0]}"
        raise errors.bad_request(f"unknown or unsupported field {field!r}", field, "unknown_parameter")
    if message.get("content") is None:
        raise errors.bad_request(f"{at}.content is required", f"{at}.content", "missing_required_parameter")
    return ChatTurn(role, read_blocks(message["content"], role, f"{at}.content"))


def together(turns: Sequence[ChatTurn]) -> list[ChatTurn]:
    """Merge consecutive messages of one role into one turn."""
    groups = groupby(turns, key=lambda turn: turn.role)
    return [ChatTurn(role, [block for turn in group for block in turn.blocks]) for role, group in groups]


def read_blocks(content: object, role: TurnRole, at: str) -> list[InputBlock]:
    if isinstance(content, str):
        return [InputBlock("text", content)]
    if not isinstance(content, list):
        raise errors.bad_request(f"{at} must be a string or a list of blocks", at, "invalid_value")
    return [read_block(block, role, f"{at}[{index}]") for index, block in enumerate(content)]


def read_block(block: object, role: TurnRole, at: str) -> InputBlock:
    """Read one content block of a message with this role. at: path of the block. Raises ApiError 400."""
    fields = read_object_at(block, at)
    kind, marked = fields.get("type"), read_mark(fields.get("cache_control"), at)
    if isinstance(kind, str) and WHERE.get(kind, role) != role:
        message = f"{at}: {kind} blocks must be in messages of role {WHERE[kind]}, not {role}"
        raise errors.bad_request(message, at, "invalid_value")
    match kind:
        case "text":
            return InputBlock(kind, read_string(fields.get("text"), f"{at}.text"), marked=marked)
        case "thinking":
            return InputBlock(kind, read_string(fields.get("thinking"), f"{at}.thinking"), marked=marked)
        case "redacted_thinking":
            return InputBlock(kind, marked=marked)
        case "tool_use":
            return InputBlock(kind, call=read_tool_call(fields, at), marked=marked)
        case "tool_result":
            id = read_string(fields.get("tool_use_id"), f"{at}.tool_use_id")
            return InputBlock(kind, read_result(fields, at), call_id=id, marked=marked or marks_inside(fields, at))
    known = "text, thinking, redacted_thinking, tool_use or tool_result"
    raise errors.unsupported(at, f"has type {errors.shown(kind)}: expected {known}")


def read_tool_call(block: Mapping[str, Any], at: str) -> Message:
    id, name = read_string(block.get("id"), f"{at}.id"), read_string(block.get("name"), f"{at}.name")
    arguments = read_object_at(block.get("input"), f"{at}.input")
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def read_result(block: Mapping[str, Any], at: str) -> str:
    """Return the text of a tool's result. Templates have no field for a failure, so it gets the prefix "Error: "."""
    content = block.get("content")
    parts = [replaced(part) for part in content] if isinstance(content, list) else content
    text = joined(read_blocks(parts, "system", f"{at}.content")) if content is not None else ""
    failed = block.get("is_error")
    if not isinstance(failed, bool | None):
        raise errors.bad_request(f"{at}.is_error must be true or false", f"{at}.is_error", "invalid_value")
    return f"Error: {text}" if failed and not text.lower().startswith("error") else text


def marks_inside(block: Mapping[str, Any], at: str) -> bool:
    content = block.get("content")
    inner = content if isinstance(content, list) else []
    return any(read_mark(each.get("cache_control"), f"{at}.content[{index}]") for index, each in enumerate(inner))


def read_mark(mark: object, at: str) -> bool:
    """Return whether cache_control is set. Raises ApiError 400 for a cache_control that is not ephemeral."""
    if mark is None:
        return False
    if not isinstance(mark, dict) or mark.get("type") != "ephemeral" or mark.get("ttl") not in TTLS:
        field = at if at == "cache_control" else f"{at}.cache_control"
        message = f'{field} must be {{"type": "ephemeral"}}, optionally with a ttl of "5m" or "1h"'
        raise errors.bad_request(message, field, "invalid_value")
    return True


def check_marks(tools: Sequence[bool], turns: Sequence[ChatTurn]) -> None:
    count = sum(tools) + sum(block.marked for turn in turns for block in turn.blocks)
    if count > MAX_MARKS:
        message = f"at most {MAX_MARKS} blocks may have cache_control, got {count}"
        raise errors.bad_request(message, "cache_control", "invalid_value")


def with_mark(turn: ChatTurn) -> ChatTurn:
    """Return the turn with its last block marked."""
    *others, last = turn.blocks or [InputBlock("text")]
    return ChatTurn(turn.role, [*others, replace(last, marked=True)])


def of_tools(system: Sequence[ChatTurn], tools: Sequence[Tool], marked: Sequence[bool]) -> list[Beginning]:
    """Return a beginning for each marked tool: the prompt up to and including that tool.

    The system text is included, because many templates show it before the tools.
    """
    opening = [message for turn in system for message in turn.messages()]
    return [
        Beginning([*opening, NO_QUESTION], {"tools": [tool.shown() for tool in tools[: index + 1]]})
        for index, mark in enumerate(marked)
        if mark
    ]


def of_system(system: Sequence[ChatTurn]) -> list[Beginning]:
    """Return a beginning for each marked block of the system text: the prompt up to the end of that block."""
    return [
        Beginning([*turn.beginning(index).messages(), NO_QUESTION])
        for turn in system
        for index, block in enumerate(turn.blocks)
        if block.marked
    ]


def of_turns(system: Sequence[ChatTurn], turns: Sequence[ChatTurn]) -> list[Beginning]:
    """Return a beginning for each marked block of the messages: the prompt up to the end of that block."""
    so_far = [message for turn in system for message in turn.messages()]
    found = []
    for turn in turns:
        marked = [index for index, block in enumerate(turn.blocks) if block.marked]
        found += [Beginning([*so_far, *turn.beginning(index).messages()]) for index in marked]
        so_far += turn.messages()
    return found


def assistant_message(blocks: Sequence[InputBlock]) -> Message:
    """Join the blocks of an assistant's message: texts without separator, reasoning, and tool calls."""
    message: Message = {"role": "assistant", "content": "".join(block.text for block in blocks if block.type == "text")}
    if thoughts := [block.text for block in blocks if block.type == "thinking"]:
        message["reasoning_content"] = "\n\n".join(thoughts)
    if calls := [block.call for block in blocks if block.call is not None]:
        message["tool_calls"] = calls
    return message


def user_messages(blocks: Sequence[InputBlock]) -> list[Message]:
    """Make one message of each tool result, and one of all texts between two results."""
    messages: list[Message] = []
    for is_result, group in groupby(blocks, key=lambda block: block.type == "tool_result"):
        if is_result:
            messages += [{"role": "tool", "tool_call_id": each.call_id, "content": each.text} for each in group]
        else:
            messages.append({"role": "user", "content": joined(list(group))})
    return messages


def joined(blocks: Sequence[InputBlock]) -> str:
    return "\n".join(block.text for block in blocks)
