"""The order in which the cache serves Acquires: the most urgent first.

Small ones may overtake large ones, up to a limit.
"""

from baton.actors.cache.actor import MAX_BLOCKED, MAX_OVERTAKING
from baton.actors.cache.below.assembly import make_cache
from baton.actors.cache.pages import PagePool
from baton.actors.lease import Ledger
from baton.actors.messages import Acquire, Cancel, Granted, Message, Refused, Return
from baton.actors.tokens import pack

PAGE = 4


class Bench:
    """A cache without the other actors, with more slots than any test needs."""

    def __init__(self, pages: int) -> None:
        self.sent: list[Message] = []
        self.cache = make_cache(lambda to, message: self.sent.append(message), Ledger(64), PagePool(pages, PAGE))
        self._grants = 0

    def ask(self, pages: int, priority: int = 0, overtaken: int = 0) -> int:
        """Send an Acquire that needs `pages` pages; return its grant."""
        self._grants += 1
        tokens = pack([self._grants] * (pages * PAGE - 1))
        self.cache.receive(Acquire(self._grants, tokens, pages * PAGE - 2, "", None, "", priority, overtaken=overtaken))
        self.cache.act()
        return self._grants

    def give_back(self, grant: int) -> None:
        [granted] = [message for message in self.sent if isinstance(message, Granted) and message.grant == grant]
        self.cache.receive(Return(grant, granted.state))
        self.cache.act()

    @property
    def granted(self) -> list[int]:
        return [message.grant for message in self.sent if isinstance(message, Granted)]


def test_an_urgent_acquire_that_fits_is_not_held_up() -> None:
    bench = Bench(20)
    first, head, small, urgent = bench.ask(12), bench.ask(12, priority=1), bench.ask(2, priority=1), bench.ask(2)
    assert bench.granted == [first, small, urgent]
    for grant in (small, urgent, first):
        bench.give_back(grant)
    assert bench.granted[-1] == head


def test_the_most_urgent_is_served_first_when_there_is_room_again() -> None:
    bench = Bench(20)
    first, later, urgent = bench.ask(16), bench.ask(15), bench.ask(15, priority=-1)
    bench.give_back(first)
    assert bench.granted == [first, urgent]
    bench.give_back(urgent)
    assert bench.granted == [first, urgent, later]


def test_only_a_few_waiting_acquires_are_tried_and_passed() -> None:
    """docs/design.md gives the limit of overtakings.

    Trying every Acquire of a long queue each time would cost too much.
    """
    assert (MAX_OVERTAKING, MAX_BLOCKED) == (8, 4)
    bench = Bench(20)
    first, *heads = (bench.ask(12) for _ in range(MAX_BLOCKED))
    assert bench.ask(1) in bench.granted, "three wait"
    heads.append(bench.ask(12))
    late = bench.ask(1)
    assert late not in bench.granted
    bench.give_back(first)
    assert bench.granted[-2:] == [heads[0], late], "three are left"


def test_no_acquire_is_overtaken_for_ever() -> None:
    bench = Bench(20)
    first, head = bench.ask(12), bench.ask(12)
    passing = [bench.ask(1) for _ in range(3)]
    for _ in range(MAX_OVERTAKING - 3):
        bench.give_back(passing.pop(0))
        passing.append(bench.ask(1))
    assert len(bench.granted) == 1 + MAX_OVERTAKING
    late = bench.ask(1)
    for grant in passing:
        bench.give_back(grant)
    assert not {head, late} & set(bench.granted)
    bench.give_back(first)
    assert bench.granted[-2:] == [head, late]


def test_an_acquire_that_is_repeated_has_been_overtaken_as_often() -> None:
    """When a row lacks a page, the scheduler cancels the other Acquires and repeats them later with their counts."""
    bench = Bench(20)
    first, head = bench.ask(12), bench.ask(12)
    passing = [bench.ask(1) for _ in range(3)]
    bench.cache.receive(Cancel(head))
    refused = bench.sent[-1]
    assert isinstance(refused, Refused) and (refused.grant, refused.overtaken) == (head, len(passing))
    bench.ask(12, overtaken=MAX_OVERTAKING)
    assert bench.ask(1) not in bench.granted
    bench.give_back(first)
    assert len(bench.granted) == 6
