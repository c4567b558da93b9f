"""Recorded traces as workloads: both formats, damaged files, and a replay of a server's own trace file."""

import json
from base64 import b64encode
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from baton.actors.runtime.events import ActEvent, DroppedEvent, HeaderEvent, HistoryEvent
from baton.actors.tokens import pack
from scripts.replaying.bound import Past
from scripts.replaying.costs import Costs
from scripts.replaying.play import Outcome, make_ring, play
from scripts.replaying.policies import POLICIES
from scripts.replaying.recorded import arrivals, read_trace, recorded
from scripts.replaying.workloads import Ask
from tests.api.hash_traffic import make_checkpoint
from tests.api.server_process import SERVE, ServerProcess

HEADER = HeaderEvent(2, 1.7e9, 100.0)
BLOCK = 32  # a block of a Mooncake trace is 512 tokens: 32 times 16


def mooncake(path: Path, *lines: tuple[int, int, int, list[int]]) -> Path:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("".join(json.dumps(dict(zip(names, line, strict=True))) + "\n" for line in lines))
    return path


def served(path: Path, *events: Any) -> Path:
    path.write_bytes(msgspec.json.Encoder().encode_lines([HEADER, *events]))
    return path


def history(at: float, prompt: int, answer: int, blocks: list[int], **more: Any) -> HistoryEvent:
    return HistoryEvent(at, f"r{at}", prompt, answer, more.pop("salt", 0), 16, tuple(blocks), **more)


def asks(path: Path, faster: float = 1.0) -> list[tuple[float, Ask]]:
    return [(arrival.at, next(arrival.client)) for arrival in arrivals(path, faster, Random(1), 1 << 20)]


def played(path: Path, policy: str = "worth", slots: int = 64, past: Past | None = None) -> Outcome:
    workload = recorded(path)
    ring = make_ring(POLICIES[policy], slots, Costs(), block=workload.block)
    return play(workload, ring, len(read_trace(path).requests), 1, past)


def test_equal_ids_of_a_mooncake_trace_are_equal_units(tmp_path: Path) -> None:
    path = mooncake(
        tmp_path / "t", (5000, 1100, 40, [7, 8, 9]), (2000, 512, 0, [7]), (9000, 1536, 16, [7, 8, 10])
    )  # fmt: skip
    (first_at, first), (at, second), (last_at, last) = asks(path, faster=2.0)
    assert (first_at, at, last_at) == (0.0, 1.5, 3.5), "in order, from the first on"
    assert [len(ask.tokens) for ask in (first, second, last)] == [BLOCK, 69, 3 * BLOCK]
    assert [ask.answer for ask in (first, second, last)] == [1, 3, 1]
    assert [ask.ends for ask in (first, second, last)] == [(BLOCK,), (2 * BLOCK,), (3 * BLOCK,)]
    assert first.tokens == second.tokens[:BLOCK] and second.tokens[: 2 * BLOCK] == last.tokens[: 2 * BLOCK]
    assert set(second.tokens[2 * BLOCK :]).isdisjoint(last.tokens)


def test_common_blocks_of_a_mooncake_trace_are_reused(tmp_path: Path) -> None:
    path = mooncake(tmp_path / "t", (0, 1100, 40, [7, 8, 9]), (60_000, 1500, 40, [7, 8, 10]))
    past = Past()
    assert played(path, past=past).cached == 2 * BLOCK == past.bound(64) * past.tokens
    assert played(path, "snapshot-grid").cached == 2 * BLOCK, "a snapshot on the blocks' grid, not within the last"


