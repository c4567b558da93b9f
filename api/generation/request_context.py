"""The W3C trace context of an HTTP request: the client's, or a new one."""

import re
import secrets
from collections.abc import Sequence

from msgspec import Struct

TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
SAMPLED = 1


class TraceContext(Struct, frozen=True):
    """The trace of an HTTP request, as W3C's trace context has it. Ids are lower-case hex.

    parent_id: the client's span; empty in a trace that begins here. flags: the client's trace flags.
    """

    trace_id: str
    parent_id: str = ""
    flags: int = SAMPLED


class RequestContext(Struct, frozen=True):
    """Who asked for a generation: the trace and the route of the HTTP request, and the address that it went to.

    conversation: the session that the route names. flow: with whose requests it takes turns for rows and prompts; a
    call is a flow of its own unless it says.
    """

    trace: TraceContext
    route: str
    address: str
    port: int
    conversation: str = ""
    flow: str = ""


def read_trace_context(headers: Sequence[str]) -> TraceContext:
    """From the `traceparent` headers. As the standard wants it, one that is not valid counts as none."""
    match = TRACEPARENT.fullmatch(headers[0].strip(" \t")) if len(headers) == 1 else None
    if match is None:
        return new_trace_context()
    version, trace_id, parent_id, flags, more = match.groups()
    if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(parent_id, 16):
        return new_trace_context()
    return TraceContext(trace_id, parent_id, int(flags, 16))


def new_trace_context() -> TraceContext:
    return TraceContext(f"{secrets.randbits(128) or 1:032x}")
