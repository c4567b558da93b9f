"""The cost of a session, or of a stored response, does not grow with their number."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from baton.api.responses import store as responses
from baton.api.responses.events import Transcript
from baton.api.responses.store import ResponseStore, StoredResponse
from baton.api.sessions.files import SessionFiles
from baton.api.sessions.store import SessionStore
from tests.counting import calls_of

FEW, MANY = 20, 200


def full_store(sessions: int, files: SessionFiles | None = None) -> SessionStore:
    """Return a full store. Half of its sessions belong to the owner b"own", half to b"other"."""
    store = SessionStore(sessions, 3600.0, mock.Mock(), files, disk_cap=1 << 30)
    for number in range(sessions):
        store.create(b"own" if number % 2 else b"other", f"s{number}")
    return store


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_new_session_in_a_full_store(on_disk: bool, tmp_path: Path) -> None:
    async def scenario() -> list[int]:
        costs = []
        for sessions in (FEW, MANY):
            files = SessionFiles(tmp_path / str(sessions)) if on_disk else None
            store = full_store(sessions, files)
            costs.append(calls_of(partial(store.create, b"own"), "api/sessions"))
            assert len(store) == sessions and store.find(b"own", "s1") is None and store.find(b"other", "s0")
            await store.close_files()
        return costs

    few, many = asyncio.run(scenario())
    assert many == few


def test_the_next_session_to_be_closed_on_a_full_disk(tmp_path: Path) -> None:
    async def scenario() -> list[int]:
        costs = []
        for sessions in (FEW, MANY):
            store = full_store(sessions, SessionFiles(tmp_path / str(sessions)))
            all_of_them = [*store.list(b"own"), *store.list(b"other")]
            await asyncio.gather(*(store.wait_created(session) for session in all_of_them))
            assert store._disk is not None
            next_to_close = partial(store._next_to_close, store._disk.used_by, next(reversed(store._sessions)))
            costs.append(calls_of(next_to_close, "api/sessions"))
            assert next_to_close() is store.list(b"other")[-1]
            await store.close_files()
        return costs

    few, many = asyncio.run(scenario())
    assert many == few


def test_an_ended_response_in_a_full_store(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = []
    for stored in (FEW, MANY):
        monkeypatch.setattr(responses, "MAX_RESPONSES", stored)
        store = ResponseStore(3600.0, 1 << 30)
        for number in range(stored):
            put(store, f"r{number}")
        costs.append(calls_of(partial(put, store, "last"), "api/responses"))
        assert len(store) == stored and store.find(b"", "r0") is None and store.find(b"", "r1")
    assert costs[0] == costs[1]


def put(store: ResponseStore, id: str) -> None:
    transcript: Any = mock.Mock(Transcript)
    response = StoredResponse(id=id, transcript=transcript, messages=[], size=10)
    store.put(b"", response)
    store.mark_ended(b"", response)
