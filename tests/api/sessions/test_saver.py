"""Deletions of session files that fail and are tried again."""

from typing import Any, cast

import pytest

from baton.api.sessions.files import SessionFiles
from baton.api.sessions.saver import SessionDisk

pytestmark = pytest.mark.anyio


class Stubborn:
    """Session files, some of which cannot be deleted."""

    def __init__(self) -> None:
        self.tried: list[str] = []

    def delete(self, key: str) -> None:
        self.tried.append(key)
        if key.startswith("stuck"):
            raise PermissionError(key)


async def test_a_file_that_cannot_be_deleted_keeps_no_other_from_being_tried_again() -> None:
    files = Stubborn()
    disk = SessionDisk(cast(SessionFiles, files), cap=100, on_full=lambda: None)
    disk._undeleted.update(cast(Any, ("stuck", "stuck too", "a")))
    await disk.delete_again()
    assert sorted(files.tried) == ["a", "stuck", "stuck too"]
    assert disk._undeleted == {"stuck", "stuck too"}
