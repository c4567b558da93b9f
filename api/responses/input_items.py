"""GET /v1/responses/{id}/input_items: the items that the model read before it answered, in pages."""

from collections.abc import Mapping, Sequence
from typing import Any

from baton.api import errors
from baton.api.parsing import read_number
from baton.api.responses.events import item_id
from baton.api.responses.items import Item, items_of
from baton.api.responses.store import StoredResponse, chain
from baton.api.sessions.log import ITEM_IDS, Turn, turns

MAX_LIMIT = 100  # maximum items on a page
DEFAULT = 20


def list_items(response: StoredResponse, query: Mapping[str, str]) -> dict[str, Any]:
    """Return one page of a response's input items. Raises ApiError 400."""
    return page_of(input_items(response), query)


def page_of(items: list[Item], query: Mapping[str, str]) -> dict[str, Any]:
    """Return the page of items that the query asks for. items: oldest first. Raises ApiError 400."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise errors.bad_request("order must be asc or desc", "order", "invalid_value")
    if order == "desc":
        items.reverse()
    limit, start = read_limit(query), read_start(items, query)
    page = items[start : start + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + limit < len(items),
    }


def read_limit(query: Mapping[str, str]) -> int:
    what = f"a number from 1 to {MAX_LIMIT}"
    limit = read_number(query, "limit", what)
    if limit is not None and not 1 <= limit <= MAX_LIMIT:
        raise errors.bad_request(f"limit must be {what}", "limit", "invalid_value")
    return DEFAULT if limit is None else limit


def read_start(items: Sequence[Item], query: Mapping[str, str]) -> int:
    """Return the index of the page's first item, which follows the item named by `after`. Raises ApiError 400."""
    after = query.get("after")
    if after is None:
        return 0
    place = next((index for index, item in enumerate(items) if item["id"] == after), None)
    if place is None:
        raise errors.bad_request(f"there is no item {after!r}", "after", "invalid_value")
    return place + 1


def input_items(response: StoredResponse) -> list[Item]:
    """Return the items that the response continues, then the items of its own input, oldest first."""
    earlier = chain(response)
    items = [item for turn in turns(earlier[0].base) for item in turn_items(turn)]
    for previous in earlier[:-1]:
        items += [*flat_items(previous.id, previous.messages), *previous.body["output"]]
    return items + flat_items(response.id, response.messages)


def turn_items(turn: Turn) -> list[Item]:
    answer = [] if turn.reply is None else items_of(item_id(turn.request), turn.reply)
    return [*flat_items(turn.request, turn.messages or ()), *answer]


def flat_items(request: str, messages: Sequence[Mapping[str, Any]]) -> list[Item]:
    """Return the items of messages as one list. request: id of the response or turn that has the messages."""
    return [item for items in items_by_message(request, messages) for item in items]


def items_by_message(request: str, messages: Sequence[Mapping[str, Any]]) -> list[list[Item]]:
    """Return the items of each message. Item ids are stored in the message, or derive from the index of the message."""
    id = item_id(request)
    made = [items_of(f"{id}-{index}", message) for index, message in enumerate(messages)]
    for message, items in zip(messages, made, strict=True):
        for item, own in zip(items, message.get(ITEM_IDS, ()), strict=False):
            item["id"] = own
    return made
