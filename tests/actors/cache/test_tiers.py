"""States on their way from the pool to host memory, to disk and back, in a ring with small random models."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from baton.actors.cache.below.limits import TierLimits
from baton.actors.forward.launching import Device, Done, Pending
from baton.actors.messages import Transferred
from baton.actors.storage.files import StateFiles
from baton.models.batch import Model
from tests.actors.ring import Ring, running
from tests.actors.test_ring import MODELS, greedy, prompts, small


def limits(model: Model, host: int = 100, disk: int = 0, session_slots: int | None = None) -> TierLimits:
    """Return limits with room for `host` states of 200 tokens in host memory and `disk` on disk."""
    state = sum(shape.nbytes for shape in model.state_specs())
    token = sum(shape.nbytes for shape in model.kv_specs())
    each = state + 200 * token
    return TierLimits(host * each, disk * (each + 10_000), state, token, session_slots)


async def talk(ring: Ring, model: Model, histories: dict[str, list[int]], new: list[int]) -> list[str]:
    """Run a turn of each session and check its tokens; return where each session's state was found."""
    origins = []
    for session, history in histories.items():
        answer = await ring.turn(session, history + new)
        assert answer.tokens == greedy(model, history + new, 8), session
        # The history's last token was sampled but never fed, so the state has not consumed it.
        assert answer.cached == max(len(history) - 1, 0), session
        histories[session] = history + new + answer.tokens
        origins.append(answer.origin)
    return origins


@dataclass(frozen=True)
class CopiedLate:
    """A Pending that makes its copy when it is collected, on a thread other than the one that runs the steps."""

    copy: Callable[[], Pending[Transferred]]

    def passed(self) -> bool:
        return False

    def collect(self) -> Done[Transferred]:
        time.sleep(0.005)
        return self.copy().collect()


class CopiesAside:
    """A device wrapper whose copies to and from host memory are slow and run concurrently with its steps."""

    copies_aside = True

    def __init__(self, device: Device) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def export(self, *arguments: Any) -> CopiedLate:
        return CopiedLate(partial(self._device.export, *arguments))

    def fill(self, *arguments: Any) -> CopiedLate:
        return CopiedLate(partial(self._device.fill, *arguments))


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize(("codec_check", "aside"), [(False, False), (True, False), (False, True)])
def test_more_sessions_than_slots_resume_from_host_memory(family: str, codec_check: bool, aside: bool) -> None:
    model, more = small(family), {"tiers": limits(small(family)), "max_running": 2, "pages": 80}
    if aside:
        more["wrap"] = CopiesAside

    async def scenario() -> None:
        async with running(model, slots=3, poison_freed=True, codec_check=codec_check, **more) as ring:
            histories = {f"s{i}": prompt for i, prompt in enumerate(prompts(3, 6, longest=60))}
            for session, prompt in histories.items():
                answer = await ring.turn(session, prompt)
                assert answer.tokens == greedy(model, prompt, 8)
                histories[session] = prompt + answer.tokens
            for _ in range(2):
                origins = await talk(ring, model, histories, [1, 2, 3])
                assert origins.count("host") >= 4, origins
            assert {tier for tier, _ in ring.kept.values()} == {"slot", "host"}
            resumed = {name: n for name, n in ring.relay.counters().items() if name.startswith("resumed_from")}
            assert sum(resumed.values()) == 12 and resumed["resumed_from_host"] >= 8, resumed

    asyncio.run(scenario())


@pytest.mark.parametrize("family", MODELS)
def test_a_suspended_session_resumes_in_another_server(family: str, tmp_path: Path) -> None:
    model = small(family)
    histories: dict[str, list[int]] = {}

    async def first() -> None:
        async with running(model, tiers=limits(model, disk=10), folder=tmp_path) as ring:
            for i, prompt in enumerate(prompts(5, 3, longest=90)):
                answer = await ring.turn(f"s{i}", prompt)
                histories[f"s{i}"] = prompt + answer.tokens
            suspended = await ring.suspend("s0")
            assert (suspended.tier, suspended.position) == ("disk", len(histories["s0"]) - 1)
            assert len(files(tmp_path)) == 1
        # The drain wrote the other two files.
        assert len(files(tmp_path)) == 3

    async def second() -> None:
        async with running(model, tiers=limits(model, disk=10), folder=tmp_path, page_size=8) as ring:
            for session, history in histories.items():
                ring.name(session, history)
            await ring.until(lambda: len(ring.kept) == 3)
            assert ring.kept == {session: ("disk", len(history) - 1) for session, history in histories.items()}
            assert await talk(ring, model, histories, [4, 5]) == ["disk"] * 3
            for session in histories:
                ring.unname(session)
        assert not files(tmp_path)

    asyncio.run(first())
    asyncio.run(second())


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "gone"])
def test_a_damaged_file_is_reported_and_costs_only_time(damage: str, tmp_path: Path) -> None:
    model = small("nemotron_h")

    async def scenario() -> None:
        async with running(model, tiers=limits(model, disk=10), folder=tmp_path) as ring:
            prompt = prompts(6, 1)[0]
            answer = await ring.turn("s", prompt)
            await ring.suspend("s")
            [path] = files(tmp_path)
            spoil(path, damage)
            history = prompt + answer.tokens
            answer = await ring.turn("s", [*history, 7])
            assert answer.tokens == greedy(model, [*history, 7], 8)
            assert answer.miss_reason == "damaged"
            assert answer.cached < len(history) - 1
            assert ring.relay.counters()["damaged_files"] == 1
            assert not path.exists()

    asyncio.run(scenario())


