"""Clients of other projects against a real server, and a router with two: each calls a tool and gets its answer.

The clients run in a virtual environment of their own, made by scripts/clients.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.api.routing.test_router import ROUTE, until
from tests.api.scripted import make_checkpoint
from tests.api.server_process import ROOT, ServerProcess

PYTHON = ROOT / ".venv-clients" / "bin" / "python"
SCRIPTS = Path(__file__).parent / "scripts"
PATIENCE_S = 300
REPLIES = [
    '<think>\nI look.\n</think>\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>',
    "<think>\nIt rains.\n</think>\n\nIt rains in Köln.",
]
CONVERSED = [["weather", {"city": "Köln"}], "It rains in Köln."]
STRUCTURED = {"city": "Köln"}
TOLD: dict[str, dict[str, Any]] = {
    "langchain_": {
        **dict.fromkeys(("chat", "chat streamed", "responses", "responses streamed"), CONVERSED),
        "structured": STRUCTURED,
        "by schema": ["city"],
    },
    "openai_agents": dict.fromkeys(("chat", "chat streamed", "responses", "responses streamed"), CONVERSED),
    "litellm_": dict.fromkeys(("chat", "chat streamed"), CONVERSED),
    "instructor_": {"structured": STRUCTURED, "in parts": ["city"]},
}

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(not PYTHON.exists(), reason="scripts/clients installs them, from the network"),
]


@pytest.fixture(scope="module", params=["server", "router"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = make_checkpoint(tmp_path_factory.mktemp("scripted"), REPLIES)
    command = ["tests.api.scripted_server", str(folder), "served_model_name=scripted"]
    with ExitStack() as stack:
        engines = [stack.enter_context(ServerProcess(command)) for _ in range(1 if request.param == "server" else 2)]
        if request.param == "server":
            yield engines[0]
            return
        router = stack.enter_context(ServerProcess([*ROUTE, *(f"--engine={engine.url}" for engine in engines)]))
        until(lambda: all(engine["phase"] == "ready" for engine in router.get("/debug/engines")))
        yield router


@pytest.mark.parametrize("name", TOLD)
def test_a_client_calls_a_tool(server: ServerProcess, name: str) -> None:
    variables = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "OPENAI_API_KEY": "none"}
    run = subprocess.run(
        [PYTHON, SCRIPTS / f"{name}.py", server.url],
        env=variables, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    assert json.loads(run.stdout.splitlines()[-1]) == TOLD[name]
