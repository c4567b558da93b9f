"""Failures inside a running ring, and what clients see of them. Tokens are compared with those of an oracle."""

import asyncio
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.actors.actor import Address
from baton.actors.cache.actor import Cache
from baton.actors.cache.allocator import Allocator
from baton.actors.cache.below.limits import TierLimits
from baton.actors.cache.radix import tokens_to
from baton.actors.forward.torch_device import TorchDevice
from baton.actors.messages import Acquire, Message, Restarted
from baton.actors.runtime.relay import DeviceFailed, Relay, Unit
from baton.actors.scheduler.strategy import Strategy
from baton.actors.storage import files
from baton.actors.storage.files import StateFileHeader, read_tokens
from baton.actors.tokens import unpack
from baton.models.batch import Batch, Pools, allocate
from baton.models.decoder import Decoder
from baton.models.hash import HashModel
from baton.models.hash_definition import expected_output
from baton.models.loading.checkpoint import random_model
from tests.actors.ring import Answer, Letters, Ring, running
from tests.actors.test_ring import MAMBA2

VOCABULARY = 61
MARK = 77
ACTORS: tuple[Address, ...] = ("cache", "scheduler", "forward", "results")
TIGHT = {"slots": 6, "pages": 60, "page_size": 4, "max_running": 4, "step_tokens": 24, "track_interval": 8}


def hash_model(cls: type[HashModel] = HashModel, **more: Any) -> Any:
    return cls(vocab_size=VOCABULARY, chunk_size=8, max_position=1024, **more)


