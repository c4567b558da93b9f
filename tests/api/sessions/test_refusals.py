"""Refused session requests: during loading, after another turn, with a wrong id; and errors that say not to retry."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.api.fake_ring import Served, serving
from tests.api.sessions.test_sessions import SESSIONS, create, get, turn

pytestmark = pytest.mark.anyio


async def ask(served: Served, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    async with served.client.request(method, path, json=body) as response:
        return response.status, (await response.json()).get("error")


@pytest.mark.parametrize(
    ("method", "action", "body"),
    [
        ("GET", "", None),
        ("DELETE", "", None),
        ("POST", "/fork", {}),
        ("POST", "/rewind", {"turn": 0}),
        ("POST", "/suspend", None),
        ("POST", "/turns", {"text": "a"}),
    ],
)
async def test_while_the_model_loads_no_session_is_unknown(
    tmp_path: Path, method: str, action: str, body: dict[str, Any] | None
) -> None:
    async with serving(ready=False, session_dir=str(tmp_path)) as served:
        status, error = await ask(served, method, f"{SESSIONS}/s{action}", body)
        assert (status, error["code"]) == (503, "loading")
        assert (await served.error("/close_session", {"session_id": "s"}))[1]["code"] == "loading"


async def test_a_session_can_be_deleted_during_a_drain() -> None:
    async with serving() as served:
        session = await create(served)
        served.server.phase = "draining"
        assert (await ask(served, "DELETE", session))[0] == 200


async def test_after_counts_during_a_turn_too() -> None:
    async with serving() as served:
        session = await create(served)
        for _ in range(2):
            await turn(served, session, text="a", max_tokens=1)
        served.ring.held = True
        running = asyncio.ensure_future(turn(served, session, text="b"))
        await served.ring.until(lambda: served.ring.open)
        assert (await ask(served, "DELETE", f"{session}?after=1"))[1]["code"] == "session_moved_on"
        assert (await served.error(f"{session}/fork", {"after": 1}))[1]["code"] == "session_moved_on"
        response: dict[str, Any] = {"input": "d", "conversation": session.rpartition("/")[2]}
        for path, body in (
            (f"{session}/turns", {"text": "c"}),
            (f"{session}/rewind", {"turn": 0}),
            ("/v1/responses", response),
        ):
            status, error = await served.error(path, {**body, "after": 1})
            assert (status, error["code"]) == (409, "session_busy")
        assert (await served.post(f"{session}/fork", {"after": 2}))[1]["turn"] == 2
        assert (await ask(served, "DELETE", f"{session}?after=2"))[0] == 200
        assert (await running)["status"] == "aborted"


@pytest.mark.parametrize("after", ["9" * 5000, "-1", "x", ""])
async def test_after_is_a_number_of_few_digits(after: str) -> None:
    async with serving() as served:
        session = await create(served)
        status, error = await ask(served, "DELETE", f"{session}?after={after}")
        assert (status, error["param"]) == (400, "after")


@pytest.mark.parametrize("id", ["a\n", ".", "..", "a/b", "", "x" * 129])
async def test_an_id_that_no_address_could_name(id: str) -> None:
    async with serving() as served:
        status, error = await served.error(SESSIONS, {"id": id})
        assert (status, error["param"]) == (400, "id")


async def test_an_id_of_dots_and_a_duplicate() -> None:
    async with serving() as served:
        session = await create(served, id="...")
        assert (await get(served, session))["id"] == "..."
        for path in (SESSIONS, f"{session}/fork"):
            assert (await served.error(path, {"id": "..."}))[1]["param"] == "id"
        _, error = await served.error("/open_session", {"capacity_of_str_len": 9, "session_id": "..."})
        assert (error["param"], error["code"]) == ("session_id", "duplicate_session_id")


async def test_an_owner_of_many_sessions_loses_its_own_first() -> None:
    async with serving(session_cap=3, api_key=("one", "two")) as served:
        one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))

        async def open_as(headers: dict[str, str], id: str) -> None:
            assert (await served.post(SESSIONS, {"id": id}, headers=headers))[0] == 200

        async def ids(headers: dict[str, str]) -> list[str]:
            return [session["id"] for session in (await get(served, SESSIONS, headers=headers))["data"]]

        await open_as(one, "a")
        for id in "bcde":
            await open_as(two, id)
        assert (await ids(one), await ids(two)) == (["a"], ["e", "d"])
        async with served.client.delete(f"{SESSIONS}/a", headers=one) as response:
            assert response.status == 200
        await open_as(two, "f")
        await open_as(one, "g")
        assert (await ids(one), await ids(two)) == (["g"], ["f", "e"])


@pytest.mark.parametrize(
    ("path", "body"),
    [(f"{SESSIONS}/s/turns", {"text": "a"}), ("/v1/responses", {"conversation": "s", "input": "a"})],
    ids=["turn", "response"],
)
@pytest.mark.parametrize("how", ["drain", "failure"])
async def test_an_error_for_a_turn_that_stays_is_not_to_be_tried_again(
    path: str, body: dict[str, Any], how: str
) -> None:
    async with serving() as served:
        session = await create(served, id="s")
        served.ring.pause, served.ring.failing = 0.05, how == "failure"
        running = asyncio.ensure_future(served.client.post(path, json=body))
        await served.ring.until(lambda: served.ring.open)
        await asyncio.sleep(0.02)
        if how == "drain":
            await served.server.gateway.drain(0)
        async with await running as response:
            assert response.status == {"drain": 503, "failure": 500}[how]
            assert response.headers["x-should-retry"] == "false"
            assert "Retry-After" not in response.headers
        assert len((await get(served, session))["turns"]) == 1
