"""The context that a response continues: a chain of stored responses, or the turns of a session."""

from typing import Any

from baton.api import errors
from baton.api.responses.request import ResponseRequest
from baton.api.responses.store import ResponseStore, StoredResponse, chain, no_previous
from baton.api.sessions.log import chat_messages
from baton.api.sessions.session import OpenTurn
from baton.api.sessions.store import SessionStore


def open_turn(sessions: SessionStore, owner: bytes, body: ResponseRequest, id: str) -> OpenTurn | None:
    """Begin the response's turn in its conversation. Return None without a conversation. Raises ApiError: 404, 409."""
    if body.session is None:
        return None
    session = sessions.find(owner, body.session)
    if session is None:
        raise errors.unknown_session(body.session, "conversation")
    session.check_idle()
    session.check_after(body.after)
    turn = session.begin(id)
    turn.prefill_only = not body.generate
    return turn


def find_previous(
    responses: ResponseStore, owner: bytes, id: str | None, latest: StoredResponse | None
) -> StoredResponse | None:
    """Return the response `id`, or None without an id. Raises ApiError 400 if it is unknown or still running.

    latest: the last response of a websocket's lane, which may be continued even if it is not stored.
    """
    if id is None:
        return None
    previous = latest if latest is not None and latest.id == id else responses.find(owner, id)
    if previous is None:
        raise no_previous(id)
    if previous.running:
        message = f"response {id!r} is still running"
        raise errors.bad_request(message, "previous_response_id", "previous_response_in_progress")
    return previous


def chain_messages(last: StoredResponse | None) -> list[dict[str, Any]]:
    """Return the messages, with answers but without instructions, of the chain up to `last`. Raises ApiError 400."""
    responses = chain(last)
    messages: list[dict[str, Any]] = []
    if last is not None and responses[0].body["conversation"] is not None:
        first = responses.pop(0)
        if first.turn is None:
            message = f"response {first.id!r} has no turn in its conversation to continue"
            raise errors.bad_request(message, "previous_response_id", "previous_response_not_found")
        messages = chat_messages(first.turn)
    for response in responses:
        messages += response.exchange
    return messages