def prompts(seed: int, count: int, longest: int = 60) -> list[list[int]]:
    """Return random prompts, some of which share a prefix."""
    rng = random.Random(seed)
    stem = [rng.randrange(VOCABULARY) for _ in range(longest)]
    return [
        stem[: rng.randint(0, longest // 2)] + [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, longest // 2))]
        for _ in range(count)
    ]


async def check_all(answers: list[Answer], page_fold: bool = True) -> None:
    """Check that each request ended exactly once with the right tokens, text and log probabilities."""
    for answer in answers:
        await asyncio.wait_for(answer.done.wait(), 60)
        assert (answer.end, answer.reason) == ("length", None)
        expected = expected_output(answer.prompt, answer.request.stops.max_tokens, VOCABULARY, page_fold=page_fold)
        assert answer.tokens == expected
        assert answer.text == Letters().decode(expected)
        assert [item.token for item in answer.logprobs] == expected


def submit_all(ring: Ring, seed: int, count: int = 16) -> list[Answer]:
    return [ring.submit(prompt, 20, logprobs=0) for prompt in prompts(seed, count)]


class Faulty(HashModel):
    """A model that raises in some steps of several rows. A failed row is replayed alone, so its replay succeeds."""

    # Numbers of the calls that raise. If such a call has only one row, the next call with several rows raises instead.
    broken: tuple[int, ...] = ()
    late = False  # raise after the states have changed, instead of before
    calls = failures = 0

    def forward(self, batch: Batch, pools: Pools) -> Tensor:
        self.calls += 1
        rows = len(batch.prefill.starts if batch.prefill else []) + len(batch.decode.slots if batch.decode else [])
        left = self.broken[self.failures :]
        raising = rows > 1 and bool(left) and self.calls >= left[0]
        self.failures += raising
        if raising and not self.late:
            raise RuntimeError("a kernel failed")
        hidden = super().forward(batch, pools)
        if raising:
            raise RuntimeError("a kernel failed")
        return hidden


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_that_raises_is_replayed(late: bool, depth: int) -> None:
    model = hash_model(Faulty)
    model.broken, model.late = (1, 40, 75), late

    async def scenario() -> None:
        async with running(model, **TIGHT, depth=depth) as ring:
            await check_all(submit_all(ring, 1))
            assert model.failures == 3

    asyncio.run(scenario())


class Allergic(HashModel):
    """A model that raises whenever the token MARK is fed."""

    def forward(self, batch: Batch, pools: Pools) -> Tensor:
        if (batch.tokens == MARK).any():
            raise RuntimeError("no kernel for this")
        return super().forward(batch, pools)


def test_a_request_that_always_raises_fails_alone_and_names_the_cause() -> None:
    async def scenario() -> None:
        async with running(hash_model(Allergic), **TIGHT) as ring:
            before = submit_all(ring, 2, 6)
            failing = [ring.submit([3] * length + [MARK], 20) for length in (0, 5, 30)]
            await check_all(before + submit_all(ring, 3, 6))
            for answer in failing:
                await asyncio.wait_for(answer.done.wait(), 60)
                assert (answer.end, answer.reason) == ("error", "RuntimeError: no kernel for this")
                assert answer.tokens == []

    asyncio.run(scenario())


class Diverging(HashModel):
    """A model whose logits are NaN for a row that is fed MARK; other rows in the step are unaffected."""

    def forward(self, batch: Batch, pools: Pools) -> Tensor:
        hidden = super().forward(batch, pools)
        hidden[batch.tokens == MARK] = -1
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden.clamp(min=0)).masked_fill_(hidden < 0, torch.nan)


def test_a_row_whose_logits_are_not_finite_fails_alone_and_its_state_is_not_kept() -> None:
    async def scenario() -> None:
        async with running(hash_model(Diverging), **TIGHT) as ring:
            others = submit_all(ring, 2, 6)
            failing = [ring.submit([3] * length + [MARK], 20) for length in (0, 5, 30)]
            await check_all(others + submit_all(ring, 3, 6))
            for answer in failing:
                await asyncio.wait_for(answer.done.wait(), 60)
                assert (answer.end, answer.reason) == ("error", "what the model computed is not finite")
                assert answer.tokens == []
            assert all(MARK not in unpack(tokens_to(node)) for node in ring.relay.unit.cache.tree.states)

    asyncio.run(scenario())


@pytest.mark.parametrize("strategy", [Strategy.JUST_IN_TIME, Strategy.EXTRA_BUFFER])
@pytest.mark.parametrize("at", [5, 40, 100])
def test_no_state_is_kept_after_a_prompt_stops_being_finite(strategy: Strategy, at: int) -> None:
    """The prompt takes many steps, and only the last of them draws a token."""
    model = random_model({**MAMBA2, "tie_word_embeddings": False}, torch.float32, torch.device("cpu"), seed=1)
    assert isinstance(model, Decoder)
    model.backbone.embeddings.weight.detach()[MARK] = torch.nan
    stem = [(7 * i) % VOCABULARY for i in range(150)]

    async def scenario() -> None:
        async with running(model, **TIGHT, strategy=strategy) as ring:
            failing = ring.submit([*stem[:at], MARK, *stem[at:]], 4, message_ends=(24, 48, 72, 128))
            await asyncio.wait_for(failing.done.wait(), 60)
            assert (failing.end, failing.reason) == ("error", "what the model computed is not finite")
            slots = [node.state.slot for node in ring.relay.unit.cache.tree.states if node.state is not None]
            assert all(bool(state[slots].isfinite().all()) for state in ring.pools.state)
            sound = ring.submit(stem, 4)
            await asyncio.wait_for(sound.done.wait(), 60)
            assert sound.end == "length"

    asyncio.run(scenario())


def break_actor(ring: Ring, address: Address, after: int) -> None:
    """Make an actor of the current unit raise when it receives its message number `after`."""
    actor, left = ring.relay.unit.actors[address], after
    receive: Callable[[Message], None] = actor.receive

    def raising(message: Message) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise RuntimeError(f"{address} is broken")
        receive(message)

    actor.receive = raising  # type: ignore[method-assign]


@pytest.mark.parametrize("address", ACTORS)
@pytest.mark.parametrize("after", [1, 12, 40])
def test_an_actor_that_raises_causes_a_restart_and_loses_no_answer(address: Address, after: int) -> None:
    async def scenario() -> None:
        async with running(hash_model(), **TIGHT, restarts=3) as ring:
            break_actor(ring, address, after)
            answers = [*submit_all(ring, 4), ring.submit([5, 6, 7], 20, logprobs=0, prompt_logprobs_from=0)]
            await check_all(answers)
            assert [item.token for item in answers[-1].prompt_logprobs] == [5, 6, 7]
            assert ring.relay.counters()["restarts"] == 1

    asyncio.run(scenario())


def test_after_a_restart_files_are_read_in_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readers: list[threading.Thread] = []

    def read(path: Path) -> tuple[StateFileHeader, bytes]:
        readers.append(threading.current_thread())
        return read_tokens(path)

    async def scenario() -> None:
        tiers = TierLimits(host_bytes=1 << 20, disk_bytes=1 << 20, state_bytes=64, token_bytes=64)
        async with running(hash_model(), **TIGHT, restarts=1, tiers=tiers, folder=tmp_path) as ring:
            await ring.turn("s", [5, 6, 7])
            assert (await ring.suspend("s")).tier == "disk"
            monkeypatch.setattr(files, "read_tokens", read)
            break_actor(ring, "cache", 1)
            await check_all([ring.submit([1, 2, 3], 20, logprobs=0)])
            ring.kept.clear()
            ring.name("s", [5, 6, 7])
            await ring.until(lambda: "s" in ring.kept)
            assert ring.kept["s"][0] == "tokens"
            assert len(readers) == 1 and readers[0] is not threading.main_thread()

    asyncio.run(scenario())


def test_a_restart_refuses_no_request_because_of_a_full_queue() -> None:
    model = hash_model(page_fold=False)

    async def scenario() -> None:
        async with running(model, restarts=1, max_running=4, max_queue=4) as ring:
            state = ring.relay.unit.scheduler.state
            answers = [ring.submit(prompt, 200, logprobs=0) for prompt in prompts(10, 4)]
            await ring.until(lambda: len(state.rows) == 4)
            answers += [ring.submit(prompt, 20, logprobs=0) for prompt in prompts(11, 4)]
            await ring.until(lambda: len(state.queue) == 4)
            break_actor(ring, "forward", 3)
            await check_all(answers, page_fold=False)
            assert ring.relay.counters()["restarts"] == 1

    asyncio.run(scenario())


def test_what_is_submitted_around_a_restart_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Answer] = []

    async def scenario() -> None:
        async with running(hash_model(), **TIGHT, restarts=1) as ring:

            def submit() -> None:
                answers.append(ring.submit([1, 2, 3], 20, logprobs=0))

            async def closing(unit: Unit) -> None:
                submit()
                await close(unit)
                submit()

            def making(relay: Relay) -> Unit:
                asyncio.get_running_loop().call_soon(submit)
                return make_unit(relay)

            close, make_unit = Unit.close, Relay._make_unit
            monkeypatch.setattr(Unit, "close", closing)
            monkeypatch.setattr(Relay, "_make_unit", making)
            break_actor(ring, "results", 3)
            submit()
            await ring.until(lambda: len(answers) == 4)
            monkeypatch.undo()
            await check_all(answers)
            assert ring.relay.counters()["restarts"] == 1

    asyncio.run(scenario())


