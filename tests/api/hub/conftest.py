"""A hub on loopback, and huggingface_hub's variables set to it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session

from baton.api.hub import transfer
from tests.api.hub.fake_hub import FakeHub, running
from tests.models.test_bundled import BUNDLED

NAME = "org/model"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Run a hub with the bundled model, and with an empty cache. huggingface_hub reads its variables on import."""
    hub = FakeHub()
    hub.add(NAME, BUNDLED)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(transfer, "PAUSE_S", 0.01)
    with running(hub):
        point_to(hub.url, monkeypatch)
        yield hub
        close_session()


def point_to(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set HF_ENDPOINT."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