@pytest.mark.parametrize("damage", ["cut", "flip header", "empty", "other model"])
def test_unusable_files_are_deleted_at_the_start(damage: str, tmp_path: Path) -> None:
    model = small("mamba2")

    async def scenario(after: bool) -> None:
        async with running(model, tiers=limits(model, disk=10), folder=tmp_path) as ring:
            if after:
                assert not files(tmp_path)
                ring.name("s", prompt)
                await ring.until(lambda: "s" in ring.kept)
                assert ring.kept["s"] == ("tokens", 0)
            else:
                await ring.turn("s", prompt)

    prompt = prompts(7, 1)[0]
    asyncio.run(scenario(after=False))
    [path] = files(tmp_path)
    (tmp_path / "half.tmp").write_bytes(b"half")
    if damage == "other model":
        content = path.read_bytes()
        assert content.count(b"this model") == 1
        path.write_bytes(content.replace(b"this model", b"that model"))
    else:
        spoil(path, damage)
    asyncio.run(scenario(after=True))


async def quiet(ring: Ring) -> None:
    """Wait until no copy is in progress. Check three times, because the end of one copy may start another."""
    calm = 0
    async with asyncio.timeout(30):
        while calm < 3:
            await asyncio.sleep(0.005)
            calm = calm + 1 if ring.relay.unit.cache.tiers.idle else 0


def files(folder: Path) -> list[Path]:
    return list(folder.iterdir())


def spoil(path: Path, damage: str) -> None:
    content = bytearray(path.read_bytes())
    match damage:
        case "cut":
            path.write_bytes(content[:-100])
        case "flip":
            content[-1000] ^= 1
            path.write_bytes(content)
        case "flip header":
            content[20] ^= 1
            path.write_bytes(content)
        case "empty":
            path.write_bytes(b"")
        case "gone":
            path.unlink()


def test_without_room_below_only_the_tokens_remain() -> None:
    model = small("mamba2")

    async def scenario() -> None:
        async with running(model, slots=2, tiers=limits(model, host=0), max_running=1, track_interval=0) as ring:
            histories = {f"s{i}": prompt for i, prompt in enumerate(prompts(8, 4, longest=12))}
            for session, prompt in histories.items():
                histories[session] = prompt + (await ring.turn(session, prompt)).tokens
            assert ring.kept["s0"] == ("tokens", 0)
            answer = await ring.turn("s0", [*histories["s0"], 1])
            assert answer.origin == "tokens" and answer.miss_reason == "evicted"
            assert answer.tokens == greedy(model, [*histories["s0"], 1], 8)

    asyncio.run(scenario())


def test_the_least_recently_used_leave_host_memory_for_the_disk(tmp_path: Path) -> None:
    model = small("mamba2")

    async def scenario() -> None:
        tiers = limits(model, host=2, disk=4)
        async with running(model, slots=2, tiers=tiers, folder=tmp_path, max_running=1, policy="lru") as ring:
            histories = {f"s{i}": prompt for i, prompt in enumerate(prompts(9, 10, longest=12))}
            for session, prompt in histories.items():
                histories[session] = prompt + (await ring.turn(session, prompt)).tokens
                figures = ring.relay.gauges()["stored"]
                assert isinstance(figures, dict)
                assert figures["host_bytes"] <= tiers.host_bytes and figures["disk_bytes"] <= tiers.disk_bytes
                await quiet(ring)
            tiers_now = [ring.kept[session][0] for session in histories]
            assert tiers_now == sorted(tiers_now, key=["tokens", "disk", "host", "slot"].index)
            assert set(tiers_now) == {"tokens", "disk", "host", "slot"}
            for session in reversed(histories):
                answer = await ring.turn(session, [*histories[session], 1])
                assert answer.tokens == greedy(model, [*histories[session], 1], 8)

    asyncio.run(scenario())


