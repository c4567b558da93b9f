"""Spans of requests, exported to memory, and the conditions under which they are exported."""

import builtins
import gzip
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from baton.api.config import Config, ConfigError
from baton.api.telemetry.otel import RequestSpans
from baton.api.telemetry.spans import INSTALL, open_spans
from tests.api.fake_ring import Served, read_events, serving
from tests.api.server_process import ServerProcess

pytestmark = pytest.mark.anyio

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PROMPT: dict[str, Any] = {"prompt": "hi", "max_tokens": 3}


@asynccontextmanager
async def spanning(**options: Any) -> AsyncIterator[tuple[Served, InMemorySpanExporter]]:
    exporter = InMemorySpanExporter()
    async with serving(**options) as served:
        served.server.spans = RequestSpans("fake", SimpleSpanProcessor(exporter))
        yield served, exporter
        served.server.spans.close()


def only(exporter: InMemorySpanExporter) -> ReadableSpan:
    [span] = exporter.get_finished_spans()
    return span


async def test_a_request_is_one_span_below_the_clients() -> None:
    async with spanning() as (served, exporter):
        served.ring.cached = 2
        headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
        status, answer = await served.post(
            "/v1/completions", PROMPT | {"temperature": 0.5, "top_p": 0.9}, headers=headers
        )
        assert status == 200
        span = only(exporter)
    assert (span.name, span.kind, span.status.status_code) == (
        "text_completion fake", SpanKind.SERVER, StatusCode.UNSET,
    )  # fmt: skip
    assert span.context is not None and span.parent is not None
    assert f"{span.context.trace_id:032x}" == TRACE_ID == f"{span.parent.trace_id:032x}"
    assert f"{span.parent.span_id:016x}" == PARENT_ID
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "fake",
        "gen_ai.response.id": answer["id"],
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "gen_ai.response.finish_reasons": ("length",),
        "http.route": "/v1/completions",
        "server.address": "127.0.0.1",
    }
    assert span.attributes is not None and expected.items() <= dict(span.attributes).items()
    assert [event.name for event in span.events] == ["queued", "admitted", "first_token"]
    assert span.start_time is not None and span.end_time is not None
    times = [span.start_time, *(event.timestamp for event in span.events), span.end_time]
    assert times == sorted(times)
    assert span.resource.attributes["service.name"] == "baton"


async def test_a_trace_that_begins_here_has_the_id_that_the_client_gets() -> None:
    async with spanning() as (served, exporter):
        async with served.client.post("/v1/completions", json=PROMPT) as response:
            trace_id = response.headers["x-trace-id"]
        span = only(exporter)
    assert span.parent is None and span.context is not None
    assert f"{span.context.trace_id:032x}" == trace_id


async def test_a_client_that_does_not_sample_gets_no_span() -> None:
    async with spanning() as (served, exporter):
        headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"}
        assert (await served.post("/v1/completions", PROMPT, headers=headers))[0] == 200
        assert exporter.get_finished_spans() == ()


async def test_choices_share_a_span_and_neither_text_is_in_it() -> None:
    async with spanning() as (served, exporter):
        await served.post("/v1/completions", PROMPT | {"prompt": "secret words", "n": 3})
        span = only(exporter)
    assert span.attributes is not None
    assert span.attributes["gen_ai.request.choice.count"] == 3
    assert span.attributes["gen_ai.usage.output_tokens"] == 9
    assert "secret" not in span.to_json() and served.ring.reply not in span.to_json()


async def test_a_refused_request_is_an_error() -> None:
    async with spanning() as (served, exporter):
        served.ring.refusal = "queue_full"
        assert (await served.post("/v1/completions", PROMPT))[0] == 429
        span = only(exporter)
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes is not None and span.attributes["error.type"] == "queue_full"
    assert [event.name for event in span.events] == ["queued"]


async def test_a_stream_that_fails_is_an_error() -> None:
    async with spanning() as (served, exporter):
        served.ring.failing = True
        async with served.client.post("/v1/completions", json=PROMPT | {"stream": True}) as response:
            await response.read()
        span = only(exporter)
    assert span.status.status_code is StatusCode.ERROR


