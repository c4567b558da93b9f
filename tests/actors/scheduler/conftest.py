"""A fixture that makes a scheduler for a test, and closes its ledger at the end."""

from collections.abc import Iterator

import pytest

from tests.actors.scheduler.desk import Desk


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.ledger.close()
