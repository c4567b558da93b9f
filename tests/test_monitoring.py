"""The Grafana board and the alerts in examples/monitoring: every metric and label that they use is exported."""

import json
import re
import socket
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.api.server_process import SERVE, ServerProcess

FOLDER = Path(__file__).parents[1] / "examples" / "monitoring"
GRAFANA = FOLDER / "grafana"
USE = re.compile(r"(baton:\w+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r"(\w+)\s*[=!]~?")
BY = re.compile(r"\bby\s*\(([^)]*)\)")
LEGEND = re.compile(r"\{\{(\w+)\}\}")
FROM_PROMETHEUS = {"instance", "job"}  # labels that Prometheus adds to each sample of a target


def board() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((GRAFANA / "boards" / "baton.json").read_text())
    return found


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def expressions() -> Iterator[tuple[str, str, set[str]]]:
    """Yield the title, the expression and the labels in the legend of each query of the board and of each alert."""
    for panel in board()["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"], set(LEGEND.findall(target["legendFormat"]))
    for rule in rules():
        yield rule["alert"], rule["expr"], set()


def labels_used(expression: str) -> dict[str, set[str]]:
    """Return the labels that an expression uses, by metric: in the matchers of a metric, and in any `by`."""
    grouped = {label.strip() for group in BY.findall(expression) for label in group.split(",")}
    found = defaultdict[str, set[str]](set)
    for name, matchers in USE.findall(expression):
        found[name] |= grouped | set(MATCHER.findall(matchers))
    return found


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """Return the labels of each metric of a server that has answered a request and ended a silent connection."""
    with ServerProcess([*SERVE, "--memory", "64M", "--header-timeout", "1"]) as server:
        status, _ = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello!"}]})
        assert status == 200
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=10) as silent:
            silent.sendall(b"GET / HTTP/1.1\r\n")
            assert silent.recv(1000).startswith(b"HTTP/1.1 408")
        with urlopen(server.url + "/metrics", timeout=10) as answer:
            text = answer.read().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    found = defaultdict[str, set[str]](set)
    for sample in samples:
        found[sample.name] |= sample.labels.keys()
    return found


def test_every_metric_is_exported_with_the_labels_that_are_used(exported: dict[str, set[str]]) -> None:
    wrong = [
        f"{title}: {name} has no sample with the labels {labels - exported[name]}"
        for title, expression, _ in expressions()
        for name, labels in labels_used(expression).items()
        if name not in exported or not labels <= exported[name] | FROM_PROMETHEUS
    ]
    assert wrong == []


def test_each_query_is_of_baton_and_keeps_the_labels_of_its_legend() -> None:
    for title, expression, legend in expressions():
        assert labels_used(expression) or expression.startswith("up{"), title
        assert legend <= {label.strip() for group in BY.findall(expression) for label in group.split(",")}, title


def test_uses_of_labels_are_found() -> None:
    expression = 'sum by (le, actor) (rate(baton:a_bucket{x=~"b", y!="c"}[5m])) / sum(baton:b)'
    assert labels_used(expression) == {"baton:a_bucket": {"le", "actor", "x", "y"}, "baton:b": {"le", "actor"}}


def test_each_panel_has_a_place_of_its_own() -> None:
    cells, panels = list[tuple[int, int]](), board()["panels"]
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        cells += [(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])]
    assert len(cells) == len(set(cells))
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_the_board_names_the_data_source_that_is_provisioned() -> None:
    [source] = yaml.safe_load((GRAFANA / "datasources" / "prometheus.yaml").read_text())["datasources"]
    queries = [target for panel in board()["panels"] for target in panel.get("targets", [])]
    variables = board()["templating"]["list"]
    assert {each["datasource"]["uid"] for each in (*queries, *variables)} == {source["uid"]}
    assert {each["datasource"]["type"] for each in (*queries, *variables)} == {source["type"]}


def test_prometheus_reads_the_alerts_and_they_say_which_engine() -> None:
    prometheus = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
    assert [FOLDER / name for name in prometheus["rule_files"]] == [FOLDER / "alerts.yaml"]
    jobs = {job["job_name"] for job in prometheus["scrape_configs"]}
    assert {match for rule in rules() for match in re.findall(r'job="(\w+)"', rule["expr"])} <= jobs
    for rule in rules():
        assert "{{ $labels.instance }}" in rule["annotations"]["summary"]
        assert rule["labels"]["severity"] in ("warning", "critical")
