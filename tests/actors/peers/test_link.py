"""A link's rules, one at a time: what the sink may use, and when the source ends its loans."""

from collections.abc import Callable
from contextlib import ExitStack
from unittest import mock

import msgspec
import pytest
from hypothesis import given, settings, strategies as st
from msgspec.structs import replace

from baton.actors.peers.frames import (
    VERSION,
    Beat,
    CancelTicket,
    Compute,
    Declined,
    Fetch,
    Frame,
    Gone,
    Hand,
    Handed,
    Hello,
    Released,
    Rows,
    Taken,
    decode,
    disagreement,
    encode,
)
from baton.actors.peers.link import Link, ProtocolError, Stage
from baton.actors.storage.peers import StateQuery
from baton.actors.tokens import Tokens, pack
from tests.simulation.mutations_of_peers import landing_buffer_reused_before_the_fence

HELLO = Hello(VERSION, "peer", "boot", "both", "model", "float32", "bfloat16", "none", 16, 100, 10, "sockets")
TOKENS = pack(range(40))
ASKED = StateQuery("", TOKENS, 0, 0, 1.0, 0, 7)


class Bench:
    """A link with a wire, a mover and an owner that record what is called."""

    def __init__(self) -> None:
        self.sent: list[Frame] = []
        self.calls: list[tuple[object, ...]] = []
        self.fenced: Callable[[], None] | None = None
        self.seconds = 0.0  # of the copy that has landed
        self.link = Link("peer#1", HELLO, self, self, self, 0.0)

    def take(self) -> list[Frame]:
        sent, self.sent = self.sent, []
        return sent

    # The wire

    def send(self, frame: Frame) -> None:
        self.sent.append(frame)

    # The mover

    def withdraw(self, ticket: int) -> None:
        self.calls.append(("withdraw", ticket))

    def pull(self, ticket: int, where: bytes, position: int, first_page: int) -> None:
        self.calls.append(("pull", ticket, position, first_page))

    def close(self, fenced: Callable[[], None]) -> None:
        self.fenced = fenced

    # The mover and the owner

    def lend(self, *arguments: object) -> bytes:
        self.calls.append(("lend", *arguments))
        return b"here"

    # The owner

    def offered(self, ticket: int, salt: str, tokens: Tokens, first_page: int) -> None:
        self.calls.append(("offered", ticket, first_page))

    def declined(self, link: Link, ticket: int, why: str) -> None:
        self.calls.append(("declined", ticket, why))

    def landed(self, link: Link, key: int, landing: object, error: str, seconds: float, first_page: int) -> None:
        self.calls.append(("landed", key, landing, error))
        self.seconds = seconds

    def new_loan(self, link: Link, ticket: int) -> int:
        return 1000 + ticket

    def compute(self, loan: int, frame: Compute) -> str:
        return ""

    def stop_computing(self, loan: int) -> None:
        self.calls.append(("stop", loan))

    def unlend(self, loan: int) -> None:
        self.calls.append(("unlend", loan))

    def take_over(self, link: Link, frame: Hand) -> None:
        self.calls.append(("take over", frame.ticket, frame.log, frame.position))

    def handed(self, ticket: int, error: str) -> None:
        self.calls.append(("handed", ticket, error))


@pytest.fixture
def bench() -> Bench:
    return Bench()


def pulling(bench: Bench) -> None:
    """Ask for a state under ticket 1, and begin to read it under key 5."""
    bench.link.ask(1, ASKED, "trace")
    bench.link.receive(Rows(1, 40, 0, b"there"))
    bench.link.pull(1, 5)
    bench.take()
    bench.calls.clear()


def test_what_was_read_is_used_only_after_released(bench: Bench) -> None:
    pulling(bench)
    bench.link.pulled(1, "the copy", "", 0.5)
    assert bench.take() == [Taken(1)] and not bench.calls
    bench.link.receive(Released(1))
    assert bench.calls == [("landed", 5, "the copy", "")]
    assert bench.seconds == 0.5, "the mover measures: the link's own clock moves ten times a second"


def test_what_was_read_is_dropped_if_the_loan_has_ended(bench: Bench) -> None:
    pulling(bench)
    bench.link.pulled(1, "the copy", "", 0.5)
    bench.link.receive(Gone(1, "restarted"))
    assert bench.calls == [("landed", 5, None, "restarted")]


def test_a_read_of_a_lost_loan_fails_only_when_it_has_ended(bench: Bench) -> None:
    pulling(bench)
    bench.link.receive(Gone(1, "restarted"))
    assert not bench.calls, "the mover still writes to the memory"
    bench.link.pulled(1, "the copy", "", 0.5)
    assert bench.calls == [("landed", 5, None, "restarted")] and bench.take() == [CancelTicket(1)]


