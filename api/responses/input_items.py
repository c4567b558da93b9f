"""GET /v1/responses/{id}/input_items: what the model was given, as OpenAI lists it."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from api import errors
from api.parsing import read_number
from api.responses.events import item_id
from api.responses.store import StoredResponse, chain
from api.sessions.log import turns

Item: TypeAlias = dict[str, Any]
MAX_LIMIT = 100
DEFAULT = 20


def list_items(response: StoredResponse, query: Mapping[str, str]) -> dict[str, Any]:
    """One page. Raises 400."""
    items = input_items(response)
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
    after = query.get("after")
    if after is None:
        return 0
    place = next((index for index, item in enumerate(items) if item["id"] == after), None)
    if place is None:
        raise errors.bad_request(f"the response has no input item {after!r}", "after", "invalid_value")
    return place + 1


def input_items(response: StoredResponse) -> list[Item]:
    """Oldest first: what it goes on from, then its own input."""
    earlier = chain(response)
    first = earlier[0]
    items = [item for turn in turns(first.base) for item in said(turn.request, turn.messages or (), turn.answer)]
    for previous in earlier[:-1]:
        answer = None if previous.transcript.prefill_only else previous.transcript.text
        items += said(previous.id, previous.messages, answer)
    return items + said(response.id, response.messages, None)


def said(request: str, messages: Sequence[Mapping[str, Any]], answer: str | None) -> list[Item]:
    """What was said to the model, and what it answered, in one response or turn."""
    id = item_id(request)
    items = [item(f"{id}-{index}", message) for index, message in enumerate(messages)]
    return items if answer is None else [*items, item(id, {"role": "assistant", "content": answer})]


def item(id: str, message: Mapping[str, Any]) -> Item:
    answered = message["role"] == "assistant"
    part: dict[str, Any] = {"type": "output_text" if answered else "input_text", "text": message["content"]}
    if answered:
        part |= {"annotations": [], "logprobs": []}
    return {
        "id": id,
        "type": "message",
        "role": message["role"],
        "status": "completed",
        "content": [part],
    }
