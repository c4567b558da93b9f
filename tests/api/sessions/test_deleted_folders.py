"""Files of --session-dir that are deleted while a server runs: a turn is saved whole, or answered with 507."""

import asyncio
import os
import random
import shutil
import threading
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from baton.api.config import ConfigError
from baton.api.sessions.files import SessionFiles
from tests.api.fake_ring import Served, serving
from tests.api.server_process import SERVE, ServerProcess
from tests.api.sessions.test_crash import SMALL, body_of, post_ok
from tests.api.sessions.test_durability import folder, lasting, logs
from tests.api.sessions.test_sessions import SESSIONS, create, get, turn
from tests.api.test_process import FAKE

pytest_anyio = pytest.mark.anyio


def delete(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def move_away(path: Path) -> None:
    path.rename(path.with_name(f"{path.name}.{uuid.uuid4().hex}"))


def empty(path: Path) -> None:
    """Replace a file or folder by an empty one."""
    delete(path)
    path.mkdir() if path.suffix == "" and path.name != "lock" else path.write_bytes(b"")


def place(root: Path, what: str) -> Path:
    path = root / "dir"
    if what == "log":
        return logs(path)[0]
    return {"all": path, "logs": path / "sessions", "lock": path / "lock"}[what]


async def after_a_kill(root: Path, session: str) -> Any:
    """Return the session that a server finds if it starts now, on a copy of the folder."""
    copy = root / "copy"
    shutil.copytree(root / "dir", copy)
    try:
        async with serving(**folder(copy)) as served:
            return lasting(await get(served, session))
    finally:
        shutil.rmtree(copy)


@pytest_anyio
@pytest.mark.parametrize("what", ["all", "logs", "log", "lock"])
@pytest.mark.parametrize("how", [delete, move_away, empty])
async def test_the_next_turn_restores_its_log_and_the_others_follow(
    tmp_path: Path, what: str, how: Callable[[Path], None]
) -> None:
    async with serving(**folder(tmp_path / "dir")) as served:
        first, other = await create(served, id="first"), await create(served, id="other")
        for text in "ab":
            await turn(served, first, text=text, max_tokens=2)
            await turn(served, other, text=text, max_tokens=2)
        how(place(tmp_path, what))
        for text in "cd":
            for session in (first, other):
                await turn(served, session, text=text, max_tokens=2)
                assert await after_a_kill(tmp_path, session) == lasting(await get(served, session))
        how(place(tmp_path, what))
        await served.sessions.sweep()
        await asyncio.gather(*(session.wait_saved() for session in served.sessions.list(b"")))
        for session in (first, other):
            assert await after_a_kill(tmp_path, session) == lasting(await get(served, session))
        with pytest.raises(ConfigError, match="in use by another server"):
            SessionFiles(tmp_path / "dir")
        how(place(tmp_path, what))
    for session in (first, other):
        assert len((await after_a_kill(tmp_path, session))["turns"]) == 4


@pytest_anyio
async def test_an_older_copy_that_is_put_back_is_not_continued(tmp_path: Path) -> None:
    async with serving(**folder(tmp_path / "dir")) as served:
        session = await create(served)
        await turn(served, session, text="a", max_tokens=2)
        shutil.copytree(tmp_path / "dir", tmp_path / "earlier")
        await turn(served, session, text="b", max_tokens=2)
        delete(tmp_path / "dir")
        shutil.copytree(tmp_path / "earlier", tmp_path / "dir")
        await turn(served, session, text="c", max_tokens=2)
        assert await after_a_kill(tmp_path, session) == lasting(await get(served, session))
        shutil.copy(*logs(tmp_path / "earlier"), logs(tmp_path / "dir")[0])
        await served.sessions.sweep()
        await asyncio.gather(*(session.wait_saved() for session in served.sessions.list(b"")))
        assert await after_a_kill(tmp_path, session) == lasting(await get(served, session))


@pytest_anyio
@pytest.mark.parametrize("what", ["all", "logs", "log", "lock"])
@pytest.mark.parametrize("times", [1, 2, 3, 9])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("whole", [True, False])
async def test_a_turn_during_a_deletion_is_saved_whole_or_a_507(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, times: int, before: bool, whole: bool
) -> None:
    """The turn is saved whole or a 507 if `what` is deleted before or after each of the first `times` syncs.

    whole: the turn writes the whole log.
    """
    fsync, left = os.fsync, 0

    def going(descriptor: int) -> None:
        nonlocal left
        left -= 1
        if left >= 0 and before:
            delete(gone)
        fsync(descriptor)
        if left >= 0 and not before:
            delete(gone)

    monkeypatch.setattr(os, "fsync", going)
    async with serving(**folder(tmp_path / "dir")) as served:
        session = await create(served)
        for text in "ab":
            await turn(served, session, text=text, max_tokens=2)
        gone, left = place(tmp_path, what), times
        if whole:
            delete(gone)
        status, answer = await served.post(f"{session}/turns", {"text": "c", "max_tokens": 2})
        left = 0
        seen = await get(served, session)
        assert (len(seen["turns"]), seen["saved"]) == (3, status == 200)
        if status == 200:
            assert await after_a_kill(tmp_path, session) == lasting(seen)
        else:
            assert (status, answer["error"]["code"], answer["turn"]) == (507, "session_not_saved", 3)
        await turn(served, session, text="d", max_tokens=2)
        assert await after_a_kill(tmp_path, session) == lasting(await get(served, session))


@pytest_anyio
@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_many_sessions_while_things_go_all_the_time(tmp_path: Path, seed: int) -> None:
    chance, statuses = random.Random(seed), Counter[int]()
    path, over = tmp_path / "dir", threading.Event()

    def go_on_deleting() -> None:
        while not over.wait(chance.uniform(0, 0.01)):
            files = logs(path)
            with suppress(OSError):
                delete(chance.choice([path, path / "sessions", path / "lock", *files]))

    async with serving(**folder(path)) as served:
        sessions = [await create(served, id=id) for id in "abcdefgh"]

        async def talk(session: str) -> None:
            for _ in range(30):
                status, _ = await served.post(f"{session}/turns", {"text": "a", "max_tokens": 1})
                statuses[status] += 1

        deleting = asyncio.create_task(asyncio.to_thread(go_on_deleting))
        try:
            await asyncio.gather(*map(talk, sessions))
        finally:
            over.set()
            await deleting
        await served.sessions.sweep()
        await asyncio.gather(*(session.wait_saved() for session in served.sessions.list(b"")))
        for session in sessions:
            seen = await get(served, session)
            assert (seen["turn"], seen["saved"]) == (30, True)
            assert await after_a_kill(tmp_path, session) == lasting(seen)
    assert set(statuses) <= {200, 507} and statuses[200] > 0


@pytest_anyio
async def test_a_folder_that_another_server_has_taken_is_not_written_to(tmp_path: Path) -> None:
    path = tmp_path / "dir"
    async with serving(**folder(path)) as served:
        session, idle = await create(served, id="s"), await create(served, id="idle")
        await turn(served, session, text="a", max_tokens=2)
        delete(path)
        async with serving(**folder(path)) as later:
            await turn(later, await create(later, id="later"), text="x", max_tokens=2)
            before = contents(path)
            await not_saved(served, f"{session}/turns", {"text": "b", "max_tokens": 2})
            await not_saved(served, SESSIONS, {})
            await served.sessions.sweep()
            assert [(await get(served, one))["saved"] for one in (session, idle)] == [False, False]
            assert contents(path) == before
        await served.sessions.sweep()
        await turn(served, session, text="c", max_tokens=2)
        last = await get(served, session)
        assert last["saved"] is True and await after_a_kill(tmp_path, session) == lasting(last)
        assert (await after_a_kill(tmp_path, f"{SESSIONS}/later"))["turn"] == 1
        with pytest.raises(ConfigError, match="in use by another server"):
            SessionFiles(path)


@pytest_anyio
async def test_files_are_not_written_after_another_server_took_only_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "dir"
    async with serving(**folder(path)) as served:
        session, idle = await create(served), await create(served, id="idle")
        delete(path / "lock")
        other, before = SessionFiles(path), contents(path)
        await not_saved(served, f"{session}/turns", {"text": "a", "max_tokens": 2})
        await served.sessions.sweep()
        assert (await get(served, idle))["saved"] is False
        assert contents(path) == before
        other.close()
        await served.sessions.sweep()
        await asyncio.gather(*(session.wait_saved() for session in served.sessions.list(b"")))
        for one in (session, idle):
            assert await after_a_kill(tmp_path, one) == lasting(await get(served, one))
            assert (await get(served, one))["saved"] is True


@pytest_anyio
async def test_a_turn_during_which_another_server_takes_the_folder_is_a_507(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other server read the log before the turn was saved, and would not know the turn."""
    fsync, others = os.fsync, list[SessionFiles]()

    def taking(descriptor: int) -> None:
        fsync(descriptor)
        if not others:
            delete(tmp_path / "dir" / "lock")
            others.append(SessionFiles(tmp_path / "dir"))

    async with serving(**folder(tmp_path / "dir")) as served:
        session = await create(served)
        await turn(served, session, text="a", max_tokens=2)
        monkeypatch.setattr(os, "fsync", taking)
        await not_saved(served, f"{session}/turns", {"text": "b", "max_tokens": 2})
        await not_saved(served, f"{session}/turns", {"text": "c", "max_tokens": 2})
        others[0].close()
        await turn(served, session, text="d", max_tokens=2)
        assert await after_a_kill(tmp_path, session) == lasting(await get(served, session))


async def not_saved(served: Served, path: str, body: Any) -> None:
    status, answer = await served.post(path, body)
    assert (status, answer["error"]["code"]) == (507, "session_not_saved")
    assert "is in use by another server" in answer["error"]["message"]


def contents(path: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest_anyio
async def test_a_session_is_deleted_although_its_file_is_gone(tmp_path: Path) -> None:
    async with serving(**folder(tmp_path / "dir")) as served:
        for what in ("all", "logs", "log"):
            session = await create(served)
            delete(place(tmp_path, what))
            async with served.client.delete(session) as response:
                assert response.status == 200
            assert logs(tmp_path / "dir") == []


@pytest_anyio
async def test_a_turn_is_a_507_while_the_folder_cannot_be_made(tmp_path: Path) -> None:
    path = tmp_path / "dir"
    async with serving(**folder(path)) as served:
        session = await create(served)
        delete(path)
        path.write_text("a file")
        assert (await served.post(f"{session}/turns", {"text": "a", "max_tokens": 1}))[0] == 507
        await served.sessions.sweep()
        path.unlink()
        await turn(served, session, text="b", max_tokens=1)
        assert await after_a_kill(tmp_path, session) == lasting(await get(served, session))


def test_a_second_server_does_not_start_on_a_folder_that_was_made_again(tmp_path: Path) -> None:
    path = tmp_path / "dir"
    arguments = [FAKE, "plain", f"session_dir={path}"]
    with ServerProcess(arguments) as server:
        server.post(SESSIONS, {"id": "s"})
        shutil.rmtree(path)
        assert server.post(f"{SESSIONS}/s/turns", {"text": "a"})[0] == 200
        second = ServerProcess(arguments)
        assert second.wait() == 1
        second.kill()


def test_a_server_whose_states_and_logs_are_deleted_gives_the_same_answers(tmp_path: Path) -> None:
    """The answers are the same, also after a kill: deleted states are computed again."""
    path, texts = tmp_path / "dir", ("My name is Anna.", "What is 3 plus 4?", "What is my name?", "What is 9 plus 8?")
    with ServerProcess([*SERVE, *SMALL]) as reference:
        post_ok(reference, SESSIONS, {"id": "s"})
        right = [post_ok(reference, f"{SESSIONS}/s/turns", body_of(text))["text"] for text in texts]
    options = [*SERVE, *SMALL, "--session-dir", str(path)]
    heard = []
    with ServerProcess(options, exit_code=-9) as server:
        post_ok(server, SESSIONS, {"id": "s"})
        for text, gone in zip(texts[:3], ("states", "", ""), strict=True):
            heard.append(post_ok(server, f"{SESSIONS}/s/turns", body_of(text))["text"])
            assert post_ok(server, f"{SESSIONS}/s/suspend", {})["state"]["tier"] == "disk"
            if len(heard) < 3:
                shutil.rmtree(path / gone)
        server.kill()
    with ServerProcess(options) as server:
        assert [turn["text"] for turn in server.get(f"{SESSIONS}/s")["turns"]] == heard
        answer = post_ok(server, f"{SESSIONS}/s/turns", body_of(texts[3]))
        assert answer["resumed_from"] == "disk"
        assert [*heard, answer["text"]] == right
