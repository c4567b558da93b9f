"""Figures of the sessions, read at each scrape."""

from collections.abc import Iterable
from typing import get_args

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from actors.requests import Tier
from api.sessions.store import SessionStore
from api.telemetry.metrics import PREFIX


class SessionCollector(Collector):
    """How many there are, where their states are, and what their logs take on disk."""

    def __init__(self, model: str, sessions: SessionStore) -> None:
        self._model = model
        self._sessions = sessions

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        sessions = self._sessions
        yield self._gauge("sessions", "Sessions that are open.", len(sessions))
        yield self._gauge("sessions_suspended", "Sessions that were suspended and not used since.", sessions.suspended)
        yield self._gauge("session_log_bytes", "Logs of sessions on disk.", sessions.log_bytes)
        yield self._gauge("session_memory_bytes", "Logs of sessions in memory.", sessions.memory_bytes)
        where = GaugeMetricFamily(
            f"{PREFIX}session_states", "Sessions by where their state is.", labels=["model_name", "tier"]
        )
        tiers = sessions.tiers()
        for tier in get_args(Tier):
            where.add_metric([self._model, tier], tiers[tier])
        yield where

    def _gauge(self, name: str, help: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, help, labels=["model_name"])
        family.add_metric([self._model], value)
        return family