def test_a_turn_resumes_from_the_answer_in_a_servers_trace(tmp_path: Path) -> None:
    """The next prompt contains the first one (5 blocks and 7 tokens) and its answer, which ends in the 9th block."""
    path = served(
        tmp_path / "t",
        ActEvent("cache", 1.0, 2.0),
        history(103.0, 170, 16, [*range(1, 9), 50, 51, 52], ends=(30, 87, 170)),
        history(101.0, 87, 50, list(range(1, 9)), ends=(10, 30, 87)),
        DroppedEvent(3),
        history(102.0, 87, 50, list(range(21, 29)), salt=5),
    )
    assert read_trace(path).missing == 3
    (at, first), (_, other), (last_at, last) = asks(path)
    assert (at, last_at) == (0.0, 2.0)
    assert first.tokens + list(first.known_answer) == list(range(1, 9)) == last.tokens[:8]
    assert (len(first.tokens), first.answer, first.ends, first.salt) == (5, 3, (1, 5), "")
    assert (len(last.tokens), last.answer, last.known_answer, other.salt) == (10, 1, [52], "5")
    outcome = played(path)
    assert outcome.cached == 7, "the last unit that was answered was not consumed"
    assert (outcome.requests, outcome.prompt) == (3, 20)


def test_prompts_that_are_shorter_than_a_block_have_nothing_in_common(tmp_path: Path) -> None:
    path = served(tmp_path / "t", history(101.0, 3, 4, []), history(102.0, 3, 4, []), history(103.0, 3, 14, [9]))
    first, second, third = (ask for _, ask in asks(path))
    assert len(first.tokens) == len(second.tokens) == 1 and first.tokens != second.tokens
    assert (third.tokens, third.known_answer, third.answer) == ([9], [], 1)
    assert played(path).requests == 3


GOOD = '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}\n'
FRAME = msgspec.json.encode(HEADER).decode() + "\n"


@pytest.mark.parametrize(
    ("content", "line", "why"),
    [
        ("", 1, "truncated"),
        ("not json\n", 1, "malformed"),
        ('{"text": "hello"}\n', 1, "neither a request with hash_ids nor the header"),
        ('{"type":"act","actor":"cache","began":1.0,"ended":2.0}\n', 1, "neither"),
        (GOOD + GOOD[:30], 2, "truncated"),
        (GOOD + GOOD.replace("[1, 2]", "[1]"), 2, "1 hash_ids for 600 tokens, which are 2 blocks of 512"),
        (GOOD + GOOD.replace("[1, 2]", "[1, -2]"), 2, ">= 0"),
        (GOOD + GOOD.replace('"timestamp": 0, ', ""), 2, "timestamp"),
        (GOOD + FRAME, 2, "timestamp"),
        (FRAME + GOOD, 2, "type"),
        (FRAME + '{"type":"history"}\n', 2, "at"),
        (FRAME + msgspec.json.encode(history(1.0, 40, 0, [1])).decode() + "\n", 2, "1 numbers of 16 tokens each"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, content: str, line: int, why: str) -> None:
    (tmp_path / "t").write_text(content)
    with pytest.raises(ValueError, match=rf"/t, line {line}: .*{why}"):
        read_trace(tmp_path / "t")


def test_a_trace_file_without_requests_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no request that has ended"):
        read_trace(served(tmp_path / "t", ActEvent("cache", 1.0, 2.0)))


def test_a_servers_trace_file_can_be_replayed(tmp_path: Path) -> None:
    """A replay of two chats of three turns reuses as many tokens as the server did, except for parts of blocks."""
    log = tmp_path / "log"
    small = ["--state-slots", "32", "--kv-pages", "400", "--page-size", "4", "--max-model-len", "600"]
    cached = 0
    with ServerProcess([*SERVE, str(make_checkpoint(tmp_path)), *small, "--trace-file", str(log)]) as server:
        talks = [[start] * 70 for start in (1, 2)]
        for _ in range(3):
            for number, talk in enumerate(talks):
                body = {"input_ids": talk, "sampling_params": {"max_new_tokens": 40, "temperature": 0}}
                _, answer = server.post("/generate", body)
                cached += answer["meta_info"]["cached_tokens"]
                talks[number] = talk + answer["output_ids"] + [number] * 20
    outcome = played(log)
    assert outcome.requests == 6
    assert cached > 0 and cached / 16 - 4 * 2 <= outcome.cached <= cached / 16
    text = log.read_bytes()
    assert b64encode(pack(talks[0][:69])) not in text and msgspec.json.encode(talks[0][70:75])[1:-1] not in text
