"""A scheduler for a test; the ledger is closed at the end."""

from collections.abc import Iterator

import pytest

from tests.actors.scheduler.desk import Desk


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.ledger.close()
