"""Recorded traces as workloads: files of `baton serve --trace-file`, and public Mooncake traces."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from baton.actors.runtime.events import DroppedEvent, HistoryEvent
from baton.actors.tokens import Tokens, pack, unpack
from scripts.replaying.costs import Costs
from scripts.replaying.workloads import Arrival, Ask, Client, Workload, text
from scripts.tracing.log import numbered_events

UNIT = Costs().unit
MOONCAKE_BLOCK = 512  # tokens
UNITS = 1 << 31  # number of different units; a unit is a token id, an int32

Count = Annotated[int, Meta(ge=0)]


class MooncakeLine(Struct):
    """One request of a Mooncake trace."""

    timestamp: Annotated[float, Meta(ge=0)]  # milliseconds
    input_length: Annotated[int, Meta(ge=1)]
    output_length: Count
    hash_ids: list[Annotated[int, Meta(ge=0, lt=UNITS)]]  # id of each block of the prompt; the last may be shorter


class AnyLine(Struct):
    """The fields of a trace's first line that distinguish the two formats."""

    type: str = ""
    hash_ids: list[int] | None = None


@dataclass(frozen=True, slots=True)
class Recorded:
    """One recorded request."""

    at: float  # seconds
    numbers: Tokens  # number of each block of the prompt, then of the answer if its blocks are known
    prompt: int  # units
    answer: int  # units
    ends: tuple[int, ...]  # end of each message of the prompt, in units
    salt: str = ""

    def ask(self, rng: Random, block: int) -> Ask:
        """Return the request. A prompt shorter than a block has no block number, and becomes one random unit."""
        units = [(number * block + index) % UNITS for number in unpack(self.numbers) for index in range(block)]
        prompt = units[: self.prompt] or text(rng, 1, 1)
        answer = units[self.prompt :] if block == 1 else ()
        return Ask(0.0, prompt, self.answer, self.ends, self.salt, answer)


@dataclass(frozen=True)
class Trace:
    """A recorded trace."""

    requests: list[Recorded]  # requests in order of arrival
    block: int  # units of a block
    missing: int = 0  # events that the server dropped while it wrote the trace


def recorded(path: Path, faster: float = 1.0) -> Workload:
    """Return a trace as a workload, `faster` times as fast. Raises OSError or ValueError if the trace is invalid."""
    return Workload(partial(arrivals, path, faster), read_trace(path).block)


def arrivals(path: Path, faster: float, rng: Random, requests: int) -> Iterator[Arrival]:
    trace = read_trace(path)
    begin = trace.requests[0].at
    for request in trace.requests[:requests]:
        yield Arrival((request.at - begin) / faster, client(request, rng, trace.block))


def client(request: Recorded, rng: Random, block: int) -> Client:
    yield request.ask(rng, block)


@cache
def read_trace(path: Path) -> Trace:
    """Read a trace of either format. Raises OSError, or ValueError that names the first invalid line."""
    with path.open("rb") as file:
        first = file.readline()
    try:
        kind = msgspec.json.decode(first, type=AnyLine)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path}, line 1: {error}") from None
    if kind.hash_ids is not None:
        trace = Trace(list(mooncake_requests(path)), MOONCAKE_BLOCK // UNIT)
    elif kind.type == "header":
        trace = served_trace(path)
    else:
        raise ValueError(f"{path}, line 1: neither a request with hash_ids nor the header of a trace file")
    if not trace.requests:
        raise ValueError(f"{path} holds no request that has ended")
    trace.requests.sort(key=lambda request: request.at)
    return trace


def mooncake_requests(path: Path) -> Iterator[Recorded]:
    """Yield the requests of a Mooncake trace.

    A later request can resume at the end of the last whole block, but not from the answer: the trace has no ids for
    answers, and an answer that is part of a later prompt has new ids there.
    """
    decoder = msgspec.json.Decoder(MooncakeLine)
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                request = decoder.decode(line)
            except msgspec.MsgspecError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
            blocks = -(-request.input_length // MOONCAKE_BLOCK)
            if len(request.hash_ids) != blocks:
                raise ValueError(
                    f"{path}, line {number}: {len(request.hash_ids)} hash_ids for {request.input_length} tokens, "
                    f"which are {blocks} blocks of {MOONCAKE_BLOCK}"
                )
            whole = request.input_length // MOONCAKE_BLOCK * MOONCAKE_BLOCK // UNIT
            yield Recorded(
                request.timestamp / 1000,
                pack(request.hash_ids),
                -(-request.input_length // UNIT),
                max(1, -(-request.output_length // UNIT)),
                (whole,) if whole else (),
            )


def served_trace(path: Path) -> Trace:
    """Read a server's trace file, which has numbers for the whole blocks of prompts and answers."""
    requests, missing = [], 0
    for number, event in numbered_events(path):
        match event:
            case HistoryEvent():
                check_numbers(event, f"{path}, line {number}")
                requests.append(served_request(event))
            case DroppedEvent():
                missing += event.count
            case _:
                pass
    return Trace(requests, 1, missing)


def check_numbers(event: HistoryEvent, where: str) -> None:
    """Raise ValueError if the number of blocks does not fit the lengths of prompt and answer."""
    whole = (event.prompt + event.answer) // UNIT
    if event.block != UNIT or len(event.blocks) != whole or min(event.prompt, event.answer) < 0:
        raise ValueError(
            f"{where}: {len(event.blocks)} numbers of {event.block} tokens each, for {event.prompt} of a prompt and "
            f"{event.answer} of its answer; the replay's blocks are of {UNIT}"
        )


def served_request(event: HistoryEvent) -> Recorded:
    prompt = max(1, event.prompt // UNIT)
    ends = sorted({end // UNIT for end in event.ends if UNIT <= end <= event.prompt})
    return Recorded(
        event.at,
        pack(number % UNITS for number in event.blocks),
        prompt,
        max(1, len(event.blocks) - prompt),
        tuple(ends),
        str(event.salt) if event.salt else "",
    )