def test_poisoned_slots_and_restarts_together() -> None:
    async def scenario() -> None:
        async with running(hash_model(), **TIGHT, restarts=3, poison_freed=True) as ring:
            answers: list[Answer] = []
            for address in ("forward", "results", "cache"):
                break_actor(ring, address, 30)
                answers += submit_all(ring, 6)
                await check_all(answers)
            assert ring.relay.counters()["restarts"] == 3

    asyncio.run(scenario())


def test_too_many_restarts_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    receive = Cache.receive

    def raising(cache: Cache, message: Message) -> None:
        if isinstance(message, Acquire):
            raise RuntimeError("the cache is broken")
        receive(cache, message)

    monkeypatch.setattr(Cache, "receive", raising)

    async def scenario() -> None:
        async with running(hash_model(), **TIGHT, restarts=2) as ring:
            answer = ring.submit([1, 2, 3])
            await asyncio.wait({ring.carrying}, timeout=10)
            assert ring.relay.counters()["restarts"] == 2
            assert not answer.done.is_set()

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(scenario())
    assert caught.group_contains(RuntimeError, match="the cache is broken")


def test_a_report_that_cannot_be_sent_causes_a_restart() -> None:
    """Errors in messages that the device's thread posts to the event loop are supervised too."""

    async def scenario() -> None:
        async with running(hash_model(), **TIGHT, restarts=1) as ring:
            runtime = ring.relay.unit.runtime
            send, left = runtime.send, 9

            def raising(sender: str, to: Address, message: Message) -> None:
                nonlocal left
                left -= sender == "device"
                if sender == "device" and left == 0:
                    raise RuntimeError("no mailbox")
                send(sender, to, message)

            runtime.send = raising  # type: ignore[method-assign]
            await check_all(submit_all(ring, 4))
            assert ring.relay.counters()["restarts"] == 1

    asyncio.run(scenario())


