"""/v1/conversations: sessions in the format of OpenAI's conversations, where messages are items."""

import uuid
from typing import Annotated, Any, TypeAlias

from aiohttp import web
from msgspec import Meta, Struct, field

from baton.api import errors
from baton.api.errors import ApiError
from baton.api.exchange import answer_json, new_id, read_body, salt_of
from baton.api.generation.messages import Message, read_each
from baton.api.generation.served_model import ServedModel
from baton.api.parsing import convert, read_object
from baton.api.responses.events import item_id
from baton.api.responses.input import join_answers, read_item
from baton.api.responses.input_items import items_by_message, page_of, turn_items
from baton.api.responses.items import Item, items_of
from baton.api.security import owner_of
from baton.api.server import SERVER
from baton.api.sessions.log import ITEM_IDS, Turn, turns
from baton.api.sessions.routes import close
from baton.api.sessions.session import Session
from baton.api.sessions.store import SESSIONS

routes = web.RouteTableDef()

Name: TypeAlias = Annotated[str, Meta(max_length=64)]
Value: TypeAlias = Annotated[str, Meta(max_length=512)]
Metadata: TypeAlias = Annotated[dict[Name, Value], Meta(max_length=16)]


class ConversationRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    items: list[dict[str, Any]] = field(default_factory=list)
    metadata: Metadata = field(default_factory=dict)


class MetadataRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    metadata: Metadata = field(default_factory=dict)


class ItemsRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    items: Annotated[list[dict[str, Any]], Meta(min_length=1)]


@routes.post("/v1/conversations")
async def create_conversation(request: web.Request) -> web.Response:
    sessions = request.app[SESSIONS]
    body = convert(await read_body(request), ConversationRequest)
    messages = await read_items(request.app[SERVER].ready(), body.items)
    session = sessions.create(owner_of(request), f"conv_{uuid.uuid4().hex}", salt_of(request))
    if body.metadata:
        session.describe_as(body.metadata)
    if messages:
        session.put(new_id("items"), messages)
    await sessions.wait_created(session)
    return answer_json(describe(session))


@routes.get("/v1/conversations/{conversation}")
async def get_conversation(request: web.Request) -> web.Response:
    return answer_json(describe(find(request)))


@routes.post("/v1/conversations/{conversation}")
async def update_conversation(request: web.Request) -> web.Response:
    body = convert(await read_object(request), MetadataRequest)
    session = find(request)
    session.describe_as(body.metadata)
    await session.wait_saved()
    return answer_json(describe(session))


@routes.delete("/v1/conversations/{conversation}")
async def delete_conversation(request: web.Request) -> web.Response:
    """Delete a conversation. Its running response is cancelled; its stored responses stay."""
    session = find(request)
    close(request, session)
    await session.wait_saved()
    return answer_json({"id": session.id, "object": "conversation.deleted", "deleted": True})


@routes.get("/v1/conversations/{conversation}/items")
async def list_conversation_items(request: web.Request) -> web.Response:
    return answer_json(page_of(items_in(find(request)), request.query))


@routes.post("/v1/conversations/{conversation}/items")
async def create_conversation_items(request: web.Request) -> web.Response:
    """Add items to a conversation. The model reads the items in the next turn."""
    body = convert(await read_body(request), ItemsRequest)
    messages = await read_items(request.app[SERVER].ready(), body.items)
    session = find(request)
    turn = session.put(new_id("items"), messages)
    await session.wait_saved()
    items = turn_items(turn)
    ends = {"first_id": items[0]["id"] if items else None, "last_id": items[-1]["id"] if items else None}
    return answer_json({"object": "list", "data": items, **ends, "has_more": False})


@routes.get("/v1/conversations/{conversation}/items/{item}")
async def get_conversation_item(request: web.Request) -> web.Response:
    session, id = find(request), request.match_info["item"]
    found = next((item for item in items_in(session) if item["id"] == id), None)
    if found is None:
        raise no_item(session, id)
    return answer_json(found)


@routes.delete("/v1/conversations/{conversation}/items/{item}")
async def delete_conversation_item(request: web.Request) -> web.Response:
    """Delete one item. Later items stay, but the next turn must compute all items after the deleted one again."""
    session = find(request)
    session.check_idle()
    session.check_room()
    turn, messages = turns_without(session, request.match_info["item"])
    request.app[SESSIONS].rewind(session, turn.previous.number if turn.previous is not None else 0)
    if messages:
        session.put(new_id("items"), messages)
    await session.wait_saved()
    return answer_json(describe(session))


def find(request: web.Request) -> Session:
    """Return the session that the path names. Raises ApiError: 404, 503."""
    request.app[SERVER].ready()
    id = request.match_info["conversation"]
    session = request.app[SESSIONS].find(owner_of(request), id)
    if session is None:
        raise errors.unknown_session(id, "conversation_id")
    session.settle_if_over()
    return session


def no_item(session: Session, id: str) -> ApiError:
    return ApiError(
        404, f"conversation {session.id!r} has no item {id!r}", "not_found_error", "item_id", "item_not_found"
    )


def describe(session: Session) -> dict[str, Any]:
    """Return the conversation object of a session."""
    return {
        "id": session.id,
        "object": "conversation",
        "created_at": session.created,
        "metadata": session.metadata,
    }


async def read_items(model: ServedModel, items: list[dict[str, Any]]) -> list[Message]:
    """Convert items to messages. Raises ApiError 400, which names the wrong field."""
    return join_answers(await read_each(model, items, read_item, "items"))


def items_in(session: Session) -> list[Item]:
    """Return all items of a session, oldest first."""
    return [item for turn in turns(session.head) for item in turn_items(turn)]


def turns_without(session: Session, id: str) -> tuple[Turn, list[Message]]:
    """Return the turn that contains an item, and all messages from that turn on, without the item.

    The messages keep the ids of their other items. Raises ApiError 404 for an unknown item, and 400 if one of these
    turns has no messages.
    """
    all_turns = turns(session.head)
    at = next((n for n, turn in enumerate(all_turns) if any(item["id"] == id for item in turn_items(turn))), None)
    if at is None:
        raise no_item(session, id)
    if any(turn.messages is None for turn in all_turns[at:]):
        raise errors.bad_request("the item cannot be deleted: a later turn is not chat", "item_id", "not_a_chat")
    rest = [left for turn in all_turns[at:] for message, items in messages_with_items(turn)
            if (left := without(message, items, id)) is not None]  # fmt: skip
    return all_turns[at], rest


def messages_with_items(turn: Turn) -> list[tuple[Message, list[Item]]]:
    """Return the messages of a turn, each with its items. The last message is the model's answer."""
    pairs = list(zip(turn.messages or (), items_by_message(turn.request, turn.messages or ()), strict=True))
    return [*pairs, *([(turn.reply, items_of(item_id(turn.request), turn.reply))] if turn.reply is not None else [])]


def without(message: Message, items: list[Item], id: str) -> Message | None:
    """Return the message without the item `id`, or None if the message has no other item."""
    others = [item for item in items if item["id"] != id]
    if not others:
        return None
    left: Message = {**message, ITEM_IDS: [item["id"] for item in others]}
    gone = next((item for item in items if item["id"] == id), None)
    match gone["type"] if gone is not None else None:
        case "reasoning":
            del left["reasoning_content"]
        case "message":
            left["content"] = ""
        case "function_call" if gone is not None:
            left["tool_calls"] = [call for call in left["tool_calls"] if call["id"] != gone["call_id"]]
            if not left["tool_calls"]:
                del left["tool_calls"]
    return left
