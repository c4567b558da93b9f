"""The container in examples/container: files that exist, and commands, ports and variables that Baton has."""

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.api import config as configuration
from baton.api.cli.commands import parser
from baton.api.config import Config, variable
from baton.api.security import PROBES
from baton.api.serve import GRACE_WITH_FILES_S, LAST_SPANS_S, LAST_WRITES_S
from tests.test_house import PACKAGES, ROOT

FOLDER = ROOT / "examples" / "container"
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OTHERS = {"HF_HOME", "HF_TOKEN", "BATON_CACHE", "TRITON_CACHE_DIR"}  # variables that are not options


def steps() -> list[tuple[str, str]]:
    """Return the instructions of the Containerfile, with their arguments in one line."""
    text = re.sub(r"^#.*\n", "", (FOLDER / "Containerfile").read_text(), flags=re.MULTILINE)
    lines = [line.split(maxsplit=1) for line in text.replace("\\\n", " ").splitlines() if line]
    return [(word, rest) for word, rest in lines]


def arguments_of(word: str) -> list[str]:
    """Return the arguments of all instructions of this kind."""
    return [rest for each, rest in steps() if each == word]


def variables() -> dict[str, str]:
    return dict(pair.split("=", 1) for rest in arguments_of("ENV") for pair in rest.split())


def config_of(command: Sequence[str], environment: dict[str, str]) -> Config:
    """Return the options of a command of the image. Raises SystemExit or ConfigError if it has wrong ones."""
    options = vars(parser().parse_args(command))
    assert options.pop("command") == "serve"
    return configuration.load(options, environment)


def seconds(text: str) -> int:
    """Return the seconds of a duration of compose such as 90s or 2m."""
    return int(text[:-1]) * {"s": 1, "m": 60}[text[-1]]


def copied() -> set[str]:
    """Return the paths of the repository that the Containerfile uses."""
    paths = {path for rest in arguments_of("COPY") for path in rest.split()[:-1]}
    mounts = [mount for rest in arguments_of("RUN") for mount in re.findall(r"--mount=(\S+)", rest)]
    return paths | {re.findall(r"source=([^,]+)", mount)[0] for mount in mounts if "from=" not in mount}


def test_the_image_is_built_from_files_that_exist_and_are_not_ignored() -> None:
    ignored = (FOLDER / "Containerfile.dockerignore").read_text().splitlines()
    assert {line.removeprefix("!") for line in ignored if line.startswith("!")} == copied()
    assert [path for path in copied() if not (ROOT / path).exists()] == []
    assert copied() >= {*PACKAGES, "setup.py", "pyproject.toml"}


def test_the_image_serves_on_the_port_that_it_exposes() -> None:
    environment = variables()
    assert json.loads(arguments_of("ENTRYPOINT")[0]) == ["baton"]
    config = config_of(json.loads(arguments_of("CMD")[0]), environment)
    assert [str(config.port)] == arguments_of("EXPOSE")
    assert config.host == "0.0.0.0"
    assert environment.keys() - OTHERS <= {variable(field.name) for field in configuration.fields()}


def test_the_image_runs_as_a_user_who_may_write_the_volume_only() -> None:
    [user], [volume] = arguments_of("USER"), arguments_of("VOLUME")
    [made] = [rest for rest in arguments_of("RUN") if "useradd" in rest]
    assert f"--uid {user.split(':')[0]} " in made and made.endswith(f"--mode 700 {volume}")
    assert user.split(":")[0] != "0"
    folders = [value for name, value in variables().items() if name in OTHERS]
    assert all(folder.startswith(f"{volume}/") for folder in folders)


@pytest.fixture
def health() -> Iterator[tuple[str, list[str]]]:
    """Run a server that answers only /health. Return its port, and the paths of its requests."""
    paths = list[str]()

    class Health(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(200 if self.path == "/health" else 503)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Health)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield str(server.server_port), paths
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_check_of_health_asks_the_server(health: tuple[str, list[str]]) -> None:
    port, paths = health
    [check] = arguments_of("HEALTHCHECK")
    program, *rest = json.loads(check.partition(" CMD ")[2])
    assert program == "python"

    def exit_code(port: str) -> int:
        command = [sys.executable, *rest]
        return subprocess.run(command, env=os.environ | {"BATON_PORT": port}, stderr=subprocess.DEVNULL).returncode

    assert exit_code(port) == 0
    assert set(paths) <= PROBES
    assert exit_code("1") != 0


def test_compose_runs_a_command_that_baton_has_on_the_port_that_it_publishes() -> None:
    service = SERVICES["baton"]
    empty = {name: "" for name, value in service["environment"].items() if value.endswith(":-}")}
    assert service["environment"].keys() == empty.keys()
    assert empty.keys() - OTHERS <= {variable(field.name) for field in configuration.fields()}
    config = config_of(service["command"], variables() | empty)
    assert service["ports"] == [f"127.0.0.1:{config.port}:{config.port}"]
    [volume] = service["volumes"]
    assert volume.split(":")[0] in COMPOSE["volumes"] and volume.split(":")[1] == arguments_of("VOLUME")[0]
    assert config.session_dir is not None and config.session_dir.startswith(volume.split(":")[1])
    assert seconds(service["stop_grace_period"]) > (
        config.drain_timeout + GRACE_WITH_FILES_S + LAST_WRITES_S + LAST_SPANS_S
    )
    build = service["build"]
    assert (FOLDER / build["context"] / build["dockerfile"]).resolve() == FOLDER / "Containerfile"


def mounts(service: str) -> dict[str, Path]:
    """Return the files and folders that a service mounts, by their path in its container."""
    parts = [mount.split(":") for mount in SERVICES[service]["volumes"] if mount.startswith(".")]
    return {inside: (FOLDER / outside).resolve() for outside, inside, mode in parts if mode == "ro"}


def test_prometheus_reads_its_files_and_may_call_the_server() -> None:
    files = mounts("prometheus")
    assert all(path.is_file() for path in files.values())
    [config] = [option.partition("=")[2] for option in SERVICES["prometheus"]["command"] if "config.file" in option]
    settings = yaml.safe_load(files[config].read_text())
    assert {str(Path(config).parent / name) for name in settings["rule_files"]} <= files.keys()
    [target] = [
        target for job in settings["scrape_configs"] for each in job["static_configs"] for target in each["targets"]
    ]
    name, _, port = target.partition(":")
    served = config_of(SERVICES[name]["command"], variables())
    assert (int(port), name in served.allowed_host) == (served.port, True)


def test_grafana_finds_its_data_source_and_its_board() -> None:
    folders = mounts("grafana")
    assert all(any(path.iterdir()) for path in folders.values())
    provisioning = "/etc/grafana/provisioning"
    [provider] = yaml.safe_load((folders[f"{provisioning}/dashboards"] / "baton.yaml").read_text())["providers"]
    boards = provider["options"]["path"]
    home = Path(SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert str(home.parent) == boards and (folders[boards] / home.name).is_file()
    sources = yaml.safe_load((folders[f"{provisioning}/datasources"] / "prometheus.yaml").read_text())["datasources"]
    host, _, port = sources[0]["url"].removeprefix("http://").partition(":")
    assert SERVICES[host]["ports"] == [f"127.0.0.1:{port}:{port}"]
