"""The parts of a request that decide which engine it goes to."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from baton.api.events.frames import name_of
from baton.api.routing.prompts import Chain, Raw, read_chain

# The parts of a path that are followed by the id of a session or response.
HOLDERS = ("sessions", "conversations", "responses")
OPENING = ("/v1/sessions", "/v1/conversations", "/open_session")
"""Paths that open a session."""
COUNTING = ("/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/responses/input_tokens")
"""Paths whose bodies have a prompt that the engine does not compute."""
NOT_IDS = ("input_tokens",)  # in /v1/responses/input_tokens this part is not an id
FIELDS = ("previous_response_id", "conversation", "session", "session_id", "session_params", "response_id")
"""The fields of a body that hold the id of a session or response, or an object with that id."""
REFERENCE = b'"item_reference"'  # the type of an input item that refers to an item of a stored response
FORK = "/fork"  # the end of the path that copies a session
NEW_IDS = {"/open_session": "session_id"}  # the field with the id of the new session; "id" in other paths


@dataclass(frozen=True, slots=True)
class Asking:
    """The parts of a request that a router reads."""

    chain: Chain  # the request's prompt
    bound: str  # the name of the session or response that it concerns or continues; empty: any engine can answer it
    opens: bool = False  # whether the request opens a session, to whose engine further requests will be bound
    new_id: str = ""  # the id that the client gives a new session; empty: the engine chooses one
    new_name: str = ""  # the name (`name_of`) of a session with `new_id`


def read_asking(path: str, body: bytes, owner: bytes) -> Asking:
    """Read a request. A body that is not a JSON object is left to the engine, which refuses it.

    owner: the digest of the API key, or b"" without keys.
    """
    fields: Mapping[str, Raw] = {}
    if body.lstrip()[:1] == b"{":
        try:
            fields = msgspec.json.decode(body, type=dict[str, Raw])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            fields = {}
    opens = path in OPENING
    id = "" if opens else _id_in_path(path) or _id_in(fields, FIELDS) or _referenced(fields)
    new_id = _id_in(fields, (NEW_IDS.get(path, "id"),)) if opens or path.endswith(FORK) else ""
    chain = read_chain({} if path in COUNTING else fields, owner)
    bound, new_name = (name_of(owner, each) if each else "" for each in (id, new_id))
    return Asking(chain, bound, opens, new_id, new_name)


def _id_in_path(path: str) -> str:
    """Return the id of the session or response in a path; empty if there is none."""
    parts = path.strip("/").split("/")
    for holder, id in pairwise(parts):
        if holder in HOLDERS and id not in NOT_IDS:
            return id
    return ""


def _referenced(fields: Mapping[str, Raw]) -> str:
    """Return the id of the response whose item is the last reference in the input; empty without references."""
    text = bytes(fields.get("input", b""))
    if b'"id"' not in text:
        return ""
    try:
        items = msgspec.json.decode(text, type=list[dict[str, Raw]])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""
    references = [item for item in items if item.keys() == {"id"} or bytes(item.get("type", b"")) == REFERENCE]
    id = _id_in(references[-1], ("id",)) if references else ""
    return "resp_" + id.partition("_")[2].partition(".")[0] if id else ""


def _id_in(fields: Mapping[str, Raw], names: Iterable[str]) -> str:
    """Return the id in the first of these fields that has one; empty if none has."""
    for name in names:
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
