"""The objects in examples/kubernetes: valid for Kubernetes, and with options that `baton` has."""

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from baton.api import config as configuration
from baton.api.cli.commands import parser
from baton.api.config import variable
from baton.api.routing.counts import PREFIX, QUEUE_SECONDS

FOLDER = Path(__file__).parents[1] / "examples" / "kubernetes"
VERSION = "1.32"


def objects(name: str = "*") -> list[dict[str, Any]]:
    return [each for path in sorted(FOLDER.glob(f"{name}.yaml")) for each in yaml.safe_load_all(path.read_text())]


def containers() -> list[dict[str, Any]]:
    pods = [each["spec"]["template"]["spec"] for each in objects() if each["kind"] in ("Deployment", "StatefulSet")]
    return [container for pod in pods for container in pod["containers"]]


@pytest.mark.parametrize("found", objects(), ids=lambda found: f"{found['kind']}-{found['metadata']['name']}")
def test_an_object_is_valid(found: dict[str, Any]) -> None:
    kubernetes_validate.validate(found, VERSION, strict=True)


def test_a_wrong_object_is_found() -> None:
    [wrong] = [each for each in objects("engines") if each["kind"] == "StatefulSet"]
    wrong["spec"]["template"]["spec"]["containers"][0]["livenessProbe"]["periodSecond"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSION, strict=True)


@pytest.mark.parametrize("container", containers(), ids=lambda container: container["name"])
def test_a_container_has_options_of_baton(container: dict[str, Any]) -> None:
    options = vars(parser().parse_args(container["args"]))
    command = options.pop("command")
    config = configuration.load(options, {})
    assert command in ("serve", "route")
    assert config.port == container["ports"][0]["containerPort"]
    known = {variable(field.name) for field in configuration.fields()}
    assert {each["name"] for each in container["env"]} <= known


def test_the_router_knows_each_engine_that_the_autoscaler_may_start() -> None:
    [engines] = [each for each in objects() if each["kind"] == "StatefulSet"]
    [scaler] = [each for each in objects() if each["kind"] == "HorizontalPodAutoscaler"]
    [router] = [each for each in containers() if each["name"] == "router"]
    urls = [arg.removeprefix("--engine=") for arg in router["args"] if arg.startswith("--engine=")]
    name, service = engines["metadata"]["name"], engines["spec"]["serviceName"]
    assert urls == [f"http://{name}-{number}.{service}:8000" for number in range(scaler["spec"]["maxReplicas"])]
    assert scaler["spec"]["scaleTargetRef"]["name"] == name


def test_an_engine_has_longer_to_drain_than_it_takes() -> None:
    for each in objects():
        if each["kind"] in ("Deployment", "StatefulSet"):
            pod = each["spec"]["template"]["spec"]
            options = vars(parser().parse_args(pod["containers"][0]["args"]))
            assert pod["terminationGracePeriodSeconds"] > float(options["drain_timeout"])


def test_the_autoscaler_reads_a_metric_that_exists() -> None:
    [scaler] = [each for each in objects() if each["kind"] == "HorizontalPodAutoscaler"]
    [metric] = scaler["spec"]["metrics"]
    assert metric["external"]["metric"]["name"] == (PREFIX + QUEUE_SECONDS).replace(":", "_")
