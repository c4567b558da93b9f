"""Prometheus metrics in their own registry, with the names that dashboards for other engines expect."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from baton.api.generation.outputs import Member
from baton.api.telemetry.collectors import (
    PREFIX,
    ConnectionCollector,
    ConnectionFigures,
    PeerCollector,
    PeerFigures,
    ResponseCollector,
    ResponseFigures,
    RingCollector,
    RingFigures,
    SessionCollector,
    SessionFigures,
)

# Buckets of histograms in seconds: LONG for whole requests, SHORT for single tokens.
LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    """The metrics that the api records. The `watch` methods add metrics read at each scrape. Times are in seconds."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model

        def histogram(name: str, help: str, buckets: Iterable[float]) -> Histogram:
            family = Histogram(PREFIX + name, help, ["model_name"], buckets=tuple(buckets), registry=self.registry)
            return family.labels(model)

        def counter(name: str, help: str) -> Counter:
            return Counter(PREFIX + name, help, ["model_name"], registry=self.registry).labels(model)

        self._first_token = histogram("time_to_first_token_seconds", "Time from arrival to the first token.", LONG)
        self._inter_token = histogram("inter_token_latency_seconds", "Time between two tokens of a request.", SHORT)
        self._e2e = histogram("e2e_request_latency_seconds", "Time from arrival to the end of the answer.", LONG)
        self._queue = histogram("request_queue_time_seconds", "Time from arrival to admission.", LONG)
        self._prompt = counter("prompt_tokens", "Prompt tokens of ended requests.")
        self._generated = counter("generation_tokens", "Generated tokens.")
        self._queries = counter("prefix_cache_queries", "Prompt tokens looked up in the cache.")
        self._hits = counter("prefix_cache_hits", "Prompt tokens found in the cache.")
        self._requests = Counter(
            f"{PREFIX}request_success",
            "Ended requests by finish reason.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._http = Counter(
            f"{PREFIX}http_requests", "HTTP answers by path and status.", ["path", "status"], registry=self.registry
        )

    def first_tokens(self, waited: float, count: int) -> None:
        """Record a request's first tokens, after `waited` seconds."""
        self._first_token.observe(waited)
        self._generated.inc(count)

    def tokens(self, gap: float, count: int) -> None:
        """Record `count` further tokens, `gap` seconds apart."""
        self._generated.inc(count)
        for _ in range(count):
            self._inter_token.observe(gap)

    def record_end(self, member: Member, at: float) -> None:
        """Record the end of a request of the ring, at `at` on the gateway's clock."""
        self._e2e.observe(at - member.submitted_at)
        if member.admitted_at is not None:
            self._queue.observe(member.admitted_at - member.submitted_at)
        self._prompt.inc(member.prompt_tokens)
        self._queries.inc(member.prompt_tokens)
        self._hits.inc(member.cached_tokens)
        self._requests.labels(self._model, member.finish_reason or "abort").inc()

    def count_answer(self, path: str, status: int) -> None:
        self._http.labels(path, str(status)).inc()

    def watch_ring(self, ring: RingFigures) -> None:
        self.registry.register(RingCollector(self._model, ring))

    def watch_sessions(self, sessions: SessionFigures) -> None:
        self.registry.register(SessionCollector(self._model, sessions))

    def watch_responses(self, responses: ResponseFigures) -> None:
        self.registry.register(ResponseCollector(self._model, responses))

    def watch_connections(self, connections: ConnectionFigures) -> None:
        self.registry.register(ConnectionCollector(self._model, connections))

    def watch_peers(self, peers: PeerFigures) -> None:
        self.registry.register(PeerCollector(self._model, peers))

    def render(self) -> bytes:
        return generate_latest(self.registry)
