"""Linked engines that are killed, frozen and cut off under load: every request is answered right, nothing is lost."""

import random
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from http.client import HTTPException
from itertools import count

import pytest

from baton.actors.peers.nixl import load_nixl
from tests.api.server_process import SERVE, ServerProcess
from tests.api.silent_proxy import SilentProxy
from tests.api.test_peers import PATIENCE_S, SMALL, generate, metrics, prompt, wait_for_link

AT_ONCE = 4
TOKENS = 400  # of a prompt
MOST_GROWTH_MIB = 48.0  # of a survivor's memory, once its caches are full: allocators keep what a burst has taken
ROUNDS = [1, pytest.param(25, marks=pytest.mark.soak)]
_seeds = count(1000)

Linked = tuple[ServerProcess, ServerProcess, SilentProxy]


@pytest.fixture(scope="module")
def reference() -> Iterator[ServerProcess]:
    """An engine without peers, whose answers are the right ones."""
    with ServerProcess((*SERVE, *SMALL)) as server:
        yield server


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture(params=["sockets", pytest.param("nixl", marks=pytest.mark.soak)], scope="module")
def mover(request: pytest.FixtureRequest) -> str:
    if request.param == "nixl":
        try:
            load_nixl()
        except ImportError as error:
            pytest.skip(str(error))  # an extra: everything else works without it
    return str(request.param)


def prefill_engine(port: int, mover: str) -> ServerProcess:
    address = f"127.0.0.1:{port}"
    return ServerProcess((*SERVE, *SMALL, "--role", "prefill", "--peer-listen", address, "--peer-mover", mover))


def decode_engine(port: int, mover: str) -> ServerProcess:
    return ServerProcess((*SERVE, *SMALL, "--role", "decode", "--peer", f"127.0.0.1:{port}", "--peer-mover", mover))


def asked(engine: ServerProcess) -> float:
    """Return how many states an engine has asked its peer for."""
    counts = re.findall(r'baton:peer_states_total\{[^}]*outcome="asked"[^}]*\} (\S+)', metrics(engine))
    return sum(map(float, counts))


@pytest.fixture(scope="module")
def linked(mover: str) -> Iterator[Linked]:
    """A prefill engine, a decode engine, and the proxy through which the second is connected to the first."""
    port = free_port()
    with prefill_engine(port, mover) as prefill, SilentProxy(port) as proxy, decode_engine(proxy.port, mover) as decode:
        wait_for_link(decode)
        generate(decode, prompt(next(_seeds), TOKENS))  # A mover may open what it needs with the first copy.
        yield prefill, decode, proxy


