"""The open files that a router may have: 1,000 engines and their clients need more than the usual 1,024."""

import resource
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from baton.api.config import Config
from baton.api.routing.serve import check_descriptors
from tests.api.routing.test_router import ROUTE
from tests.api.server_process import ServerProcess

SOFT = 400


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_router_raises_its_limit_to_the_hard_one() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(SOFT, soft), hard))
    try:
        starting = ServerProcess([*ROUTE, "--engine", "http://127.0.0.1:1"], wait_ready=False)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with starting as router:
        lines = Path(f"/proc/{router.process.pid}/limits").read_text().splitlines()
    [limits] = (line.split()[3:5] for line in lines if line.startswith("Max open files"))
    assert limits[0] == limits[1]


def test_a_limit_that_is_too_low_is_said() -> None:
    config = Config(max_connections=100)
    with capture_logs() as logs:
        check_descriptors(100, config)
        check_descriptors(99, config)
    [line] = logs
    assert line["connections"] == 99 and "open files" in line["event"]
