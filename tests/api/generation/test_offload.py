"""Work in threads: a time limit ends the work whatever exceptions it catches, and has no effect on finished work."""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from baton.api.generation import chat_prompt
from baton.api.generation.offload import Limit, OutOfTime, within
from baton.api.serve import SWITCH_INTERVAL_S
from tests.api.fake_ring import serving

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def as_in_the_server() -> Iterator[None]:
    """Use the server's interval for switching between threads (`sys.setswitchinterval`)."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    yield
    sys.setswitchinterval(before)


def counting() -> int:
    """Count for about 10 ms, in small steps."""
    total = 0
    for _ in range(200_000):
        total += 1
    return total


def endless() -> int:
    total = 0
    while True:
        try:
            total += 1
        except Exception:
            total -= 1


async def test_endless_work_is_ended_without_blocking_the_loop() -> None:
    began = time.monotonic()
    ending = asyncio.ensure_future(within(0.2, endless))
    beats = 0
    while not ending.done():
        await asyncio.sleep(0.01)
        beats += 1
    with pytest.raises(OutOfTime):
        await ending
    assert beats > 3 and time.monotonic() - began < 5


async def test_work_that_ends_in_time() -> None:
    assert await within(60, lambda: 5) == 5
    with pytest.raises(KeyError):
        await within(60, lambda: {}["a"])


def test_a_limit_that_strikes_too_late_has_no_effect() -> None:
    struck = 0
    for pause in range(60):
        limit = Limit()
        timer = threading.Timer(pause / 3000, limit.strike)
        timer.start()
        try:
            assert limit.run(counting) == 200_000
        except OutOfTime:
            struck += 1
        timer.join()
        assert sum(range(1000)) == 499_500, "nothing is left to be raised here"
    assert 0 < struck < 60


STRIKES = """
import sys, threading
from tests.api.generation.test_offload import Limit, counting
sys.setswitchinterval(1e-4)
for pause in range(100):
    limit = Limit()
    timer = threading.Timer(pause / 5000, limit.strike)
    timer.start()
    try:
        limit.run(counting)
    except BaseException:
        pass
    timer.join()
sys.setprofile(lambda *_: None)
(lambda: None)()
"""


def test_a_limit_that_strikes_too_late_leaves_no_pending_exception() -> None:
    """CPython 3.11 loops for ever at the end of STRIKES if an asynchronous exception is still pending."""
    subprocess.run([sys.executable, "-c", STRIKES], timeout=60, check=True)


async def test_work_whose_caller_is_cancelled_is_ended_too() -> None:
    ended = threading.Event()

    def work() -> None:
        try:
            endless()
        finally:
            ended.set()

    waiting = asyncio.ensure_future(within(0.3, work))
    await asyncio.sleep(0.1)
    waiting.cancel()
    assert await asyncio.to_thread(ended.wait, 10)


async def test_a_template_that_never_ends_is_a_500(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_prompt, "TEMPLATE_LIMIT_S", 0.2)
    async with serving() as served:
        served.server.ready().text.encode_marked_chat = lambda *_, **__: endless()  # type: ignore[method-assign]
        messages = [{"role": "user", "content": "a"}]
        status, error = await served.error("/v1/chat/completions", {"messages": messages})
        assert status == 500 and "did not finish within 0.2 s" in error["message"]
        status, _ = await served.post("/v1/completions", {"prompt": "a"})
        assert status == 200
