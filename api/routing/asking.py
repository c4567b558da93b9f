"""The reading of a request, before the router passes it on."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from baton.api.events.frames import name_of
from baton.api.routing.prompts import Chain, Raw, read_chain

# The last part of a path that holds the id of a session or response, and the part before it.
HOLDERS = ("sessions", "conversations", "responses")
OPENING = ("/v1/sessions", "/v1/conversations", "/open_session")
COUNTING = ("/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/responses/input_tokens")
"""Paths that do not compute the prompt in their bodies."""
NOT_IDS = ("input_tokens",)  # POST /v1/responses/input_tokens counts the tokens of a body
FIELDS = ("previous_response_id", "conversation", "session", "session_id", "session_params")
"""The fields of a body that name a session or response, or hold an object with its id."""


@dataclass(frozen=True, slots=True)
class Asking:
    """A request as a router sees it."""

    chain: Chain  # its prompt
    bound: str  # the name of the session or response that it is about, or continues; empty: any engine can answer it
    opens: bool = False  # whether it opens a session, so that further requests will be bound to its engine


def read_asking(path: str, body: bytes, owner: bytes) -> Asking:
    """Read a request. A body that is no JSON object is left to the engine, which will refuse it.

    owner: the digest of the API key, or b"" without keys.
    """
    fields: Mapping[str, Raw] = {}
    if body.lstrip()[:1] == b"{":
        try:
            fields = msgspec.json.decode(body, type=dict[str, Raw])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            fields = {}
    id = _id_in_path(path) or _id_in_body(fields)
    chain = read_chain({} if path in COUNTING else fields, owner)
    return Asking(chain, name_of(owner, id) if id else "", path in OPENING and not id)


def _id_in_path(path: str) -> str:
    """Return the id of the session or response that a path names; empty if there is none."""
    parts = path.strip("/").split("/")
    for holder, id in pairwise(parts):
        if holder in HOLDERS and id not in NOT_IDS:
            return id
    return ""


def _id_in_body(fields: Mapping[str, Raw]) -> str:
    """Return the id of the session or response that a body names; empty if there is none."""
    for name in FIELDS:
        value = fields.get(name)
        if value is None:
            continue
        try:
            known = msgspec.json.decode(value)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue
        id = known.get("id") if isinstance(known, dict) else known
        if isinstance(id, str):
            return id
    return ""
