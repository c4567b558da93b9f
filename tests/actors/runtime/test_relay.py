"""The relay: how often it may restart its unit, what it counts over all units, what it shows of the current one."""

import asyncio
from collections import Counter
from typing import Any

import anyio
import pytest

from baton.actors.actor import Address
from baton.actors.lease import Ledger, Move, Place
from baton.actors.messages import Abort, Message
from baton.actors.runtime.events import Event, MoveEvent, UnitEvent
from baton.actors.runtime.mailboxes import Runtime, as_is
from baton.actors.runtime.relay import Relay, RelayConfig
from baton.actors.scheduler.plan import Limits
from baton.models.hash import HashModel
from baton.models.hash_definition import expected_output
from tests.actors.ring import Letters, running

MODEL: Any = HashModel(vocab_size=61, chunk_size=8, max_position=1024)


def relay(restarts: int = 3, **more: Any) -> Relay:
    """Return a relay that is not running yet."""
    api: Any = type("Api", (), {"act": lambda self: None, "receive": lambda self, message: None})()
    device: Any = type("Device", (), {"drop_all": lambda self: None, "enter_thread": lambda self: None})()
    config = RelayConfig(4, 0, Limits(), restarts=restarts)
    return Relay(config, device, Letters(), lambda send: api, **more)


@pytest.mark.parametrize(("third", "allowed"), [(1060.0, False), (1060.5, True)])
def test_restarts_are_counted_within_a_minute(third: float, allowed: bool) -> None:
    async def scenario() -> None:
        made = relay(restarts=2)
        times = iter((1000.0, 1010.0, third))
        asyncio.get_running_loop().time = lambda: next(times)  # type: ignore[method-assign]
        assert [made._may_restart() for _ in range(3)] == [True, True, allowed]
        assert vars(made.unit.runtime)["_carry"] is as_is, "it is checked only on demand"
        del asyncio.get_running_loop().time  # type: ignore[method-assign]
        await made.unit.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("steps", [0, 1, 2, 4, 8, 16])
def test_a_cancellation_that_meets_an_error_is_not_lost(steps: int) -> None:
    """The cancellation comes `steps` steps of the event loop after an actor has raised."""

    async def scenario() -> None:
        async with running(MODEL, restarts=3) as ring:

            def cancel_after(steps: int) -> None:
                if steps:
                    asyncio.get_running_loop().call_soon(cancel_after, steps - 1)
                else:
                    ring.carrying.cancel()

            def broken() -> None:
                cancel_after(steps)
                raise RuntimeError("broken")

            ring.relay.unit.scheduler.act = broken  # type: ignore[method-assign]
            ring.submit([1, 2, 3], 4)
            await asyncio.wait({ring.carrying}, timeout=30)
            assert ring.carrying.cancelled()

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(scenario())


def test_counters_continue_after_a_restart() -> None:
    async def scenario() -> None:
        async with running(MODEL, restarts=1) as ring:
            await ring.ask([1, 2, 3], 4)
            before, moves, unit = ring.relay.counters(), ring.relay.lease_moves(), ring.relay.unit
            assert before["generation_tokens"] == 4 and before["prefix_cache_queries"] == 3
            assert before["messages"] == unit.runtime.delivered and moves == unit.ledger.moves
            unit.cache.receive = fail  # type: ignore[method-assign]
            assert (await ring.ask([4, 5, 6], 4)).tokens == expected_output([4, 5, 6], 4, 61)
            after = ring.relay.counters()
            assert after["restarts"] == 1 and after["generation_tokens"] == 8 and after["prefix_cache_queries"] == 6
            assert after["messages"] > before["messages"] + ring.relay.unit.runtime.delivered - 1
            assert ring.relay.unit is not unit and ring.relay.ledger is ring.relay.unit.ledger
            assert ring.relay.lease_moves()["take"] > moves["take"]

    def fail(message: Message) -> None:
        raise RuntimeError("broken")

    asyncio.run(scenario())


