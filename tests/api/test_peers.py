"""Engines that compute prompts for each other, as real processes on loopback."""

import random
import re
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from baton.actors.runtime.events import RequestEvent
from baton.api.cli.commands import run
from baton.api.machine.signals import Signals
from scripts.tracing.log import read_log
from scripts.tracing.together import events_of_engines
from tests.api.server_process import SERVE, ServerProcess

SMALL = ("--memory", "64M", "--host-memory", "32M")
PATIENCE_S = 30.0


def prompt(seed: int, length: int) -> list[int]:
    """Return random token ids of the bundled model."""
    rng = random.Random(seed)
    return [rng.randrange(20, 700) for _ in range(length)]


def generate(server: ServerProcess, ids: list[int], **sampling: float) -> dict[str, Any]:
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 12, "ignore_eos": True, **sampling}}
    status, answer = server.post("/generate", body)
    assert status == 200, answer
    return answer


def metrics(server: ServerProcess) -> str:
    with urlopen(f"{server.url}/metrics", timeout=PATIENCE_S) as answer:
        return answer.read().decode()


def wait_for_link(server: ServerProcess) -> None:
    until = time.monotonic() + PATIENCE_S
    while not server.get("/debug/peers"):
        assert time.monotonic() < until, "no link"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"unix:{tmp_path_factory.mktemp('peers') / 'link'}"


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return the trace files of `engines`."""
    folder = tmp_path_factory.mktemp("traces")
    return [folder / "prefill", folder / "decode"]


@pytest.fixture(scope="module")
def engines(address: str, traces: list[Path]) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    """A prefill engine, and a decode engine that is linked to it."""
    with ExitStack() as stack:
        links = ("--role", "prefill", "--peer-listen", address), ("--role", "decode", "--peer", address)
        prefill, decode = (
            stack.enter_context(ServerProcess((*SERVE, *SMALL, *options, "--trace-file", str(trace))))
            for options, trace in zip(links, traces, strict=True)
        )
        wait_for_link(decode)
        yield prefill, decode


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_prompt_that_a_peer_has_computed_gives_the_same_tokens(
    engines: tuple[ServerProcess, ServerProcess], temperature: float
) -> None:
    prefill, decode = engines
    ids = prompt(int(temperature), 400)
    apart = generate(decode, ids, temperature=temperature, sampling_seed=7)
    assert apart["meta_info"]["cached_tokens"] == len(ids) - 1, "the state came from the peer"
    assert generate(prefill, ids, temperature=temperature, sampling_seed=7)["output_ids"] == apart["output_ids"]
    assert prefill.get("/server_info")["counters"]["peer_loans"] >= 1
    assert decode.get("/server_info")["counters"]["granted_from:peer"] >= 1
    assert re.search(r'baton:peer_states_total\{[^}]*outcome="imported"[^}]*\} [1-9]', metrics(decode))
    assert re.search(r'baton:peer_states_total\{[^}]*outcome="lent"[^}]*\} [1-9]', metrics(prefill))


def test_a_request_has_one_trace_in_the_files_of_both_engines(
    engines: tuple[ServerProcess, ServerProcess], traces: list[Path]
) -> None:
    _, decode = engines
    known = set[str]().union(*map(traces_of, traces))
    generate(decode, prompt(2, 400))
    until = time.monotonic() + PATIENCE_S
    # An earlier request of one engine may come into its file only now.
    while not (new := set.intersection(*map(traces_of, traces)) - known):
        assert time.monotonic() < until, "the files are written twenty times a second"
        time.sleep(0.05)
    assert len(new) == 1
    events = events_of_engines([(file.name, read_log(file)) for file in traces])
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"ring of prefill", "slots of prefill", "ring of decode", "slots of decode"}


def traces_of(file: Path) -> set[str]:
    """Return the traces of the requests in a trace file."""
    return {event.trace for event in read_log(file) if isinstance(event, RequestEvent) and event.what == "queued"}


def test_a_peer_that_falls_silent_costs_two_seconds_and_is_named(engines: tuple[ServerProcess, ServerProcess]) -> None:
    """The request is computed here after all, and its answer says why; a link is made again afterwards."""
    prefill, decode = engines
    ids = prompt(3, 300)
    wait_for_link(decode)
    prefill.process.send_signal(signal.SIGSTOP)
    try:
        began = time.monotonic()
        apart = generate(decode, ids, temperature=0.0)
        assert time.monotonic() - began < PATIENCE_S
        assert (apart["meta_info"]["cached_tokens"], apart["meta_info"]["lost"]) == (0, "peer")
    finally:
        prefill.process.send_signal(signal.SIGCONT)
    wait_for_link(decode)
    assert generate(prefill, ids, temperature=0.0)["output_ids"] == apart["output_ids"]


def test_engines_that_differ_are_refused_by_name(engines: tuple[ServerProcess, ServerProcess], address: str) -> None:
    with ServerProcess((*SERVE, *SMALL, "--peer", address, "--page-size", "32")) as other:
        line = other.wait_for("no link to the peer")
        assert line["error"] == "page_size is 32 here and 16 at the peer"
        assert other.get("/debug/peers") == []


def test_a_peer_with_another_key_is_refused(
    engines: tuple[ServerProcess, ServerProcess], address: str, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("a key of more than sixteen bytes")
    with ServerProcess((*SERVE, *SMALL, "--peer", address, "--peer-key-file", str(tmp_path / "key"))) as other:
        other.wait_for("no link to the peer")
        assert other.get("/debug/peers") == []


def test_a_stranger_learns_sixteen_random_bytes(engines: tuple[ServerProcess, ServerProcess], address: str) -> None:
    """A stranger's bytes end its connection, and the server goes on."""
    _, decode = engines
    for sent in (b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\4abcd", b"\xff" * 1000, b""):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(PATIENCE_S)
            stranger.connect(address.removeprefix("unix:"))
            stranger.sendall(sent)
            answer = b""
            with suppress(ConnectionResetError):
                while received := stranger.recv(4096):
                    answer += received
            assert len(answer) < 64
    assert generate(decode, prompt(5, 200), temperature=0.0)["output_ids"]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--peer", "nowhere"), "is neither HOST:PORT nor unix:PATH"),
        (("--peer-listen", "0.0.0.0:9000"), "is not a loopback address, which needs --peer-key-file"),
        (("--peer", "127.0.0.1:9000", "--peer-key-file", "/no/such/file"), "No such file"),
    ],
)
def test_options_that_cannot_be_are_refused_at_the_start(
    options: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["serve", *options], Signals()) == 2
    assert complaint in capsys.readouterr().err


def test_an_address_that_is_taken_is_named_at_the_start(
    engines: tuple[ServerProcess, ServerProcess], address: str
) -> None:
    with ServerProcess((*SERVE, *SMALL, "--peer-listen", address), wait_ready=False, exit_code=1) as server:
        assert server.wait() == 1
    output = "".join(server.output)
    assert f"cannot listen for peers on {address}: Address already in use" in output and "Traceback" not in output
