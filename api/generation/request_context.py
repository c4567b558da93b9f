"""Facts about the HTTP request of a generation: its W3C trace context, route and flow."""

import re
import secrets
from collections.abc import Sequence

from msgspec import Struct

TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
SAMPLED = 1


class TraceContext(Struct, frozen=True):
    """The W3C trace context of an HTTP request. Ids are lower-case hex."""

    trace_id: str
    parent_id: str = ""  # id of the client's span; empty if the trace begins here
    flags: int = SAMPLED  # the client's trace flags


class RequestContext(Struct, frozen=True):
    """The facts about an HTTP request that its generation keeps."""

    trace: TraceContext
    route: str  # the path's pattern, such as /v1/sessions/{session}/turns
    address: str  # the host name from the Host header
    port: int
    conversation: str = ""  # id of the session in the path; empty without one
    flow: str = ""  # rows are shared fairly between flows; empty: this HTTP request is a flow of its own


def read_trace_context(headers: Sequence[str]) -> TraceContext:
    """Read the trace context from the `traceparent` headers. An invalid header starts a new trace, as W3C requires."""
    match = TRACEPARENT.fullmatch(headers[0].strip(" \t")) if len(headers) == 1 else None
    if match is None:
        return new_trace_context()
    version, trace_id, parent_id, flags, more = match.groups()
    if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(parent_id, 16):
        return new_trace_context()
    return TraceContext(trace_id, parent_id, int(flags, 16))


def new_trace_context() -> TraceContext:
    return TraceContext(f"{secrets.randbits(128) or 1:032x}")
