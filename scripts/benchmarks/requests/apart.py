"""Prefill and decode in two engines, compared with one: transfer rate, time to first token, inter-token latency.

Each engine has --threads threads, so two engines use twice as many. Rounds alternate between one engine and two.
"""

import argparse
import asyncio
import multiprocessing
import random
import re
import socket
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass
from urllib.request import urlopen

import aiohttp

from scripts.benchmarks.common.contenders import Entry, Workbench
from scripts.benchmarks.common.server import Served
from scripts.benchmarks.requests.gaps import Figures, Load, at

LINK_TIMEOUT_S = 10.0
PAUSE_S = 0.3  # between the messages of a bare socket


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, nargs="+", default=[512, 4000], help="tokens of the prompts")
    parser.add_argument("--link", metavar="HOST:PORT", help="link the engines by TCP (default: a Unix socket)")
    parser.add_argument("--streams", type=int, default=4, help="streams that decode while the longest prompt is read")


def run(options: argparse.Namespace, workbench: Workbench) -> None:
    rounds = options.rounds or 5
    with ExitStack() as stack:
        address = options.link or f"unix:{workbench.folder / 'link'}"
        one = stack.enter_context(workbench.serve(Entry.parse("one=baton")))
        prefill = Entry.parse("prefill=baton"), "--role", "prefill", "--peer-listen", address
        stack.enter_context(workbench.serve(*prefill))
        decode = stack.enter_context(
            workbench.serve(Entry.parse("decode=baton"), "--role", "decode", "--peer", address)
        )
        wait_for_link(decode)
        vocabulary = workbench.config["vocab_size"]
        for tokens in options.prompts:
            read = asyncio.run(compare_first_tokens(one, decode, vocabulary, tokens, rounds))
            if read.states:
                compare_with_bare(read, tcp=bool(options.link))
        asyncio.run(compare_gaps(one, decode, vocabulary, options.streams, max(options.prompts), rounds))


def wait_for_link(server: Served) -> None:
    """Wait until an engine has a peer. Raises TimeoutError."""
    until = time.monotonic() + LINK_TIMEOUT_S
    while urlopen(f"{server.url}/debug/peers").read() == b"[]":
        if time.monotonic() > until:
            raise TimeoutError("the engines have made no link")
        time.sleep(0.05)


@dataclass(frozen=True)
class Read:
    """The states that an engine has read from its peers since its start."""

    states: int
    nbytes: int
    seconds: float

    @classmethod
    def of(cls, server: Served) -> "Read":
        text = urlopen(f"{server.url}/metrics").read().decode()

        def total(pattern: str) -> float:
            return sum(map(float, re.findall(rf"^baton:peer_{pattern}\S* (\S+)$", text, re.MULTILINE)))

        states = total(r'states_total\{[^}]*outcome="imported"')
        return cls(int(states), int(total("read_bytes_total")), total("read_seconds_total"))

    def since(self, before: "Read") -> "Read":
        return Read(self.states - before.states, self.nbytes - before.nbytes, self.seconds - before.seconds)


async def compare_first_tokens(one: Served, decode: Served, vocabulary: int, tokens: int, rounds: int) -> Read:
    """Print the time to the first token of one engine and of two. Return the states that were read from the peer."""
    alone, apart, before = list[float](), list[float](), Read.of(decode)
    async with aiohttp.ClientSession(one.url) as to_one, aiohttp.ClientSession(decode.url) as to_two:
        loads = (Load(to_one, vocabulary), alone), (Load(to_two, vocabulary), apart)
        for _ in range(rounds + 1):
            for load, times in loads:
                times.append(await load.first_token(tokens))
    read = Read.of(decode).since(before)
    print(f"prompt of {tokens} tokens: {read.states} of {rounds + 1} states came from the peer")
    if read.states:
        copy = read.seconds / read.states
        ratios = sorted(two / (single + copy) for single, two in zip(alone[1:], apart[1:], strict=True))
        print(f"  first token: {1000 * median(alone):.0f} ms in one engine, {1000 * median(apart):.0f} ms in two,")
        print(f"    {median(ratios):.2f} times one engine's time and the copy ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    return read


def compare_with_bare(read: Read, tcp: bool) -> None:
    """Print the rate at which states were read, and that of a bare socket of the same kind."""
    nbytes, rate = read.nbytes // read.states, read.nbytes / read.seconds
    bare = bare_rate(nbytes, tcp)
    print(f"  copy: {nbytes / 2**20:.1f} MiB in {1000 * nbytes / rate:.1f} ms, {rate / 1e9:.2f} GB/s,")
    print(f"    {rate / bare:.2f} of the {bare / 1e9:.2f} GB/s of a bare {'TCP' if tcp else 'Unix'} socket")


def median(times: list[float]) -> float:
    """Return the median, without the first round, which warms up."""
    return statistics.median(times[1:])


async def compare_gaps(one: Served, decode: Served, vocabulary: int, streams: int, tokens: int, rounds: int) -> None:
    """Print the time between two tokens of streams, in calm and while a long prompt is read."""
    async with aiohttp.ClientSession(one.url) as to_one, aiohttp.ClientSession(decode.url) as to_two:
        loads = {"one engine": Load(to_one, vocabulary), "two engines": Load(to_two, vocabulary)}
        figures = {name: Figures() for name in loads}
        for number in range(rounds + 1):
            for name, load in loads.items():
                figures[name] = Figures() if number == 1 else figures[name]
                await load.round(streams, tokens, figures[name])
    for name, found in figures.items():
        calm, beside = statistics.median(found.calm), statistics.median(found.disturbed)
        print(f"{streams} streams and a prompt of {tokens} tokens, {name}:")
        print(
            f"  between tokens: p50 {1000 * calm:.1f} ms in calm, {1000 * beside:.1f} ms with it, {beside / calm:.2f}"
        )
        print(f"  p99 {1000 * at(found.calm, 0.99):.1f} and {1000 * at(found.disturbed, 0.99):.1f} ms")
        print(f"  first token of the prompt: {statistics.median(found.together):.2f} s")


def bare_rate(nbytes: int, tcp: bool, rounds: int = 9) -> float:
    """Return the bytes per second at which messages of `nbytes` arrive from another process over a socket.

    Like the states, each message is sent from and received into memory of its own, with pauses in between.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours, theirs = tcp_pair(server) if tcp else socket.socketpair(socket.AF_UNIX)
    sender = multiprocessing.get_context("fork").Process(target=_send, args=(theirs, ours, nbytes, rounds))
    sender.start()
    theirs.close()
    messages, times = [bytearray(random.randbytes(nbytes)) for _ in range(rounds)], list[float]()
    ours.recv(1)  # the sender has its messages too
    for message in messages:
        time.sleep(PAUSE_S)
        began, view = time.perf_counter(), memoryview(message)
        ours.sendall(b"1")
        while view:
            view = view[ours.recv_into(view) :]
        times.append(time.perf_counter() - began)
    ours.close()
    sender.join()
    return nbytes / statistics.median(times)


def tcp_pair(server: socket.socket) -> tuple[socket.socket, socket.socket]:
    connected = socket.create_connection(server.getsockname())
    return connected, server.accept()[0]


def _send(sock: socket.socket, other_end: socket.socket, nbytes: int, rounds: int) -> None:
    other_end.close()  # Inherited; while it is open here, this process would not see that the reader has closed it.
    messages = [random.randbytes(nbytes) for _ in range(rounds)]
    sock.sendall(b"1")
    for message in messages:
        sock.recv(1)
        sock.sendall(message)
