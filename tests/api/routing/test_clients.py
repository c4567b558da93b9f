"""The API's tests, with the clients of OpenAI, Anthropic and SGLang, against two engines through a router."""

import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

from tests.api.server_process import ROOT

SHORT = (
    "openai/test_openai.py", "openai/test_stored.py", "anthropic/test_messages.py", "sglang",
    "responses/test_responses.py", "responses/test_websocket.py", "responses/test_conversations.py",
    "sessions/test_sessions.py",
)  # fmt: skip
PATIENCE_S = 1800  # A test that hangs would keep all others waiting.
ALL = ("openai", "anthropic", "sglang", "responses", "sessions", "generation")


@pytest.mark.parametrize("paths", [SHORT, pytest.param(ALL, marks=pytest.mark.soak)], ids=["short", "all"])
def test_the_api_is_the_same_through_a_router(paths: tuple[str, ...]) -> None:
    run_tests(paths, "both,both")


def run_tests(paths: Sequence[str], roles: str) -> None:
    """Run tests of the API against engines with these roles."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "not soak", *(f"tests/api/{path}" for path in paths)],
        cwd=ROOT,
        env=os.environ | {"BATON_TESTS_THROUGH_ROUTER": roles},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout[-6000:]