class Load:
    """Requests with new prompts that run while something fails. The context ends when all are answered."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self.answers: list[tuple[int, list[int]]] = []  # seed and output of each request
        self.slowest_s = 0.0
        self._threads = [threading.Thread(target=self._ask, args=(next(_seeds),)) for _ in range(AT_ONCE)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.join()

    def _ask(self, seed: int) -> None:
        began = time.monotonic()
        answer = generate(self._server, prompt(seed, TOKENS), temperature=1.0, sampling_seed=seed)
        self.slowest_s = max(self.slowest_s, time.monotonic() - began)
        self.answers.append((seed, answer["output_ids"]))

    def is_right(self, reference: ServerProcess) -> bool:
        """Return whether every request was answered, each as an engine without peers answers it."""
        expected = [
            generate(reference, prompt(seed, TOKENS), temperature=1.0, sampling_seed=seed)["output_ids"]
            for seed, _ in self.answers
        ]
        return len(expected) == AT_ONCE and expected == [output for _, output in self.answers]


def asked_in_vain(server: ServerProcess) -> None:
    """Send a request to an engine that is killed in the meantime."""
    with suppress(OSError, HTTPException, AssertionError):
        generate(server, prompt(next(_seeds), TOKENS))


def settled(server: ServerProcess, descriptors: int, memory_mib: float) -> None:
    """Wait until a survivor holds no more than before: descriptors, slots, leases, memory."""
    until = time.monotonic() + PATIENCE_S
    while problems := held(server, descriptors, memory_mib):
        assert time.monotonic() < until, problems
        time.sleep(0.1)


def held(server: ServerProcess, descriptors: int, memory_mib: float) -> Sequence[str]:
    info = server.get("/server_info")
    slots = {place: number for place, number in info["gauges"]["slots"].items() if place not in ("free", "cached")}
    found = {
        "descriptors": server.descriptors() - descriptors > 2,
        "memory": server.resident_mib() - memory_mib > MOST_GROWTH_MIB,
        "audit": bool(info["audit"]),
        f"slots {slots}": any(slots.values()),
        "requests": bool(info["open_requests"]),
        "links": any(link["imports"] or link["loans"] for link in server.get("/debug/peers")),
    }
    return [name for name, is_held in found.items() if is_held]


@pytest.mark.parametrize("rounds", ROUNDS)
def test_requests_outlive_a_killed_prefill_engine(reference: ServerProcess, mover: str, rounds: int) -> None:
    port, rng = free_port(), random.Random(1)
    with decode_engine(port, mover) as decode:
        for number in range(rounds):
            with prefill_engine(port, mover) as prefill:
                wait_for_link(decode)
                if number == rounds // 2:
                    before = decode.descriptors(), decode.resident_mib()
                with Load(decode) as load:
                    time.sleep(rng.uniform(0.0, 0.4))
                    prefill.kill_now()
            assert load.is_right(reference)
            assert load.slowest_s < PATIENCE_S
        assert asked(decode)
        settled(decode, *before)


@pytest.mark.parametrize("rounds", ROUNDS)
def test_a_prefill_engine_outlives_killed_decode_engines(reference: ServerProcess, mover: str, rounds: int) -> None:
    port, rng = free_port(), random.Random(2)
    with prefill_engine(port, mover) as prefill:
        for number in range(rounds):
            with decode_engine(port, mover) as decode:
                wait_for_link(decode)
                if number == rounds // 2:
                    before = prefill.descriptors(), prefill.resident_mib()
                with Load(prefill) as load:
                    asking = threading.Thread(target=asked_in_vain, args=(decode,))
                    asking.start()
                    time.sleep(rng.uniform(0.0, 0.4))
                    decode.kill_now()
                asking.join()
            assert load.is_right(reference)
        settled(prefill, *before)


@pytest.mark.parametrize("rounds", [1, pytest.param(20, marks=pytest.mark.soak)])
def test_requests_outlive_a_frozen_prefill_engine(reference: ServerProcess, linked: Linked, rounds: int) -> None:
    prefill, decode, _ = linked
    already_asked = asked(decode)
    rng = random.Random(3)
    for number in range(rounds):
        if number == rounds // 2:
            before = decode.descriptors(), decode.resident_mib()
        with Load(decode) as load:
            time.sleep(rng.uniform(0.0, 0.3))
            prefill.process.send_signal(signal.SIGSTOP)
        prefill.process.send_signal(signal.SIGCONT)
        assert load.is_right(reference)
        wait_for_link(decode)
    assert asked(decode) > already_asked
    settled(decode, *before)


@pytest.mark.parametrize("rounds", [1, pytest.param(20, marks=pytest.mark.soak)])
def test_requests_outlive_a_network_that_falls_silent(reference: ServerProcess, linked: Linked, rounds: int) -> None:
    """Also in the middle of a copy: the state that has arrived by half is not used."""
    prefill, decode, proxy = linked
    already_asked = asked(decode)
    rng = random.Random(4)
    for number in range(rounds):
        if number == rounds // 2:
            before = decode.descriptors(), decode.resident_mib()
            lent = prefill.descriptors(), prefill.resident_mib()
        proxy.silence(after=rng.randrange(1, 1 << 20))
        with Load(decode) as load:
            pass
        assert load.is_right(reference)
        proxy.heal()
        wait_for_link(decode)
    assert asked(decode) > already_asked
    settled(decode, *before)
    settled(prefill, *lent)