def test_gauges_show_the_current_state() -> None:
    async def scenario() -> None:
        async with running(MODEL, slots=6, max_running=1) as ring:
            answers = [ring.submit([token, 2, 3], 200) for token in (1, 2, 3)]
            await ring.until(lambda: bool(answers[0].tokens))
            gauges = ring.relay.gauges()
            assert (gauges["running"], gauges["waiting"]) == (1, 2)
            assert sum(gauges["slots"].values()) == 6  # type: ignore[union-attr]
            assert gauges["pages"] == {"free": 63, "used": 1, "cached": 0}
            assert set(gauges["mailbox_depth"]) == {"api", "cache", "scheduler", "forward", "results"}  # type: ignore[arg-type]
            assert [line["request"] for line in ring.relay.debug_slots() if line["request"]] == ["r0"]
            assert ring.relay.debug_tree() and ring.relay.trace == "" and ring.relay.audit() == []
            for name in ("r0", "r1", "r2"):
                ring.abort(name)
            await asyncio.gather(*(answer.done.wait() for answer in answers))
            await ring.until(lambda: ring.relay.gauges()["running"] == 0 and not ring.relay.unit.cache.accounts)
            slots = ring.relay.gauges()["slots"]
            assert isinstance(slots, dict) and slots[str(Place.CACHED)] >= 1

    asyncio.run(scenario())


def test_moves_are_reported_as_events_and_to_on_move() -> None:
    async def scenario() -> None:
        events, moves = list[Event](), list[Move]()
        made = relay(on_event=events.append, on_move=moves.append, clock=lambda: 5.0)
        lease = made.ledger.take("cache")
        assert lease is not None
        assert moves == [Move(0, 1, Place.OWNED, "cache", "take")]
        assert events == [UnitEvent(5.0, 4), MoveEvent(5.0, 0, 1, "owned", "cache", "take")]
        await made.unit.close()
        alone = relay(on_event=events.append)
        assert alone.ledger.take("cache") is not None and len(moves) == 1
        assert isinstance(events[-1], MoveEvent)
        await alone.unit.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("poison", [False, True])
def test_every_move_is_reported_whether_freed_slots_are_poisoned_or_not(poison: bool) -> None:
    async def scenario() -> None:
        moves: list[Move] = []
        async with running(MODEL, poison_freed=poison) as ring:
            unit = ring.relay.unit
            ring.relay.on_move = unit._on_move = moves.append
            if not poison:
                unit.ledger._on_move = moves.append
            before = unit.ledger.moves.copy()
            await ring.ask([1, 2, 3], 4)
            await ring.until(lambda: not unit.cache.accounts)
            assert Counter(move.how for move in moves) == unit.ledger.moves - before

    asyncio.run(scenario())


def test_a_restart_is_reported_and_the_old_device_thread_has_ended() -> None:
    async def scenario() -> None:
        errors: list[Exception] = []
        async with running(MODEL, restarts=1) as ring:
            vars(ring.relay)["_on_restart"] = errors.append
            old = ring.relay.unit
            old.cache.receive = fail  # type: ignore[method-assign]
            assert (await ring.ask([4, 5, 6], 4)).end == "length"
            [broken] = errors
            assert isinstance(broken, ExceptionGroup) and broken.subgroup(RuntimeError) is not None
            assert not vars(old.device)["_thread"].is_alive() and vars(old.ledger)["_closed"]
            assert vars(ring.relay.unit.device)["_thread"].is_alive()
        assert vars(ring.relay.unit.ledger)["_closed"]

    def fail(message: Message) -> None:
        raise RuntimeError("broken")

    asyncio.run(scenario())


def test_after_a_cancellation_the_device_thread_has_ended() -> None:
    async def scenario() -> None:
        made = relay()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(made.run)
            await anyio.sleep(0.01)
            tasks.cancel_scope.cancel()
        assert not vars(made.unit.device)["_thread"].is_alive()

    asyncio.run(scenario())


class Echo:
    """An actor that records how many messages it received before each `act`."""

    def __init__(self) -> None:
        self.received, self.acted = 0, list[int]()

    def receive(self, message: Message) -> None:
        self.received += 1

    def act(self) -> None:
        self.acted.append(self.received)

    def leases(self) -> list[Any]:
        return []


def test_an_actor_acts_when_its_mailbox_is_empty_or_after_many_messages() -> None:
    async def scenario() -> None:
        runtime, echo, other = Runtime(Ledger(1)), Echo(), Echo()
        for address, actor in (("cache", echo), ("scheduler", other)):
            runtime.add(address, actor)  # type: ignore[arg-type]
        for _ in range(256 + 3):
            runtime.send("api", "cache", Abort("r"))
        running = asyncio.create_task(runtime.run())
        await asyncio.sleep(0.05)
        assert echo.acted == [256, 256 + 3] and other.acted == []
        assert runtime.delivered == 256 + 3
        addresses: tuple[Address, ...] = ("cache", "scheduler")
        assert tuple(runtime.actors) == addresses
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(scenario())
