"""Figures of the stored responses, read at each scrape."""

from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from api.responses.store import ResponseStore
from api.telemetry.metrics import PREFIX


class ResponseCollector(Collector):
    def __init__(self, model: str, responses: ResponseStore) -> None:
        self._model = model
        self._responses = responses

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        for name, help, value in (
            ("responses_stored", "Responses that can be fetched, running ones included.", len(self._responses)),
            ("responses_running", "Stored responses that have not ended.", self._responses.running),
            ("responses_bytes", "JSON of the responses that have ended.", self._responses.bytes),
        ):
            family = GaugeMetricFamily(PREFIX + name, help, labels=["model_name"])
            family.add_metric([self._model], value)
            yield family
