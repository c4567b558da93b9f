"""Prometheus metrics under the names that dashboards for other engines know, in a registry of their own."""

from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from actors.runtime.timings import BOUNDS, Timings
from actors.runtime.timings import Histogram as Timing
from api.generation.reader import Member

PREFIX = "baton:"
LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
FAMILIAR = {"running": "num_requests_running", "waiting": "num_requests_waiting"}
OWN = frozenset({"prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits", "request_success"})
LABELS = {
    "slots": "place",
    "pages": "use",
    "mailbox_depth": "actor",
    "actor_busy_seconds": "actor",
    "lease_moves": "kind",
}
HELP = {
    "mailbox_wait_seconds": "From the sending of a message to its delivery.",
    "relay_overhead_seconds": "From the end of a step to the beginning of the next that has a row in common with it.",
    "actor_busy_seconds": "Time that an actor has worked on the event loop.",
    "device_busy_seconds": "Time that the device has spent in steps.",
    "steps": "Steps of the device.",
}


class Ring(Protocol):
    """What is asked of the relay."""

    def counters(self) -> dict[str, int]: ...

    def gauges(self) -> dict[str, float | dict[str, int]]: ...

    def lease_moves(self) -> Mapping[str, int]: ...

    @property
    def timings(self) -> Timings: ...


class Metrics:
    """The api's own figures; `watch` adds the ring's. Observes the gateway: times are in seconds."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model

        def histogram(name: str, help: str, buckets: Iterable[float]) -> Histogram:
            family = Histogram(PREFIX + name, help, ["model_name"], buckets=tuple(buckets), registry=self.registry)
            return family.labels(model)

        def counter(name: str, help: str) -> Counter:
            return Counter(PREFIX + name, help, ["model_name"], registry=self.registry).labels(model)

        self._first_token = histogram("time_to_first_token_seconds", "From arrival to the first token.", LONG)
        self._inter_token = histogram("inter_token_latency_seconds", "Between tokens of a request.", SHORT)
        self._e2e = histogram("e2e_request_latency_seconds", "From arrival to the end of the answer.", LONG)
        self._queue = histogram("request_queue_time_seconds", "From arrival to admission.", LONG)
        self._prompt = counter("prompt_tokens", "Prompt tokens of ended requests.")
        self._generated = counter("generation_tokens", "Tokens generated.")
        self._queries = counter("prefix_cache_queries", "Prompt tokens that were looked up in the cache.")
        self._hits = counter("prefix_cache_hits", "Prompt tokens that came out of the cache.")
        self._requests = Counter(
            f"{PREFIX}request_success", "Ended requests.", ["model_name", "finished_reason"], registry=self.registry
        )
        self._http = Counter(f"{PREFIX}http_requests", "HTTP answers.", ["path", "status"], registry=self.registry)

    def first_tokens(self, waited: float, count: int) -> None:
        self._first_token.observe(waited)
        self._generated.inc(count)

    def tokens(self, gap: float, count: int) -> None:
        self._generated.inc(count)
        for _ in range(count):
            self._inter_token.observe(gap)

    def ended(self, member: Member, at: float) -> None:
        """A request of the ring has ended, at `at` on the gateway's clock."""
        self._e2e.observe(at - member.submitted)
        if member.admitted is not None:
            self._queue.observe(member.admitted - member.submitted)
        self._prompt.inc(member.prompt_tokens)
        self._queries.inc(member.prompt_tokens)
        self._hits.inc(member.cached_tokens)
        self._requests.labels(self._model, member.finish_reason or "abort").inc()

    def answered(self, path: str, status: int) -> None:
        self._http.labels(path, str(status)).inc()

    def watch(self, ring: Ring) -> None:
        """Expose the ring's figures too, read at each scrape."""
        self.registry.register(RingCollector(self._model, ring))

    def render(self) -> bytes:
        return generate_latest(self.registry)


class RingCollector(Collector):
    """Turns the ring's dictionaries into metric families."""

    def __init__(self, model: str, ring: Ring) -> None:
        self._model = model
        self._ring = ring

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        for name, count in self._ring.counters().items():
            if name not in OWN:
                yield self._family(CounterMetricFamily, name, count)
        yield self._family(CounterMetricFamily, "lease_moves", self._ring.lease_moves())
        for name, gauge in self._ring.gauges().items():
            yield self._family(GaugeMetricFamily, name, gauge)
        yield from self._timings(self._ring.timings)

    def _timings(self, timings: Timings) -> Iterable[Metric]:
        waits: dict[tuple[str, ...], Timing] = {(actor,): waited for actor, waited in timings.waits.items()}
        yield self._histogram("mailbox_wait_seconds", ("actor",), waits)
        yield self._histogram("relay_overhead_seconds", (), {(): timings.overhead})
        yield self._family(CounterMetricFamily, "actor_busy_seconds", dict(timings.busy))
        yield self._family(CounterMetricFamily, "device_busy_seconds", timings.device_busy)
        yield self._family(CounterMetricFamily, "steps", timings.steps)

    def _histogram(self, name: str, labels: tuple[str, ...], timings: Mapping[tuple[str, ...], Timing]) -> Metric:
        """timings: by the values of the labels."""
        family = HistogramMetricFamily(PREFIX + name, HELP[name], labels=["model_name", *labels])
        for values, timing in timings.items():
            counts = zip([*map(str, BOUNDS), "+Inf"], accumulate(timing.counts), strict=True)
            family.add_metric([self._model, *values], list(counts), timing.total)
        return family

    def _family(
        self,
        kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
        key: str,
        value: float | Mapping[str, float],
    ) -> Metric:
        """One family; a mapping's keys become the values of a label."""
        name = FAMILIAR.get(key, key)
        labelled = isinstance(value, Mapping)
        labels = ["model_name", *([LABELS.get(key, "kind")] if labelled else [])]
        family = kind(PREFIX + name, HELP.get(name, name.replace("_", " ").capitalize() + "."), labels=labels)
        if isinstance(value, Mapping):
            for label, amount in value.items():
                family.add_metric([self._model, str(label)], amount)
        else:
            family.add_metric([self._model], value)
        return family
