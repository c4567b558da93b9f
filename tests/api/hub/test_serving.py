"""The real command `baton serve ORG/NAME`, after a download that was killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.api.hub.conftest import NAME
from tests.api.hub.fake_hub import HALF, FakeHub, sha256
from tests.api.server_process import ROOT, SERVE, ServerProcess
from tests.models.test_bundled import BUNDLED

WEIGHTS = (BUNDLED / "model.safetensors").read_bytes()
PATIENCE_S = 60.0


def test_a_start_by_name_fetches_the_rest_and_serves(hub: FakeHub, tmp_path: Path) -> None:
    variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": ""}
    partial = tmp_path / f"home/hub/models--org--model/blobs/{sha256(WEIGHTS)}.incomplete"
    hub.hold_after = 40 * HALF
    with subprocess.Popen(
        [sys.executable, "-m", "baton.api.cli", "pull", NAME],
        env=os.environ | variables | {"PYTHONPATH": str(ROOT)}, cwd=tmp_path, stderr=subprocess.DEVNULL,
    ) as pull:  # fmt: skip
        deadline = time.monotonic() + PATIENCE_S
        while not partial.exists() or partial.stat().st_size < 40 * HALF:
            assert pull.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        pull.send_signal(signal.SIGKILL)
    there, hub.hold_after = partial.stat().st_size, None
    arguments = [*SERVE, NAME, "--memory", "64M", "--kernels", "torch"]
    with ServerProcess(arguments, variables=variables, folder=tmp_path) as server:
        status, answer = server.post("/v1/completions", {"prompt": "The", "max_tokens": 4, "temperature": 0})
        assert status == 200 and answer["usage"]["completion_tokens"] > 0
        assert server.get("/v1/models")["data"][0]["id"] == answer["model"] == NAME
        progress = [line["done"] for line in server.log if line["event"] == "downloading"]
        assert (progress[0], progress[-1]) == (there, len(WEIGHTS))
    contents = [(each.range, each.sent) for each in hub.requests if each.path.startswith("/content/")]
    # The first part until it was killed, then the header, which the check before the download reads, and the rest.
    assert contents[0] == (None, 40 * HALF)
    assert contents[-1] == (f"bytes={there}-", len(WEIGHTS) - there)
    assert sum(sent for _, sent in contents) < len(WEIGHTS) + 2**15
