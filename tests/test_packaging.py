"""An installed wheel is complete: it compiles its native code, serves requests, and shows the chat page."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from urllib.request import urlopen

from baton.api.wiring import EXAMPLE_MODEL
from tests.api.server_process import SERVE, ServerProcess
from tests.test_house import PACKAGES, ROOT

ALSO = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
IGNORED = shutil.ignore_patterns("__pycache__", "*.egg-info")


def build_wheel(folder: Path) -> Path:
    """Build a wheel from a copy of the sources, because a build leaves files next to them."""
    source = folder / "source"
    source.mkdir()
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=IGNORED)
    for name in ALSO:
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    offline = ["--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "wheel", *offline, "--wheel-dir", str(folder), str(source)], check=True, timeout=120)
    [wheel] = folder.glob("*.whl")
    return wheel


def test_a_wheel_installs_one_package_that_serves(tmp_path: Path) -> None:
    installed = tmp_path / "installed"
    with zipfile.ZipFile(build_wheel(tmp_path)) as wheel:
        wheel.extractall(installed)
    assert {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")} == {"baton"}
    expected = {
        path.relative_to(ROOT)
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert {path for path in expected if not (installed / "baton" / path).is_file()} == set()
    # An empty stand-in for Hugging Face's package `kernels`: both packages must be importable together.
    (installed / "kernels").mkdir()
    (installed / "kernels" / "__init__.py").write_text("get_kernel = None\n")
    variables = {"PYTHONPATH": str(installed), "BATON_CACHE": str(tmp_path / "cache")}
    code = "import baton.api, baton.kernels, kernels; print(baton.api.__file__, kernels.__file__, kernels.get_kernel)"
    where = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | variables,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert where.stdout.count(str(installed)) == 2
    with ServerProcess([*SERVE, "--memory", "64M"], variables=variables, folder=tmp_path) as server:
        assert server.wait_for(EXAMPLE_MODEL)["folder"] == str(installed / "baton" / "models" / "bundled")
        assert server.wait_for("native code")["compiled"]
        with urlopen(server.url + "/", timeout=10) as page:
            assert b"<html" in page.read()
        status, answer = server.post("/generate", {"text": "Hello", "sampling_params": {"max_new_tokens": 4}})
    assert (status, bool(answer["text"])) == (200, True)
