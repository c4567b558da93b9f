"""Engines on two virtual Ray nodes. They are in a network namespace of their own, with only the loopback device."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.api.server_process import ROOT


def can_unshare() -> bool:
    return subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.soak
@pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray: pip install 'baton-serve[cluster]'")
@pytest.mark.skipif(not can_unshare(), reason="needs root, for a network namespace")
def test_a_cluster_survives_its_actors_and_a_node(tmp_path: Path) -> None:
    alone = f"ip link set lo up && exec {sys.executable} -m tests.api.cluster.ray_scenario {tmp_path}"
    done = subprocess.run(
        ["unshare", "--net", "--pid", "--fork", "--mount-proc", "sh", "-c", alone],
        cwd=ROOT,
        env=os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert "survived" in done.stdout
