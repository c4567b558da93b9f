"""Names of sessions that are sent to the ring, and the tiers that are reported for their states."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from baton.actors import tokens
from baton.actors.messages import Kept, Message, Name, Restarted, Suspend, Suspended, Unname
from baton.api import errors
from tests.api.fake_ring import Served, serving
from tests.api.sessions.test_durability import folder
from tests.api.sessions.test_sessions import SESSIONS, create, get, turn
from tests.api.through_router import not_through_router

pytestmark = pytest.mark.anyio


def named(served: Served) -> list[Message]:
    """Return the messages about names, without the tickets of Name."""
    sent = [message for message in served.ring.sent if isinstance(message, Name | Unname | Suspend)]
    return [replace(message, ticket=0) if isinstance(message, Name) else message for message in sent]


async def asked(served: Served, path: str, body: dict[str, Any]) -> tuple[Name, asyncio.Task[tuple[int, Any]]]:
    """Post a fork or rewind to a ring that holds its answer. Return the last Name that was sent, and the call."""
    before, names = len(served.ring.sent), 2 if path.endswith("/fork") else 1
    served.ring.held_names = True
    call = asyncio.ensure_future(served.post(path, body))
    await served.ring.until(lambda: len(served.ring.sent) == before + names)
    name = served.ring.sent[-1]
    assert isinstance(name, Name)
    return name, call


@pytest.mark.parametrize("command", ["fork", "rewind"])
async def test_a_fork_and_a_rewind_answer_with_the_state_that_the_next_turn_resumes_from(command: str) -> None:
    async with serving() as served:
        session = await create(served)
        for _ in range(2):
            await turn(served, session, text="a", max_tokens=1)
        served.ring.deliver(Kept(served.ring.submitted()[0].session, "slot", 3))
        name, call = await asked(served, f"{session}/{command}", {"turn": 1})
        served.ring.deliver(Kept(name.session, "host", 3))
        listing = asyncio.ensure_future(get(served, SESSIONS))
        await asyncio.sleep(0.05)
        assert not call.done() and not listing.done(), "a move from before the command is no answer to it"
        served.ring.deliver(Kept(name.session, "slot", 1, name.ticket))
        status, answer = await call
        assert (status, answer["position"], answer["state"]) == (200, 2, {"tier": "slot", "position": 1})
        assert (await get(served, f"{SESSIONS}/{answer['id']}"))["state"] == answer["state"]
        assert answer["state"] in [each["state"] for each in (await listing)["data"]]


async def test_a_fork_and_a_rewind_are_answered_if_the_ring_is_not() -> None:
    async with serving() as served:
        session = await create(served)
        await turn(served, session, text="a", max_tokens=1)
        served.ring.deliver(Kept(served.ring.submitted()[0].session, "slot", 1))
        nothing = {"tier": "tokens", "position": 0}
        for path, body in ((f"{session}/rewind", {"turn": 1}), (f"{session}/fork", {})):
            _, call = await asked(served, path, body)
            served.ring.deliver(Restarted())
            assert (await call)[1]["state"] == nothing
        name, call = await asked(served, f"{session}/rewind", {"turn": 1})
        assert (await turn(served, session, text="b", max_tokens=1))["turn"] == 2
        assert (await call)[0] == 200, "the ring may answer only after the turn"
        served.ring.deliver(Kept(name.session, "slot", 2, name.ticket))
        assert (await get(served, session))["state"] == {"tier": "slot", "position": 2}
        _, call = await asked(served, f"{session}/rewind", {"turn": 1})
        served.server.gateway.lose_ring(errors.internal("the device failed"))
        assert (await call)[0] == 200
        status, fork = await asyncio.wait_for(served.post(f"{session}/fork", {}), 5)
        assert (status, fork["state"]) == (200, nothing)


async def test_the_ring_hears_of_names(tmp_path: Path) -> None:
    async with serving(**folder(tmp_path)) as served:
        session = await create(served, cache_salt="s")
        await turn(served, session, text="a", max_tokens=1)
        await turn(served, session, text="b", max_tokens=1)
        key = served.ring.submitted()[0].session
        assert [request.session for request in served.ring.submitted()] == [key, key]
        await served.post(f"{session}/fork", {"id": "fork"})
        await served.post(f"{session}/rewind", {"turn": 1})
        await served.post(f"{session}/rewind", {"turn": 0})
        async with served.client.delete(session):
            pass
        [first, new, fork, *rest] = named(served)
        assert first == Name(key, "s", b"")
        assert isinstance(new, Name) and new.session not in ("", key)
        assert (new, fork) == (Name(new.session, "s", b""), Name(new.session, "s", tokens.pack(list(b"aHbH"))))
        assert rest == [Name(key, "s", tokens.pack(list(b"aH"))), Name(key, "s", b""), Unname(key)]
        again = fork
        served.ring.deliver(Restarted())
        assert named(served)[-1] == again
    async with serving(**folder(tmp_path)) as served:
        served.server.gateway.name_all()
        assert named(served) == [again]


async def test_suspending(tmp_path: Path) -> None:
    async with serving(**folder(tmp_path)) as served:
        session = await create(served, id="s")
        assert (await get(served, session))["state"] == {"tier": "tokens", "position": 0}
        answer = await turn(served, session, text="a")
        assert (answer["resumed_from"], answer["lost"]) == ("tokens", "")
        key = served.ring.submitted()[0].session
        served.ring.deliver(Kept(key, "slot", 3))
        served.ring.deliver(Kept("of nobody", "slot", 9))
        assert (await get(served, session))["state"] == {"tier": "slot", "position": 3}
        suspended = {"id": "s", "state": {"tier": "host", "position": 5}}
        assert await served.post(f"{session}/suspend", {}) == (200, suspended)
        assert (await get(served, session))["state"] == suspended["state"]
        assert served.sessions.suspended == 1
        served.ring.held = True
        task = asyncio.ensure_future(turn(served, session, text="b"))
        await served.ring.until(lambda: served.ring.open)
        assert served.sessions.suspended == 0
        assert (await served.error(f"{session}/suspend", {}))[1]["code"] == "session_busy"
        served.ring.release()
        await task
        assert (await served.error(f"{SESSIONS}/nobody/suspend", {}))[0] == 404
        served.ring.deliver(Restarted())
        assert (await get(served, session))["state"] == {"tier": "tokens", "position": 0}


async def test_a_suspension_ends_when_the_ring_does(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as served:
        session = await create(served)
        await turn(served, session, text="a")
        deliver = served.ring.deliver
        monkeypatch.setattr(served.ring, "deliver", lambda *_: None)

        async def suspend() -> asyncio.Task[tuple[int, Any]]:
            served.ring.sent.clear()
            task = asyncio.ensure_future(served.post(f"{session}/suspend", {}))
            await served.ring.until(lambda: any(isinstance(message, Suspend) for message in served.ring.sent))
            return task

        task = await suspend()
        deliver(Restarted())
        assert (await task)[1]["state"] == {"tier": "tokens", "position": 0}
        task = await suspend()
        served.server.gateway.fail_all(errors.unavailable("the server is shutting down", "draining"))
        assert (await task)[0] == 503
        deliver(Suspended(99, "host", 1))


@not_through_router
async def test_an_idle_session_is_suspended_not_forgotten(tmp_path: Path) -> None:
    async with serving(session_idle_timeout=0.1, **folder(tmp_path)) as served:
        session = await create(served, id="idle")
        await turn(served, session, text="a")
        await served.sessions.sweep()
        assert not any(isinstance(message, Suspend) for message in named(served))
        await asyncio.sleep(0.15)
        for _ in range(2):
            await served.sessions.sweep()
        assert [type(message) for message in named(served)] == [Name, Suspend]
        async with served.client.get("/metrics") as response:
            metrics = await response.text()
        assert (await get(served, session))["turn"] == 1
    assert 'baton:sessions{model_name="fake"} 1.0' in metrics
    assert 'baton:sessions_suspended{model_name="fake"} 1.0' in metrics
    assert 'baton:session_states{model_name="fake",tier="host"} 1.0' in metrics
    assert 'baton:session_log_bytes{model_name="fake"} 0.0' not in metrics
