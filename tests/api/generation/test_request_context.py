"""The client's traceparent header: it reaches the ring, the log and the answer."""

import pytest
import structlog

from baton.api.generation.request_context import TraceContext, read_trace_context
from tests.api.fake_ring import serving
from tests.api.through_router import not_through_router

pytestmark = pytest.mark.anyio

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize("flags", ["00", "01", "ff"])
async def test_a_valid_header_is_adopted(flags: str) -> None:
    expected = TraceContext(TRACE_ID, PARENT_ID, int(flags, 16))
    assert read_trace_context([f"00-{TRACE_ID}-{PARENT_ID}-{flags}"]) == expected
    assert read_trace_context([f" 00-{TRACE_ID}-{PARENT_ID}-{flags}\t"]) == expected


async def test_a_later_version_may_have_more_fields() -> None:
    assert read_trace_context([f"cc-{TRACE_ID}-{PARENT_ID}-01-what-else"]).trace_id == TRACE_ID


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [""],
        ["00"],
        [f"00-{TRACE_ID}-{PARENT_ID}"],
        [f"00-{TRACE_ID}-{PARENT_ID}-01-more"],
        [f"ff-{TRACE_ID}-{PARENT_ID}-01"],
        [f"00-{TRACE_ID.upper()}-{PARENT_ID}-01"],
        [f"00-{'0' * 32}-{PARENT_ID}-01"],
        [f"00-{TRACE_ID}-{'0' * 16}-01"],
        [f"00-{TRACE_ID[1:]}-{PARENT_ID}-01"],
        [f"00-{TRACE_ID}-{PARENT_ID}-01"] * 2,
    ],
)
async def test_anything_else_begins_a_new_trace(headers: list[str]) -> None:
    first, second = read_trace_context(headers), read_trace_context(headers)
    assert first.trace_id != second.trace_id and TRACE_ID not in (first.trace_id, second.trace_id)
    assert len(first.trace_id) == 32 and int(first.trace_id, 16) and first.parent_id == ""


@not_through_router
async def test_the_ring_the_log_and_the_answer_have_the_clients_trace() -> None:
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
    merged = structlog.contextvars.merge_contextvars
    with structlog.testing.capture_logs(processors=[merged]) as logged:
        async with serving() as served:
            body = {"prompt": "hi", "max_tokens": 2, "n": 2}
            async with served.client.post("/v1/completions", json=body, headers=headers) as response:
                assert response.headers["x-trace-id"] == TRACE_ID
            async with served.client.post("/v1/completions", json={"prompt": 1}, headers=headers) as response:
                assert (response.status, response.headers["x-trace-id"]) == (400, TRACE_ID)
            async with served.client.get("/v1/models") as response:
                other = response.headers["x-trace-id"]
    assert [request.trace for request in served.ring.submitted()] == [TRACE_ID] * 2
    lines = [line for line in logged if line["event"] == "request"]
    assert [line["trace_id"] for line in lines] == [TRACE_ID, TRACE_ID, other]
    assert other != TRACE_ID
