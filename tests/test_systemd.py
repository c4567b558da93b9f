"""The unit in examples/systemd: valid for systemd, options that Baton has, and longer to stop than a drain takes."""

import configparser
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from baton.api import config as configuration
from baton.api.cli.commands import parser
from baton.api.serve import GRACE_WITH_FILES_S, LAST_SPANS_S, LAST_WRITES_S, Exit
from tests.test_house import ROOT

UNIT = ROOT / "examples" / "systemd" / "baton.service"
SECONDS = {"s": 1, "min": 60}


def service() -> dict[str, str]:
    unit = configparser.RawConfigParser(comment_prefixes=("#",))
    unit.optionxform = str  # type: ignore[assignment, method-assign]  # systemd's names have capitals
    unit.read_string(UNIT.read_text())
    return dict(unit["Service"])


def seconds(text: str) -> int:
    """Return the seconds of a duration of systemd such as 90s or 2min."""
    found = re.fullmatch(r"(\d+)(s|min)", text)
    assert found is not None
    return int(found[1]) * SECONDS[found[2]]


def test_the_command_has_options_of_baton_and_the_time_to_drain() -> None:
    program, *arguments = shlex.split(service()["ExecStart"])
    options = vars(parser().parse_args(arguments))
    assert (Path(program).name, options.pop("command")) == ("baton", "serve")
    config = configuration.load(options, {})
    needed = config.drain_timeout + GRACE_WITH_FILES_S + LAST_WRITES_S + LAST_SPANS_S
    assert seconds(service()["TimeoutStopSec"]) > needed
    assert service()["RestartPreventExitStatus"] == str(int(Exit.BAD_OPTIONS))


def test_the_service_writes_only_to_its_own_folders() -> None:
    own = service()
    assert (own["ProtectSystem"], own["DynamicUser"]) == ("strict", "yes")
    folders = [value for each in own["Environment"].split() for value in each.split("=", 1)[1:]]
    assert all(folder.startswith(f"%C/{own['CacheDirectory']}/") for folder in folders)
    assert f"--session-dir %S/{own['StateDirectory']}/" in own["ExecStart"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/baton/bin/baton", sys.executable))  # which must exist

    def verify() -> subprocess.CompletedProcess[str]:
        return subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True)

    accepted = verify()
    assert (accepted.returncode, accepted.stderr) == (0, "")
    copy.write_text(copy.read_text().replace("TimeoutStopSec=2min", "TimeoutStopSec=2 moments"))
    assert "Failed to parse time value" in verify().stderr
