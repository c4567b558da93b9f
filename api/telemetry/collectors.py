"""Metrics of the ring, sessions, stored responses and connections, which are read at each scrape."""

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Protocol, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.actors.requests import Tier
from baton.actors.runtime.timings import BOUNDS, Histogram, Timings

PREFIX = "baton:"
# Names of metrics that dashboards for other engines expect, by the ring's names.
FAMILIAR = {"running": "num_requests_running", "waiting": "num_requests_waiting"}
# Counters of the ring that are not exported, because `Metrics` exports the api's counters of the same names.
COUNTED_BY_API = frozenset(
    {"prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits", "request_success"}
)
# Counters of the ring that are exported before their first count: an alert about an increase would miss the first one.
FROM_ZERO = {"restarts": 0, "lease_violations": 0, "failed_writes": 0, "damaged_files": 0}
# Name of the label for each metric of the ring that is a dictionary; "kind" for all others.
LABELS = {
    "slots": "place",
    "pages": "use",
    "mailbox_depth": "actor",
    "actor_busy_seconds": "actor",
    "lease_moves": "kind",
    "drafts_accepted": "drafter",
    "drafts_rejected": "drafter",
}
HELP = {
    "drafts_accepted": "Drafts that were right, each of which saved a step of its row.",
    "drafts_rejected": "Drafts that were wrong.",
    "mailbox_wait_seconds": "Time from sending a message to its delivery.",
    "relay_overhead_seconds": "Time from the end of a step to the start of the next one that shares a row with it.",
    "actor_busy_seconds": "Time that an actor has spent working on the event loop.",
    "device_busy_seconds": "Time that the device has spent in steps.",
    "steps": "Steps that the device has run.",
    "restarts": "Restarts of the four actors after an internal error.",
    "lease_violations": "Moves of a slot that the ledger does not allow, each of which is an internal error.",
}


class RingFigures(Protocol):
    """The interface of the relay's counters and measurements."""

    def counters(self) -> dict[str, int]: ...

    def gauges(self) -> dict[str, float | Mapping[str, float]]: ...

    def lease_moves(self) -> Mapping[str, int]: ...

    @property
    def timings(self) -> Timings: ...


class SessionFigures(Protocol):
    """The interface of the session store for metrics: numbers of sessions, and bytes of their logs."""

    def __len__(self) -> int: ...

    def tiers(self) -> Counter[Tier]:
        """Count sessions by the tier of their state."""
        ...

    @property
    def suspended(self) -> int: ...

    @property
    def log_bytes(self) -> int: ...

    @property
    def memory_bytes(self) -> int: ...


class ResponseFigures(Protocol):
    """The interface of the response store for metrics: numbers of responses, and their size."""

    bytes: int  # size of the responses that have ended, and of the turns that they refer to

    def __len__(self) -> int: ...

    @property
    def running(self) -> int: ...


class ConnectionFigures(Protocol):
    """The interface of the connections for metrics: their numbers, and their bytes in flight."""

    held: int  # bytes in flight
    ended: Counter[str]  # how many connections the server ended, by reason

    def __len__(self) -> int: ...


class PeerFigures(Protocol):
    """The interface of the links to other engines for metrics."""

    outcomes: Counter[tuple[str, str]]  # states that were asked for or lent, by (engine, outcome)
    read_bytes: Counter[str]  # bytes of states read from each engine
    read_seconds: dict[str, float]  # seconds that reading them took

    @property
    def links(self) -> Mapping[str, object]: ...


class RingCollector(Collector):
    """A collector of the ring's counters, gauges and timings as metric families."""

    def __init__(self, model: str, ring: RingFigures) -> None:
        self._model = model
        self._ring = ring

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        by_kind: dict[str, dict[str, float]] = {}
        for name, count in (FROM_ZERO | self._ring.counters()).items():
            name, _, kind = name.partition(":")
            if kind:
                by_kind.setdefault(name, {})[kind] = count
            elif name not in COUNTED_BY_API:
                yield self._family(CounterMetricFamily, name, count)
        for name, counts in by_kind.items():
            yield self._family(CounterMetricFamily, name, counts)
        yield self._family(CounterMetricFamily, "lease_moves", self._ring.lease_moves())
        for name, gauge in self._ring.gauges().items():
            yield self._family(GaugeMetricFamily, name, gauge)
        yield from self._timings(self._ring.timings)

    def _timings(self, timings: Timings) -> Iterable[Metric]:
        waits: dict[tuple[str, ...], Histogram] = {(actor,): waited for actor, waited in timings.waits.items()}
        yield self._histogram("mailbox_wait_seconds", ("actor",), waits)
        yield self._histogram("relay_overhead_seconds", (), {(): timings.overhead})
        yield self._family(CounterMetricFamily, "actor_busy_seconds", dict(timings.busy))
        yield self._family(CounterMetricFamily, "device_busy_seconds", timings.device_busy)
        yield self._family(CounterMetricFamily, "steps", timings.steps)

    def _histogram(self, name: str, labels: tuple[str, ...], timings: Mapping[tuple[str, ...], Histogram]) -> Metric:
        """Return one histogram family. timings: histograms by the values of the labels."""
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
        """Return one family. If `value` is a mapping, its keys become the values of a label."""
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