@pytest.mark.parametrize("background", [False, True])
async def test_responses_and_their_streams_have_one_span_too(background: bool) -> None:
    async with spanning() as (served, exporter):
        body = {"input": "hi", "max_output_tokens": 3, "stream": True, "background": background}
        headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
        async with served.client.post("/v1/responses", json=body, headers=headers) as response:
            assert response.status == 200
            await response.read()
        span = only(exporter)
    assert span.name == "chat fake" and span.context is not None
    assert f"{span.context.trace_id:032x}" == TRACE_ID


async def test_the_websockets_responses_are_spans_of_its_trace() -> None:
    async with spanning() as (served, exporter):
        headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
        async with served.client.ws_connect("/v1/responses", headers=headers) as socket:
            for _ in range(2):
                await socket.send_json({"type": "response.create", "input": "hi", "max_output_tokens": 2})
                while (await socket.receive_json())["type"] not in ("response.completed", "response.incomplete"):
                    pass
        spans = exporter.get_finished_spans()
    assert len(spans) == 2
    assert {f"{span.context.trace_id:032x}" for span in spans if span.context is not None} == {TRACE_ID}


async def test_a_turn_names_its_session() -> None:
    async with spanning() as (served, exporter):
        _, session = await served.post("/v1/sessions", {})
        await served.post(f"/v1/sessions/{session['id']}/turns", {"text": "hi", "max_tokens": 2})
        span = only(exporter)
    assert span.attributes is not None and span.attributes["gen_ai.conversation.id"] == session["id"]
    assert span.attributes["http.route"] == "/v1/sessions/{session}/turns"


async def test_options_and_variables_that_enable_spans() -> None:
    assert open_spans(Config(), "m", {}) is None
    assert open_spans(Config(otel=True), "m", {"OTEL_SDK_DISABLED": "true"}) is None
    for config, environment in (
        (Config(otel=True), {}),
        (Config(), {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}),
        (Config(), {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:9"}),
    ):
        spans = open_spans(config, "m", environment)
        assert isinstance(spans, RequestSpans)
        spans.close()


async def test_without_the_extra_the_option_is_refused_and_a_variable_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    ordinary = builtins.__import__

    def absent(name: str, *more: Any) -> Any:
        if name == "baton.api.telemetry.otel":
            raise ModuleNotFoundError("No module named 'opentelemetry'")
        return ordinary(name, *more)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ConfigError, match="--otel: No module named 'opentelemetry'") as refused:
        open_spans(Config(otel=True), "m", {})
    assert INSTALL in str(refused.value)
    assert open_spans(Config(), "m", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}) is None


async def test_streams_are_spans_like_answers() -> None:
    async with spanning() as (served, exporter):
        async with served.client.post("/v1/completions", json=PROMPT | {"stream": True}) as response:
            await read_events(response)
        span = only(exporter)
    assert span.attributes is not None and span.attributes["gen_ai.usage.output_tokens"] == 3


class Collector(ThreadingHTTPServer):
    """An OpenTelemetry collector that stores everything posted to it."""

    def __init__(self) -> None:
        self.got: list[tuple[str, bytes]] = []
        super().__init__(("127.0.0.1", 0), Receiver)


class Receiver(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append((self.path, gzip.decompress(body) if self.headers["Content-Encoding"] else body))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


def test_a_server_exports_its_last_spans_before_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with Collector() as collector:
        serving = threading.Thread(target=collector.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        try:
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
            monkeypatch.setenv("OTEL_SERVICE_NAME", "a test")
            with ServerProcess(("tests.api.fake_server", "quick")) as server:
                assert server.post("/v1/completions", PROMPT)[0] == 200
        finally:
            collector.shutdown()
            serving.join()
    [(path, body)] = collector.got
    assert path == "/v1/traces"
    [sent] = ExportTraceServiceRequest.FromString(body).resource_spans
    assert [a.value.string_value for a in sent.resource.attributes if a.key == "service.name"] == ["a test"]
    assert [span.name for span in sent.scope_spans[0].spans] == ["text_completion quick"]


def test_a_missing_collector_does_not_delay_the_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    with ServerProcess(("tests.api.fake_server", "quick")) as server:
        assert server.post("/v1/completions", PROMPT)[0] == 200
        began = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - began < 15
