"""An installed wheel is complete: it serves requests with native code, compiled or its own, and shows the chat page."""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from urllib.request import urlopen

import pytest

from baton.api.wiring import EXAMPLE_MODEL
from baton.kernels.runtime.cpp.build import prebuilt_key
from baton.kernels.runtime.cpp.targets import TARGETS, machine
from tests.api.server_process import SERVE, ServerProcess
from tests.kernels.installed import copying_compiler, runnable
from tests.test_house import PACKAGES, ROOT

ALSO = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
IGNORED = shutil.ignore_patterns("__pycache__", "*.egg-info")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
PREBUILT = Path("baton", "kernels", "runtime", "cpp", "prebuilt")


def build_wheel(folder: Path, variables: Mapping[str, str] | None = None) -> Path:
    """Build a wheel from a copy of the sources, because a build leaves files next to them."""
    source = folder / "source"
    source.mkdir()
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=IGNORED)
    for name in ALSO:
        shutil.copy(ROOT / name, source)
    command = [*PIP, "wheel", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source]
    subprocess.run(command, env=os.environ | dict(variables or {}), check=True, timeout=900)
    [wheel] = folder.glob("*.whl")
    return wheel


def install(wheel: Path, folder: Path) -> list[str]:
    """Install a wheel into a folder. Return the names of its libraries."""
    command = [*PIP, "install", "--no-index", "--no-deps", "--no-compile", "--target", folder, wheel]
    subprocess.run(command, check=True, timeout=120)
    return sorted(path.name for path in (folder / PREBUILT).iterdir())


def assert_serves_without_compiler(installed: Path, target: str, folder: Path) -> None:
    """Check that an installed wheel serves with its own library: no compiler is found, and nothing is cached."""
    cache = folder / f"cache-of-{target}"
    variables = {"PATH": str(folder), "CXX": "", "BATON_CACHE": str(cache), "BATON_TARGET": target}
    variables["PYTHONPATH"] = str(installed)
    with ServerProcess([*SERVE, "--memory", "64M"], variables=variables, folder=folder) as server:
        found = server.wait_for("native code")
        status, answer = server.post("/generate", {"text": "Hello", "sampling_params": {"max_new_tokens": 4}})
        assert server.wait_for(EXAMPLE_MODEL)["folder"].startswith(str(installed))
    assert (found["target"], found["prebuilt"], found["compiled"], found["functions"] > 0) == (
        target,
        True,
        False,
        True,
    )
    assert [line for line in server.log if line["level"] not in ("debug", "info")] == []
    assert (status, bool(answer["text"])) == (200, True)
    assert not cache.exists()


def test_a_wheel_installs_one_package_that_serves(tmp_path: Path) -> None:
    installed, built = tmp_path / "installed", build_wheel(tmp_path, {"BATON_PREBUILD": ""})
    assert built.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(built) as wheel:
        wheel.extractall(installed)
    assert not (installed / PREBUILT).exists()
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
    variables["CXX"] = str(copying_compiler(tmp_path))
    with ServerProcess([*SERVE, "--memory", "64M"], variables=variables, folder=tmp_path) as server:
        assert server.wait_for(EXAMPLE_MODEL)["folder"] == str(installed / "baton" / "models" / "bundled")
        assert server.wait_for("native code")["compiled"]
        with urlopen(server.url + "/", timeout=10) as page:
            assert b"<html" in page.read()
        status, answer = server.post("/generate", {"text": "Hello", "sampling_params": {"max_new_tokens": 4}})
    assert (status, bool(answer["text"])) == (200, True)


def test_a_wheel_with_a_library_serves_without_a_compiler(tmp_path: Path) -> None:
    target = runnable()[0]
    wheel = build_wheel(tmp_path, {"BATON_PREBUILD": target.name, "CXX": str(copying_compiler(tmp_path))})
    assert wheel.name.rpartition("-py3-none-")[2] != "any.whl"
    [name] = install(wheel, tmp_path / "installed")
    assert name.startswith(prebuilt_key(target))
    assert_serves_without_compiler(tmp_path / "installed", target.name, tmp_path)


def test_a_wheel_for_an_unknown_target_is_not_built(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        build_wheel(tmp_path, {"BATON_PREBUILD": "x86-64-v9"})
    assert "BATON_PREBUILD: x86-64-v9: expected all, or some of" in capfd.readouterr().err


@pytest.mark.soak
def test_a_wheel_with_all_libraries_serves_on_each_target(tmp_path: Path) -> None:
    names = install(build_wheel(tmp_path, {"BATON_PREBUILD": "all"}), tmp_path / "installed")
    keys = sorted(prebuilt_key(target) for target in TARGETS if target.machine == machine())
    assert sorted(name.rpartition("-")[0] for name in names) == keys
    for target in runnable():
        assert_serves_without_compiler(tmp_path / "installed", target.name, tmp_path)