def test_sessions_keep_no_more_slots_than_they_may() -> None:
    model = small("mamba2")

    async def scenario() -> None:
        async with running(model, tiers=limits(model, session_slots=1)) as ring:
            for i, prompt in enumerate(prompts(10, 4)):
                await ring.turn(f"s{i}", prompt)
            await ring.until(lambda: sorted(tier for tier, _ in ring.kept.values()) == ["host"] * 3 + ["slot"])
            assert ring.kept["s3"][0] == "slot"

    asyncio.run(scenario())


def test_a_fork_and_its_parent_resume_from_one_state(tmp_path: Path) -> None:
    model = small("nemotron_h")

    async def scenario() -> None:
        async with running(model, slots=2, tiers=limits(model, disk=10), folder=tmp_path, max_running=2) as ring:
            prompt = prompts(11, 1)[0]
            history = prompt + (await ring.turn("parent", prompt)).tokens
            ring.name("fork", history)
            await ring.until(lambda: "fork" in ring.kept)
            await ring.suspend("parent")
            assert ring.kept == {"parent": ("disk", len(history) - 1), "fork": ("disk", len(history) - 1)}
            for session, token in (("fork", 1), ("parent", 2)):
                answer = await ring.turn(session, [*history, token])
                assert answer.tokens == greedy(model, [*history, token], 8)
                assert answer.cached == len(history) - 1

    asyncio.run(scenario())


def test_a_disk_that_fails_is_not_tried_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small("mamba2")

    def full(self: StateFiles, key: int, salt: str, tokens: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(StateFiles, "_write", full)

    async def scenario() -> None:
        tiers = limits(model, host=1, disk=10, session_slots=0)
        async with running(model, tiers=tiers, folder=tmp_path) as ring:
            histories = {f"s{i}": prompt for i, prompt in enumerate(prompts(12, 4))}
            for session, prompt in histories.items():
                histories[session] = prompt + (await ring.turn(session, prompt)).tokens
                await quiet(ring)
            assert 1 <= ring.relay.counters()["failed_writes"] <= 4
            # The newest copy displaced the three that could not be written.
            assert [tier for tier, _ in ring.kept.values()] == ["tokens"] * 3 + ["host"]
            assert (await ring.suspend("s3")).tier == "host"
            for session, history in histories.items():
                assert (await ring.turn(session, [*history, 1])).tokens == greedy(model, [*history, 1], 8)

    asyncio.run(scenario())


def test_the_slots_of_sessions_are_bounded_without_tiers_too() -> None:
    model = small("mamba2")

    async def scenario() -> None:
        async with running(model, tiers=limits(model, host=0, session_slots=1)) as ring:
            for i, prompt in enumerate(prompts(13, 3)):
                await ring.turn(f"s{i}", prompt)
            assert sorted(tier for tier, _ in ring.kept.values()) == ["slot", "tokens", "tokens"]

    asyncio.run(scenario())


def test_every_session_is_written_at_the_end_even_if_few_fit_into_host_memory(tmp_path: Path) -> None:
    model = small("mamba2")

    async def scenario() -> None:
        async with running(model, tiers=limits(model, host=2, disk=20), folder=tmp_path) as ring:
            for i, prompt in enumerate(prompts(14, 10, longest=12)):
                await ring.turn(f"s{i}", prompt)
        assert len(files(tmp_path)) == 10

    asyncio.run(scenario())


def test_files_beyond_the_limit_and_without_a_session_are_deleted(tmp_path: Path) -> None:
    model = small("mamba2")
    histories: dict[str, list[int]] = {}

    async def scenario(disk: int) -> None:
        async with running(model, tiers=limits(model, disk=disk), folder=tmp_path) as ring:
            if histories:
                ring.name("s3", histories["s3"])
                await ring.until(lambda: "s3" in ring.kept)
                assert ring.kept["s3"] == ("disk", len(histories["s3"]) - 1)
                figures = ring.relay.gauges()["stored"]
                assert isinstance(figures, dict) and figures["disk_bytes"] <= limits(model, disk=disk).disk_bytes
                assert figures["disk"] < 4
                return
            for i, prompt in enumerate(prompts(15, 4, longest=12)):
                histories[f"s{i}"] = prompt + (await ring.turn(f"s{i}", prompt)).tokens

    asyncio.run(scenario(10))
    assert len(files(tmp_path)) == 4
    (tmp_path / ".tmpA1b2C3").write_bytes(b"left by a writer that was killed")
    asyncio.run(scenario(2))
    assert len(files(tmp_path)) == 1
