"""One OpenTelemetry span per request, following the GenAI semantic conventions.

This needs the extra `otel`. The usual OTEL_* variables set destination, sampling and the name of the service. A span
is made after its request has ended, from the times recorded in the generation.
"""

import random
import time
from collections.abc import Callable

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)
from opentelemetry.util.types import AttributeValue

from baton.api.generation.outputs import Generation
from baton.api.generation.request_context import RequestContext, TraceContext
from baton.api.version import VERSION

OPERATIONS = {
    "/v1/completions": "text_completion",
    "/generate": "text_completion",
    "/v1/embeddings": "embeddings",
}
"""OpenTelemetry's names of what routes do; others chat."""


def export_spans(model: str) -> "RequestSpans":
    """Return an exporter to the collector that the environment names."""
    return RequestSpans(model, BatchSpanProcessor(OTLPSpanExporter()))


class TraceIds(IdGenerator):
    """A generator of span ids. `RequestSpans` sets its trace id to the one that the ring and the log use already."""

    def __init__(self) -> None:
        self.trace_id = 0

    def generate_span_id(self) -> int:
        return random.getrandbits(64) or 1

    def generate_trace_id(self) -> int:
        return self.trace_id


class RequestSpans:
    """An exporter of the spans of ended requests."""

    def __init__(self, model: str, processor: SpanProcessor, clock: Callable[[], float] = time.monotonic) -> None:
        self._model = model
        self._clock = clock
        self._ids = TraceIds()
        own = Resource({"service.name": "baton", "service.version": VERSION})
        resource = own.merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, id_generator=self._ids, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("baton", VERSION)

    def record_end(self, generation: Generation, error: str | None) -> None:
        """Export the span of a generation. error: the code of the error that ended it, if any."""
        call = generation.call
        if call is None:
            return
        unix = time.time() - self._clock()  # add this to the monotonic clock to get Unix time

        def at(moment: float) -> int:
            return int((unix + moment) * 1e9)

        self._ids.trace_id = int(call.trace.trace_id, 16)
        operation = OPERATIONS.get(call.route, "chat")
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            context=parent_of(call.trace),
            kind=SpanKind.SERVER,
            attributes=describe(self._model, operation, call, generation),
            start_time=at(generation.created_at),
        )
        for name, moment in moments(generation):
            span.add_event(name, timestamp=at(moment))
        if error is not None:
            span.set_attribute("error.type", error)
            span.set_status(Status(StatusCode.ERROR))
        span.end(at(generation.created_at + generation.age))

    def close(self) -> None:
        """Export the remaining spans. This blocks until the collector has taken them."""
        self._provider.shutdown()


def parent_of(trace: TraceContext) -> Context:
    """Return a context with the client's span, or an empty one if the client sent none."""
    if not trace.parent_id:
        return Context()
    parent = SpanContext(int(trace.trace_id, 16), int(trace.parent_id, 16), True, TraceFlags(trace.flags))
    return set_span_in_context(NonRecordingSpan(parent), Context())


def moments(generation: Generation) -> list[tuple[str, float]]:
    """Return when the first of the generation's sequences was queued, was admitted, and got its first token."""
    members = generation.members
    reached = {
        "queued": [member.submitted_at for member in members],
        "admitted": [member.admitted_at for member in members if member.admitted_at is not None],
        "first_token": [member.first_token_at for member in members if member.first_token_at is not None],
    }
    return [(name, min(times)) for name, times in reached.items() if times]


def describe(model: str, operation: str, call: RequestContext, generation: Generation) -> dict[str, AttributeValue]:
    """Return the attributes of a span, without texts of prompts and answers. Counts are sums over all sequences."""
    members = generation.members
    request = members[0].request
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "baton",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": request.id,
        "gen_ai.output.type": "text",
        "gen_ai.request.choice.count": len(members),
        "gen_ai.request.max_tokens": request.stops.max_tokens,
        "gen_ai.request.temperature": request.sampling.temperature,
        "gen_ai.request.top_p": request.sampling.top_p,
        "gen_ai.request.top_k": request.sampling.top_k,
        "gen_ai.request.presence_penalty": request.sampling.presence_penalty,
        "gen_ai.request.frequency_penalty": request.sampling.frequency_penalty,
        "gen_ai.usage.input_tokens": sum(member.prompt_tokens for member in members),
        "gen_ai.usage.output_tokens": sum(member.completion_tokens for member in members),
        "gen_ai.usage.cache_read.input_tokens": sum(member.cached_tokens for member in members),
        "gen_ai.response.finish_reasons": [member.finish_reason or "unfinished" for member in members],
        "http.route": call.route,
        "server.address": call.address,
    }
    if call.port:
        attributes["server.port"] = call.port
    if call.conversation:
        attributes["gen_ai.conversation.id"] = call.conversation
    return attributes