def fails_only_after_the_fence(bench: Bench) -> None:
    pulling(bench)
    bench.link.end("cut")
    assert not bench.calls, "the mover may still write to the memory"
    assert bench.fenced is not None
    bench.fenced()
    assert bench.calls == [("landed", 5, None, "cut")]


def test_a_read_fails_only_after_the_fence_when_the_link_ends(bench: Bench) -> None:
    fails_only_after_the_fence(bench)


def test_a_read_that_fails_before_the_fence_is_noticed(bench: Bench) -> None:
    with ExitStack() as stack:
        landing_buffer_reused_before_the_fence(
            lambda owner, name, value: stack.enter_context(mock.patch.object(owner, name, value))
        )
        with pytest.raises(AssertionError, match="may still write"):
            fails_only_after_the_fence(bench)


def test_an_unanswered_question_is_declined_when_the_link_ends(bench: Bench) -> None:
    bench.link.ask(1, ASKED, "trace")
    bench.link.end("cut")
    assert bench.calls == [("declined", 1, "cut")]


def test_an_offer_that_is_void_by_now_fails_at_once(bench: Bench) -> None:
    bench.link.ask(1, ASKED, "trace")
    bench.link.receive(Rows(1, 40, 0, b"there"))
    bench.link.receive(Gone(1, "restarted"))
    bench.link.pull(1, 5)
    assert bench.calls == [("offered", 1, 0), ("landed", 5, None, "the loan has ended")]


def lent(bench: Bench) -> None:
    """Lend a state under the peer's ticket 3."""
    bench.link.receive(Fetch(3, "", TOKENS, 1, 0))
    bench.link.lent(3, 9, 32, 16)
    assert bench.take() == [Rows(3, 32, 0, b"here")]
    bench.calls.clear()


def test_taken_ends_the_loan_and_is_confirmed_once(bench: Bench) -> None:
    lent(bench)
    bench.link.receive(Taken(3))
    assert bench.calls == [("withdraw", 3), ("unlend", 1003)] and bench.take() == [Released(3)]
    bench.link.receive(Taken(3))
    assert bench.take() == [Gone(3, "there is no such loan")]


def test_a_restart_of_the_source_voids_its_loans(bench: Bench) -> None:
    lent(bench)
    bench.link.void_loans("restarted")
    bench.link.receive(Taken(3))
    assert bench.take() == [Gone(3, "restarted"), Gone(3, "there is no such loan")]


def test_the_end_of_the_link_ends_every_loan_once(bench: Bench) -> None:
    lent(bench)
    bench.link.receive(Compute(4, "", TOKENS, 0, 0, 0, ""))
    bench.link.end("cut")
    bench.link.end("cut")
    assert bench.calls == [("withdraw", 3), ("unlend", 1003), ("stop", 1004)]


@pytest.mark.parametrize("error", ["", "it exists already"])
def test_a_session_that_was_handed_over_is_answered_once(bench: Bench, error: str) -> None:
    bench.link.hand(6, b"log", 32)
    assert bench.take() == [Hand(6, b"log", 32)] and not bench.calls
    bench.link.receive(Handed(6, error))
    assert bench.calls == [("handed", 6, error)]
    with pytest.raises(ProtocolError, match="ticket 6, which was not handed over"):
        bench.link.receive(Handed(6, error))
    bench.link.end("cut")
    assert bench.calls == [("handed", 6, error)]


def test_a_session_on_its_way_fails_once_when_the_link_ends(bench: Bench) -> None:
    """This engine keeps the session: the peer may have it too, and has not said so."""
    bench.link.hand(6, b"log", 32)
    bench.link.hand(7, b"another", 0)
    bench.link.receive(Handed(7, ""))
    bench.link.end("cut")
    bench.link.end("cut")
    assert bench.calls == [("handed", 7, ""), ("handed", 6, "cut")]


def test_a_peer_s_session_is_taken_over_and_answered(bench: Bench) -> None:
    """The peer's tickets are its own: both sides may hand sessions over under the same number."""
    bench.link.hand(6, b"log", 32)
    bench.link.receive(Hand(6, b"another", 16))
    assert bench.calls == [("take over", 6, b"another", 16)]
    bench.take()
    bench.link.taken_over(6, "the engine is not ready")
    assert bench.take() == [Handed(6, "the engine is not ready")]
    bench.link.receive(Handed(6, ""))
    assert bench.calls[1:] == [("handed", 6, "")]


