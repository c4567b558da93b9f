import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import structlog
from hypothesis import settings

if TYPE_CHECKING:
    from tests.models.oracle import Oracle

# Disable Hypothesis' deadline: how long an example takes depends on the load of the machine.
settings.register_profile("baton", deadline=None)
settings.load_profile("baton")

# Files that take longest, the longest first. Workers begin with them, or one would be left with them at the end.
LONG = (
    "kernels/gpu/test_compiled.py",
    "api/routing/test_clients.py",
    "actors/forward/test_late_device.py",
    "api/cluster/test_cluster.py",
    "kernels/runtime/cpp/test_build.py",
    "kernels/gpu/attention/test_paged.py",
    "api/routing/test_roles.py",
    "api/routing/test_failures.py",
    "api/test_triton_server.py",
    "reliability/test_reliability.py",
    "actors/forward/test_late_drafts.py",
    "simulation/test_mutations.py",
    "simulation/test_seeds.py",
    "simulation/test_sessions.py",
    "kernels/gpu/sampling/test_sampling.py",
    "models/test_parity.py",
    "models/configurations/test_published.py",
    "models/test_drafts.py",
    "late/test_model.py",
    "late/test_by_heads.py",
    "fuzz/test_fuzz.py",
    "scripts/test_bench.py",
    "scripts/test_fairness.py",
    "scripts/test_mutate.py",
    "browser/test_pictures.py",
    "browser/test_trouble.py",
    "test_packaging.py",
)
# Folders and files whose long tests measure nothing, so that they may share the processors.
SHARING = (
    "actors",
    "api/openai",
    "api/routing/test_clients.py",
    "api/sessions/test_crash.py",
    "api/test_hash_server.py",
    "api/test_white_space.py",
    "fuzz",
    "kernels",
    "late",
    "models",
    "simulation",
    "test_packaging.py",
)
FOLDER = Path(__file__).parent
IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ

# One cache folder for the whole run, servers included, so that no test depends on the user's cache. Native code is
# compiled only once.
if not IS_WORKER:
    os.environ["BATON_CACHE"] = tempfile.mkdtemp(prefix="baton-tests-")


@pytest.fixture(scope="module", autouse=True)
def one_thread_and_no_native_code() -> Iterator[None]:
    """Compute with one thread, and uninstall native code after each test file.

    Loading a model installs native code for the whole process, but the emulated devices of other test files have no
    memory for native code to read. Do not import torch here: most tests of the actors run without it and then start
    three times as fast.
    """
    use_one_thread()
    yield
    if "baton.kernels.runtime.cpp" in sys.modules:
        sys.modules["baton.kernels.runtime.cpp"].uninstall()
    use_one_thread()


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Undo what a command that ran in this process has set up for its logs."""
    before, handlers, level = structlog.get_config(), logging.root.handlers[:], logging.root.level
    yield
    if structlog.get_config() != before:
        structlog.reset_defaults()
        logging.root.handlers[:] = [each for each in logging.root.handlers if each in handlers]
        logging.root.setLevel(level)


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Oracle"]:
    """Run transformers in one process for all tests of a worker; it starts with its first use."""
    from tests.models.oracle import running_oracle

    with running_oracle(tmp_path_factory.mktemp("oracle")) as running:
        yield running


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("soak") and not any(item.path.is_relative_to(FOLDER / place) for place in SHARING):
            item.add_marker("alone")
    places = {FOLDER / file: place for place, file in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path, len(LONG)))


def use_one_thread() -> None:
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not IS_WORKER:
        shutil.rmtree(os.environ["BATON_CACHE"], ignore_errors=True)
