"""Sessions with a folder, over HTTP and a fake ring: everything a client has read is there after a restart."""

import asyncio
import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from baton.actors import tokens
from baton.api.config import ConfigError
from tests.api.fake_ring import Served, payloads, read_events, serving
from tests.api.server_process import ServerProcess
from tests.api.sessions.test_sessions import REPLY, REPLY_IDS, SESSIONS, create, get, settled, turn
from tests.api.test_process import FAKE, post_in_background

pytestmark = pytest.mark.anyio


def folder(path: Path) -> dict[str, Any]:
    return {"session_dir": str(path)}


def logs(path: Path) -> list[Path]:
    return sorted((path / "sessions").glob("*.log"))


def lasting(session: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that a restart must not change."""
    return {name: value for name, value in session.items() if name != "state"}


async def test_sessions_survive_a_restart(tmp_path: Path) -> None:
    async with serving(**folder(tmp_path)) as served:
        chat, other, empty = await create(served, id="chat", cache_salt="s"), await create(served), await create(served)
        for content in "xyz":
            await turn(served, chat, messages=[{"role": "user", "content": content}])
        await turn(served, other, text="a", max_tokens=3)
        await turn(served, other, text="b", max_tokens=0)
        await served.post(f"{other}/fork", {"turn": 1, "id": "fork"})
        await served.post(f"{other}/rewind", {"turn": 1})
        before = {path: await get(served, path) for path in (chat, other, empty, f"{SESSIONS}/fork")}
    for _ in range(2):
        async with serving(**folder(tmp_path)) as served:
            assert len(served.sessions) == 4
            for path, session in before.items():
                assert lasting(await get(served, path)) == lasting(session)
    async with serving(**folder(tmp_path)) as served:
        assert (await turn(served, chat, messages=[{"role": "user", "content": "w"}]))["turn"] == 4
        assert tokens.unpack(served.ring.submitted()[-1].tokens)[:20] == list(b"user:x\nassistant:Hel")
        assert (await turn(served, other, text="c", max_tokens=1))["turn"] == 3
        assert bytes(tokens.unpack(served.ring.submitted()[-1].tokens)) == b"aHelc"
        assert (await get(served, f"{SESSIONS}/fork"))["parent"] == {"session": before[other]["id"], "turn": 1}


async def test_without_a_folder_saved_is_null() -> None:
    async with serving() as served:
        session = await create(served)
        await turn(served, session, text="a")
        assert (await get(served, session))["saved"] is None


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return the set of files that have been synced, and slow down each sync by 50 ms."""
    done: set[str] = set()
    fsync = os.fsync

    def slow(descriptor: int) -> None:
        time.sleep(0.05)
        fsync(descriptor)
        done.add(os.readlink(f"/proc/self/fd/{descriptor}"))

    monkeypatch.setattr(os, "fsync", slow)
    return done


async def test_everything_a_client_reads_is_on_the_disk(tmp_path: Path, synced: set[str]) -> None:
    async with serving(**folder(tmp_path)) as served:
        assert synced == {str(tmp_path)}
        synced.clear()
        session = await create(served)
        [log] = logs(tmp_path)
        assert synced == {str(log.with_suffix(".tmp")), str(log.parent)}
        for stream in (False, True):
            synced.clear()
            async with served.client.post(f"{session}/turns", json={"text": "a", "stream": stream}) as response:
                async for line in response.content:
                    if b"turn.ended" in line or not stream:
                        assert synced == {str(log)}
                        break
        synced.clear()
        await served.post(f"{session}/rewind", {"turn": 1})
        assert synced == {str(log.with_suffix(".tmp")), str(log.parent)}
        session_id = (await served.post("/open_session", {"capacity_of_str_len": 100}))[1]
        [other] = set(logs(tmp_path)) - {log}
        synced.clear()
        await served.post("/generate", {"text": "a", "session_params": {"id": session_id}})
        assert synced == {str(other)}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_that_ends_with_an_error_is_saved_before_the_client_reads_it(
    tmp_path: Path, synced: set[str], stream: bool
) -> None:
    async with serving(request_timeout=0.3, **folder(tmp_path)) as served:
        session = await create(served)
        [log] = logs(tmp_path)
        synced.clear()
        served.ring.pause = 0.1
        async with served.client.post(f"{session}/turns", json={"text": "a", "stream": stream}) as response:
            async for line in response.content:
                if b"request_timeout" in line:
                    break
            assert synced == {str(log)}


@pytest.mark.parametrize("how", ["abort", "disconnect", "timeout"])
async def test_a_turn_that_is_cut_short_survives(tmp_path: Path, how: str) -> None:
    options: dict[str, Any] = {"request_timeout": 0.2} if how == "timeout" else {}
    async with serving(**folder(tmp_path), **options) as served:
        session = await create(served)
        served.ring.pause = 0.02
        task = asyncio.ensure_future(served.post(f"{session}/turns", {"text": "ab"}))
        await served.ring.until(lambda: served.ring.open)
        await asyncio.sleep(0.1)
        if how == "abort":
            await served.post("/abort_request", {"abort_all": True})
        if how == "disconnect":
            task.cancel()
        before = await settled(served, session, 1)
        await asyncio.wait([task])
    async with serving(**folder(tmp_path)) as served:
        after = await get(served, session)
    assert lasting(after) == lasting(before)
    assert after["turns"][0]["output_tokens"] > 0


async def test_a_turn_in_progress_at_the_shutdown_is_kept(tmp_path: Path) -> None:
    async with serving(**folder(tmp_path)) as served:
        session = await create(served)
        served.ring.pause = 0.02
        task = asyncio.ensure_future(served.post(f"{session}/turns", {"text": "ab"}))
        await served.ring.until(lambda: served.ring.open)
        await asyncio.sleep(0.1)
        await served.server.gateway.drain(0)
        assert (await task)[0] == 503
    async with serving(**folder(tmp_path)) as served:
        [last] = (await get(served, session))["turns"]
    assert (last["status"], last["output_tokens"] > 0) == ("failed", True)


async def test_a_branching_session_survives(tmp_path: Path) -> None:
    async def generate(served: Served, text: str, **params: Any) -> tuple[int, Any]:
        body = {"text": text, "rid": text, "sampling_params": {"max_new_tokens": 1}}
        return await served.post("/generate", body | {"session_params": {"id": "s", **params}})

    async with serving(**folder(tmp_path)) as served:
        await served.post("/open_session", {"capacity_of_str_len": 100, "session_id": "s"})
        await generate(served, "a")
        await generate(served, "b", rid="a")
        await generate(served, "c", rid="a")
        await generate(served, "d", rid="b")
        await generate(served, "e", rid="b", replace=True)
    async with serving(**folder(tmp_path)) as served:
        assert (await generate(served, "f", rid="d"))[0] == 400
        for rid, text in (("c", "g"), ("e", "h")):
            assert (await generate(served, text, rid=rid))[0] == 200
        sent = [bytes(tokens.unpack(request.tokens)) for request in served.ring.submitted()]
    assert sent == [b"aHcHg", b"aHbHeHh"]


async def test_closed_sessions_stay_closed(tmp_path: Path) -> None:
    async with serving(session_cap=2, **folder(tmp_path)) as served:
        for id in "abc":
            await turn(served, await create(served, id=id), text="x")
        async with served.client.delete(f"{SESSIONS}/b") as response:
            assert response.status == 200
        assert len(logs(tmp_path)) == 1
    async with serving(**folder(tmp_path)) as served:
        assert [session["id"] for session in (await get(served, SESSIONS))["data"]] == ["c"]


async def test_the_cap_holds_after_a_restart_too(tmp_path: Path) -> None:
    async with serving(**folder(tmp_path)) as served:
        for id in "abc":
            await create(served, id=id)
            os.utime(logs(tmp_path)[0])
    for age, log in enumerate(logs(tmp_path)):
        os.utime(log, (1e9 - age,) * 2)
    async with serving(session_cap=2, **folder(tmp_path)) as served:
        by_use = [session["id"] for session in (await get(served, SESSIONS))["data"]]
        await create(served, id="d")
        assert [session["id"] for session in (await get(served, SESSIONS))["data"]] == ["d", by_use[0]]


async def test_old_sessions_go_when_the_logs_are_full(tmp_path: Path) -> None:
    async with serving(session_disk=2**20, max_model_len=2**20, **folder(tmp_path)) as served:
        for id in "abcdef":
            await turn(served, await create(served, id=id), input_ids=[7] * 8000, max_tokens=1)
        assert [session["id"] for session in (await get(served, SESSIONS))["data"]] == list("fed")
        assert served.sessions.log_bytes < 2**20 // 10
        await turn(served, f"{SESSIONS}/f", input_ids=[7] * 30000, max_tokens=1)
        assert [session["id"] for session in (await get(served, SESSIONS))["data"]] == ["f"]
    async with serving(**folder(tmp_path)) as served:
        assert (await get(served, f"{SESSIONS}/f"))["position"] == 38002


async def test_one_server_a_folder(tmp_path: Path) -> None:
    async with serving(**folder(tmp_path)):
        with pytest.raises(ConfigError, match="in use"):
            async with serving(**folder(tmp_path)):
                pass


def test_a_second_server_does_not_start(tmp_path: Path) -> None:
    arguments = [FAKE, "plain", f"session_dir={tmp_path}"]
    with ServerProcess(arguments):
        second = ServerProcess(arguments)
        assert second.wait() == 1
        assert second.output == [f"baton: --session-dir: {tmp_path} is in use by another server\n"]
        second.kill()


def test_a_turn_that_sigterm_interrupts_is_there_after_a_restart(tmp_path: Path) -> None:
    arguments = [FAKE, "pausing", f"session_dir={tmp_path}", "drain_timeout=0.1"]
    with ServerProcess(arguments) as server:
        server.post(SESSIONS, {"id": "s"})
        thread, answers = post_in_background(server, f"{SESSIONS}/s/turns", {"text": "a"})
        time.sleep(0.3)
        assert server.stop() == 0
        thread.join()
        assert answers[0][0] == 503
    with ServerProcess(arguments) as server:
        [turn] = server.get(f"{SESSIONS}/s")["turns"]
    assert turn["output_tokens"] > 0
    assert turn["text"] and REPLY.startswith(turn["text"])


# Tests with a disk that fails


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a switch, a list: while its element is True, every sync fails."""
    broken, fsync = [False], os.fsync

    def sync(descriptor: int) -> None:
        if broken[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    return broken


async def test_a_turn_that_cannot_be_saved_says_so_and_is_saved_with_the_next(
    tmp_path: Path, full_disk: list[bool]
) -> None:
    async with serving(**folder(tmp_path)) as served:
        session = await create(served)
        full_disk[0] = True
        status, answer = await served.post(f"{session}/turns", {"text": "ab"})
        assert (status, answer["error"]["code"], answer["error"]["type"]) == (507, "session_not_saved", "server_error")
        assert "No space left on device" in answer["error"]["message"]
        assert (answer["text"], answer["output_ids"], answer["turn"]) == (REPLY, REPLY_IDS, 1)
        async with served.client.post(f"{session}/turns", json={"text": "c", "stream": True}) as response:
            events = payloads(await read_events(response))
        assert [event.get("type") for event in events[-2:]] == ["turn.ended", None]
        assert (events[-2]["turn"], events[-1]["error"]["code"]) == (2, "session_not_saved")
        seen = await get(served, session)
        assert (seen["saved"], len(seen["turns"])) == (False, 2)
        full_disk[0] = False
        await turn(served, session, text="d", max_tokens=1)
        before = await get(served, session)
        assert before["saved"] is True
    async with serving(**folder(tmp_path)) as served:
        assert lasting(await get(served, session)) == lasting(before)


async def test_a_response_that_cannot_be_saved_says_so(tmp_path: Path, full_disk: list[bool]) -> None:
    async with serving(**folder(tmp_path)) as served:
        session = await create(served, id="s")
        full_disk[0] = True
        body = {"conversation": "s", "input": "x", "include": ["message.output_text.logprobs"]}
        status, answer = await served.post("/v1/responses", body)
        assert (status, answer["error"]["code"]) == (507, "session_not_saved")
        assert answer["output"][0]["content"][0]["text"] == REPLY
        async with served.client.post("/v1/responses", json=body | {"stream": True}) as response:
            blocks = (await response.read()).strip().split(b"\n\n")
        last = json.loads(blocks[-1].split(b"data: ")[1])
        assert (last["type"], last["response"]["error"]["code"]) == ("response.failed", "session_not_saved")
        assert last["response"]["output"][0]["content"][0]["text"] == REPLY
        full_disk[0] = False
        assert (await served.post("/v1/responses", body))[1]["status"] == "completed"
        before = await get(served, session)
    async with serving(**folder(tmp_path)) as served:
        assert lasting(await get(served, session)) == lasting(before)
        assert before["turn"] == 3


async def test_failed_saves_are_retried_periodically_and_at_the_shutdown(tmp_path: Path, full_disk: list[bool]) -> None:
    async with serving(**folder(tmp_path)) as served:
        session = await create(served)
        for again in (served.sessions.sweep, served.sessions.close_files):
            full_disk[0] = True
            assert (await served.post(f"{session}/turns", {"text": "a", "max_tokens": 1}))[0] == 507
            full_disk[0] = False
            await again()
            last = await get(served, session)
            assert last["saved"] is True
    async with serving(**folder(tmp_path)) as served:
        assert lasting(await get(served, session)) == lasting(last)


async def test_a_session_that_cannot_be_saved_is_not_made(tmp_path: Path, full_disk: list[bool]) -> None:
    async with serving(**folder(tmp_path)) as served:
        session = await create(served)
        await turn(served, session, text="a", max_tokens=1)
        full_disk[0] = True
        for path, body in ((SESSIONS, {}), (f"{session}/fork", {}), ("/open_session", {"capacity_of_str_len": 1})):
            status, error = await served.error(path, body)
            assert (status, error["code"]) == (507, "session_not_saved")
            assert error["message"].startswith("the session is not created")
        assert len(served.sessions) == 1


async def test_a_session_that_cannot_be_deleted(tmp_path: Path, full_disk: list[bool]) -> None:
    async with serving(**folder(tmp_path)) as served:
        session = await create(served)
        full_disk[0] = True
        async with served.client.delete(session) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (500, "session_not_deleted")


@pytest.mark.parametrize("again", ["sweep", "close_files"])
async def test_a_deletion_that_failed_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: str
) -> None:
    def fail(path: Path, **_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async with serving(**folder(tmp_path)) as served:
        sessions = [await create(served, id=id) for id in "ab"]
        with monkeypatch.context() as broken:
            broken.setattr(Path, "unlink", fail)
            for session in sessions:
                async with served.client.delete(session) as response:
                    assert response.status == 500
            await served.sessions.sweep()
        assert len(logs(tmp_path)) == 2
        await getattr(served.sessions, again)()
        assert logs(tmp_path) == []
