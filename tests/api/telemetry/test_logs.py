"""The two formats of the log, in processes of their own, because logging is configured once per process."""

import json
import subprocess
import sys

import pytest

from tests.api.server_process import ROOT

SCRIPT = """
import logging, structlog
from baton.api.telemetry.logs import configure
configure({format!r}, {level!r})
log = structlog.get_logger()
log.debug("fine", detail=1)
log.info("said", text="two\\nlines", thing=object)
logging.getLogger("library").warning("from %s", "elsewhere")
api_key = "sec" + "ret"
try:
    1 / 0
except ZeroDivisionError:
    log.exception("broke")
"""


HOSTILE = """
import structlog
from baton.api.telemetry.logs import configure
configure({format!r}, {level!r})
log = structlog.get_logger()
log.info("peer", link="one\\x1b[2J", file="\\udcff\\x9b")
try:
    raise ValueError("two\\x1b[2J")
except ValueError:
    log.exception("broke")
"""


def run(format: str, level: str, script: str = SCRIPT) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", script.format(format=format, level=level)],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert done.stdout == ""
    return done.stderr.splitlines()


@pytest.mark.parametrize("format", ["json", "auto"])
def test_json_is_one_object_a_line(format: str) -> None:
    lines = [json.loads(line) for line in run(format, "info")]
    assert [line["event"] for line in lines] == ["said", "from elsewhere", "broke"]
    assert [line["level"] for line in lines] == ["info", "warning", "error"]
    assert lines[0]["text"] == "two\nlines"
    assert "ZeroDivisionError" in lines[2]["exception"]
    assert all(line["timestamp"].endswith("Z") for line in lines)


def test_the_console_form() -> None:
    text = "\n".join(run("console", "debug"))
    assert "fine" in text and "detail=1" in text
    assert "'two\\nlines'" in text
    assert "ZeroDivisionError" in text and "secret" not in text, "the values of variables are not for the log"


@pytest.mark.parametrize("format", ["console", "json"])
def test_texts_that_others_choose_do_not_reach_the_terminal_as_they_are(format: str) -> None:
    text = "\n".join(run(format, "info", HOSTILE))
    assert all(c.isprintable() for c in text.replace("\n", ""))
    assert "one" in text and "two" in text and "Logging error" not in text


def test_the_level_is_a_threshold() -> None:
    assert [json.loads(line)["event"] for line in run("json", "error")] == ["broke"]