def test_an_api_that_raises_on_restarted_causes_another_restart() -> None:
    async def scenario() -> None:
        async with running(hash_model(), **TIGHT, restarts=2) as ring:
            receive, left = ring.receive, 1

            def raising(message: Message) -> None:
                nonlocal left
                if isinstance(message, Restarted) and left:
                    left -= 1
                    raise RuntimeError("the api is broken")
                receive(message)

            ring.receive = raising  # type: ignore[method-assign]
            break_actor(ring, "forward", 12)
            await check_all(submit_all(ring, 4))
            assert ring.relay.counters()["restarts"] == 2

    asyncio.run(scenario())


class LostDevice:
    """A device that reports itself as lost when `call` is made."""

    def __init__(self, device: TorchDevice, call: str) -> None:
        self._device, self._call = device, call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name) if name != self._call else self._raise

    def _raise(self, *_: object) -> None:
        raise torch.AcceleratorError("the device is gone")


@pytest.mark.parametrize("call", ["clear", "open_row", "launch", "poison"])
def test_a_lost_device_ends_the_run(call: str) -> None:
    async def scenario() -> None:
        wrap = lambda device: LostDevice(device, call)  # noqa: E731
        async with running(hash_model(), **TIGHT, restarts=3, poison_freed=True, wrap=wrap) as ring:
            submit_all(ring, 7)
            await asyncio.wait({ring.carrying}, timeout=20)
            assert "restarts" not in ring.relay.counters()

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(scenario())
    assert caught.group_contains(DeviceFailed)


@pytest.mark.parametrize("strategy", Strategy)
@pytest.mark.parametrize("page_fold", [False, True])
def test_without_checkpoint_slots_the_tokens_are_the_same(
    monkeypatch: pytest.MonkeyPatch, strategy: Strategy, page_fold: bool
) -> None:
    monkeypatch.setattr(Allocator, "checkpoint_slot", lambda self, account, position, kind: account.pass_by(position))

    async def scenario() -> None:
        async with running(hash_model(page_fold=page_fold), **TIGHT, strategy=strategy) as ring:
            await check_all(submit_all(ring, 8), page_fold)
            counters = ring.relay.counters()
            assert counters.get("checkpoints_granted", 0) == 0
            assert (counters.get("checkpoints_skipped", 0) > 0) == (strategy is not Strategy.NO_BUFFER)

    asyncio.run(scenario())


@pytest.mark.parametrize("strategy", Strategy)
def test_poisoning_freed_slots_changes_no_answer(strategy: Strategy) -> None:
    async def scenario() -> None:
        async with running(hash_model(), **TIGHT, poison_freed=True, strategy=strategy) as ring:
            await check_all(submit_all(ring, 9))

    asyncio.run(scenario())


def test_poison_is_no_number_and_stays_in_its_slot() -> None:
    floats = random_model(MAMBA2, torch.float32, torch.device("cpu"), seed=1)
    for model in (floats, hash_model()):
        pools = allocate(model, 3, 0, 16, torch.device("cpu"))
        pools.poison(1)
        for tensor in pools.state:
            poisoned = tensor.isnan() if tensor.is_floating_point() else tensor == torch.iinfo(tensor.dtype).max
            assert poisoned[1].all() and not poisoned[0].any() and not poisoned[2].any()


def test_poison_shows_a_slot_that_is_not_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchDevice, "clear", lambda device, slot: None)

    async def scenario() -> None:
        async with running(hash_model(), slots=1, poison_freed=True, max_running=1) as ring:
            expected = expected_output([1, 2, 3], 5, VOCABULARY)
            assert (await ring.ask([1, 2, 3], 5)).tokens == expected
            await ring.flush()
            assert (await ring.ask([1, 2, 3], 5)).tokens != expected

    asyncio.run(scenario())