class SessionCollector(Collector):
    """A collector of metrics of sessions: their number, the tiers of their states, the size of their logs."""

    def __init__(self, model: str, sessions: SessionFigures) -> None:
        self._model = model
        self._sessions = sessions

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        sessions = self._sessions
        yield gauge(self._model, "sessions", "Open sessions.", len(sessions))
        suspended = "Sessions that are suspended: not used since their state left its slot."
        yield gauge(self._model, "sessions_suspended", suspended, sessions.suspended)
        yield gauge(self._model, "session_log_bytes", "Bytes of session logs on disk.", sessions.log_bytes)
        yield gauge(self._model, "session_memory_bytes", "Bytes of session logs in memory.", sessions.memory_bytes)
        where = GaugeMetricFamily(
            f"{PREFIX}session_states", "Sessions by the tier that holds their state.", labels=["model_name", "tier"]
        )
        tiers = sessions.tiers()
        for tier in get_args(Tier):
            where.add_metric([self._model, tier], tiers[tier])
        yield where


class ResponseCollector(Collector):
    """A collector of metrics of stored responses."""

    def __init__(self, model: str, responses: ResponseFigures) -> None:
        self._model = model
        self._responses = responses

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        for name, help, value in (
            ("responses_stored", "Stored responses, including running ones.", len(self._responses)),
            ("responses_running", "Stored responses that have not ended.", self._responses.running),
            ("responses_bytes", "Bytes of stored responses that have ended.", self._responses.bytes),
        ):
            yield gauge(self._model, name, help, value)


class ConnectionCollector(Collector):
    """A collector of metrics of connections."""

    def __init__(self, model: str, connections: ConnectionFigures) -> None:
        self._model = model
        self._connections = connections

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        connections = self._connections
        yield gauge(self._model, "connections", "Open connections.", len(connections))
        yield gauge(
            self._model,
            "bytes_in_flight",
            "Bytes in flight: received but not processed, or sent but not read.",
            connections.held,
        )
        ended = CounterMetricFamily(
            f"{PREFIX}connections_ended",
            "Connections that the server ended or refused, by reason.",
            labels=["model_name", "why"],
        )
        for why, count in connections.ended.items():
            ended.add_metric([self._model, why], count)
        yield ended


class PeerCollector(Collector):
    """A collector of metrics of the links to other engines."""

    def __init__(self, model: str, peers: PeerFigures) -> None:
        self._model = model
        self._peers = peers

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        peers = self._peers
        yield gauge(self._model, "peer_links", "Links to other engines.", len(peers.links))
        states = CounterMetricFamily(
            f"{PREFIX}peer_states",
            "States that were asked of a peer or lent to it, by outcome.",
            labels=["model_name", "peer", "outcome"],
        )
        for (engine, outcome), count in list(peers.outcomes.items()):
            states.add_metric([self._model, engine, outcome], count)
        yield states
        for name, help, values in (
            ("peer_read_bytes", "Bytes of states read from a peer.", peers.read_bytes),
            ("peer_read_seconds", "Time that reading states from a peer took.", peers.read_seconds),
        ):
            family = CounterMetricFamily(PREFIX + name, help, labels=["model_name", "peer"])
            for engine, value in list(values.items()):
                family.add_metric([self._model, engine], value)
            yield family


def gauge(model: str, name: str, help: str, value: float) -> Metric:
    """Return a gauge with one value."""
    family = GaugeMetricFamily(PREFIX + name, help, labels=["model_name"])
    family.add_metric([model], value)
    return family
