"""The code in examples/ and README runs with the official clients and the bundled model."""

import io
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout

import pytest

from examples.agent import EXAMPLE
from tests.api.server_process import ROOT, ServerProcess

AGENT = [
    "Nice to meet you, Clara!",
    "  create_note(title='milk', text='two litres')",
    "Here is the result: saved.",
    "  read_note(title='milk')",
    "Here is the result: two litres.",
    "Your name is Clara.",
]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess() as running:
        yield running


@pytest.mark.parametrize("api", ["openai", "anthropic"])
def test_the_agent_calls_its_tools(server: ServerProcess, api: str) -> None:
    script = [sys.executable, str(ROOT / "examples" / "agent.py"), "--api", api, "--url", server.url]
    lines = "".join(f"{line}\n" for line in EXAMPLE)
    run = subprocess.run(script, input=lines, capture_output=True, text=True, timeout=120, check=False)
    assert (run.returncode, run.stdout.splitlines()) == (0, AGENT), run.stderr


def test_the_ring_prints_every_message_without_torch() -> None:
    """The output equals examples/ring.txt. To update that file: `python examples/ring.py > examples/ring.txt`."""
    code = (
        "import runpy, sys; runpy.run_path('examples/ring.py', run_name='__main__'); sys.exit('torch' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout == (ROOT / "examples" / "ring.txt").read_text(encoding="utf-8")


def test_the_code_in_the_readme_does_what_it_says(server: ServerProcess) -> None:
    """The README's code prints what the comments in it say."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    begin, agent = (readme.index(f"    {line}") for line in ("from openai import OpenAI", "tools = [{"))
    blocks = [readme[start : readme.index("\n\n", start)] for start in (begin, agent)]
    code = "\n".join(line.removeprefix("    ") for block in blocks for line in block.splitlines())
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(code.replace("http://127.0.0.1:8000", server.url), {})
    assert printed.getvalue().splitlines() == re.findall(r"print\(.*\)\s+# (.*)", code)