@pytest.mark.parametrize(
    "frame",
    [
        Released(1),
        Handed(1, ""),
        Rows(1, 41, 0, b""),
        Rows(1, 0, 0, b""),
        Rows(1, 39, 0, b""),
        Rows(1, 40, 1, b""),
        Rows(1, 40, -1, b""),
        Fetch(2, "", TOKENS, 41, 0),
        Fetch(2, "", TOKENS, 0, 0),
        Fetch(2, "", TOKENS, 1, -1),
        Fetch(2, "", TOKENS + b"x", 1, 0),
        Compute(2, "", b"", 0, 0, 0, ""),
        Compute(2, "", TOKENS[:-1], 0, 0, 0, ""),
        HELLO,
    ],
)
def test_a_frame_that_does_not_fit_ends_the_connection(bench: Bench, frame: Frame) -> None:
    bench.link.ask(1, ASKED, "trace")
    with pytest.raises(ProtocolError):
        bench.link.receive(frame)


def test_a_silent_peer_is_dead_after_two_seconds(bench: Bench) -> None:
    assert bench.link.tick(0.6, Beat(rows=3)) and bench.take() == [Beat(rows=3)]
    assert bench.link.tick(1.9, Beat()) and not bench.link.tick(2.0, Beat())
    bench.link.receive(Beat())
    assert bench.link.tick(3.9, Beat())


def test_engines_that_differ_are_refused_by_name_with_both_values() -> None:
    names = {"engine": "other", "boot": "boot 2", "role": "decode", "token": b"token"}
    assert disagreement(HELLO, replace(HELLO, **names)) == ""
    differences: dict[str, object] = {
        "version": VERSION + 1, "dtype": "bfloat16", "state_dtype": "float32", "quantize": "int8", "page_size": 32,
        "model": "another", "state_bytes": 50, "page_bytes": 5, "mover": "nixl",
    }  # fmt: skip
    assert names.keys() | differences.keys() == set(Hello.__struct_fields__)
    for name, value in differences.items():
        here, there = getattr(HELLO, name), value
        assert (
            disagreement(HELLO, replace(HELLO, **names, **{name: value}))
            == f"{name} is {here} here and {there} at the peer"
        )
    # A fingerprint says nothing to people: what differs with it is named first.
    both = replace(HELLO, model="another", state_dtype="float32", state_bytes=50)
    assert disagreement(HELLO, both) == "state_dtype is bfloat16 here and float32 at the peer"


def test_every_frame_survives_the_wire() -> None:
    for frame in (HELLO, Beat(), Compute(1, "s", TOKENS, 2, 3, 4, "t"), Fetch(1, "", TOKENS, 1, 0), Rows(1, 2, 0, b"")):
        assert decode(encode(frame)) == frame
    for frame in (Declined(1, "no"), Taken(1), Released(1), Gone(1, "why"), CancelTicket(1), Hand(1, b"log", 2)):
        assert decode(encode(frame)) == frame
    for frame in (Handed(1, ""), Handed(2, "it exists already")):
        assert decode(encode(frame)) == frame


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_no_sequence_of_frames_does_more_than_end_the_connection(data: st.DataObject) -> None:
    """Frames of every kind with small random fields raise nothing but ProtocolError, and the end leaves nothing."""
    bench, number = Bench(), st.integers(-1, 3)
    fields = {
        int: number,
        str: st.sampled_from(["", "a"]),
        bytes: st.sampled_from([b"", TOKENS[:7], TOKENS[:8], TOKENS]),
    }
    kinds = (Rows, Declined, Taken, Released, Gone, CancelTicket, Compute, Fetch, Beat, Hand, Handed)
    bench.link.hand(1, b"log", 8)
    for ticket in range(2):
        bench.link.ask(ticket, ASKED, "")
    for _ in range(data.draw(st.integers(1, 12))):
        kind = data.draw(st.sampled_from(kinds))
        types = [fields.get(field.type, st.just(0.0)) for field in msgspec.structs.fields(kind)]
        try:
            bench.link.receive(kind(*map(data.draw, types)))
        except ProtocolError:
            break
        for ticket, found in list(bench.link.imports.items()):
            if found.stage is Stage.OFFERED:
                bench.link.pull(ticket, ticket)
    bench.link.end("the connection has ended")
    if bench.fenced is not None:
        bench.fenced()
    assert not bench.link.imports and not bench.link.loans
    assert [call[:2] for call in bench.calls].count(("handed", 1)) == 1
