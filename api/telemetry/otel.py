"""One OpenTelemetry span for each request, under the names of the GenAI semantic conventions.

Needs the extra `otel`. Where spans go, how they are sampled and what the service is called is said by the usual
OTEL_* variables. A span is made when its request has ended, of the times that were noted on the way.
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

TEXT_COMPLETIONS = frozenset({"/v1/completions", "/generate"})


def export_spans(model: str) -> "RequestSpans":
    """To the collector that the environment names."""
    return RequestSpans(model, BatchSpanProcessor(OTLPSpanExporter()))


class TraceIds(IdGenerator):
    """The id of a trace that begins here is known already, in the ring and in the log."""

    def __init__(self) -> None:
        self.trace_id = 0

    def generate_span_id(self) -> int:
        return random.getrandbits(64) or 1

    def generate_trace_id(self) -> int:
        return self.trace_id


class RequestSpans:
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
        """error: the code of what its client got, or would have got, instead of an end."""
        call = generation.call
        if call is None:
            return
        unix = time.time() - self._clock()

        def at(moment: float) -> int:
            return int((unix + moment) * 1e9)

        self._ids.trace_id = int(call.trace.trace_id, 16)
        operation = "text_completion" if call.route in TEXT_COMPLETIONS else "chat"
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
        """Export what is left. Waits for the collector."""
        self._provider.shutdown()


def parent_of(trace: TraceContext) -> Context:
    """The client's span; an empty context where there is none."""
    if not trace.parent_id:
        return Context()
    parent = SpanContext(int(trace.trace_id, 16), int(trace.parent_id, 16), True, TraceFlags(trace.flags))
    return set_span_in_context(NonRecordingSpan(parent), Context())


def moments(generation: Generation) -> list[tuple[str, float]]:
    """When the first of its sequences got so far, of those that did."""
    members = generation.members
    reached = {
        "queued": [member.submitted_at for member in members],
        "admitted": [member.admitted_at for member in members if member.admitted_at is not None],
        "first_token": [member.first_token_at for member in members if member.first_token_at is not None],
    }
    return [(name, min(times)) for name, times in reached.items() if times]


def describe(model: str, operation: str, call: RequestContext, generation: Generation) -> dict[str, AttributeValue]:
    """Neither prompts nor answers. Counts are sums over the sequences, as in the log."""
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
