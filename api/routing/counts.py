"""The router's own metrics."""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily

from baton.api.routing.engines import EngineView

PREFIX = "baton:router_"
QUEUE_SECONDS = "queue_seconds"
PHASES = ("loading", "ready", "draining", "lost")


class RouterCounts:
    """The counters of a router, in a registry of its own."""

    def __init__(self, engines: Iterable[EngineView]) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, help: str, labels: Iterable[str] = ()) -> Counter:
            return Counter(PREFIX + name, help, tuple(labels), registry=self.registry)

        self._requests = counter("requests", "Requests that were sent to an engine.", ["engine"])
        self.retries = counter("retries", "Requests that were sent to another engine, because one did not answer.")
        self.continued = counter("continued_streams", "Streams that another engine has continued.")
        self.interrupted = counter("interrupted_streams", "Streams that ended with an error, because an engine failed.")
        self.registry.register(EngineCounts(engines))

    def request(self, view: EngineView) -> None:
        """Count a request that is sent to an engine."""
        view.requests += 1
        self._requests.labels(view.name or view.url).inc()


class EngineCounts:
    """A collector of the number of engines in each phase, and of the queue of each engine that is not lost."""

    def __init__(self, engines: Iterable[EngineView]) -> None:
        self._engines = engines

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(PREFIX + "engines", "Engines by phase.", labels=["phase"])
        phases = [view.phase for view in self._engines]
        for phase in PHASES:
            family.add_metric([phase], phases.count(phase))
        yield family
        waits = "Seconds that a further request waits, for computation or for a row."
        queues = GaugeMetricFamily(PREFIX + QUEUE_SECONDS, waits, labels=["engine"])
        for view in self._engines:
            if view.phase != "lost":
                queues.add_metric([view.name], view.load.queue_seconds)
        yield queues
