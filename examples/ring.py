"""The ring without HTTP, threads or torch: two turns of a chat, and every message as it is delivered.

    python examples/ring.py

The model is the hash model of `models/hash_definition.py`: its state is a running hash of all tokens consumed, so that
a stale state, or another request's, gives a wrong token. The second turn resumes from the state of the first.
"""

from collections.abc import Iterator, Sequence

from baton.actors.actor import Actor, Address
from baton.actors.cache.actor import Cache
from baton.actors.cache.eviction import LeastRecentlyUsed
from baton.actors.cache.pages import PagePool
from baton.actors.cache.radix import RadixTree
from baton.actors.cache.tiers import NoTiers
from baton.actors.forward.actor import Forward
from baton.actors.forward.device import Work
from baton.actors.lease import Ledger
from baton.actors.messages import Delta, Message, Ran, Submit
from baton.actors.requests import Request, Sampling, Stops
from baton.actors.results.actor import ResultProcessor
from baton.actors.runtime.events import Event, UnitEvent, move_event
from baton.actors.runtime.mailboxes import Runtime
from baton.actors.runtime.observing import MeasuringObserver
from baton.actors.runtime.timings import Timings
from baton.actors.runtime.tracing import Traces
from baton.actors.runtime.transcript import transcript
from baton.actors.scheduler.actor import Scheduler
from baton.actors.scheduler.plan import Limits
from baton.actors.tokens import pack, unpack
from baton.models.hash_definition import INITIAL_STATE, expected_output, next_state, next_token

SLOTS, ROWS, VOCABULARY = 4, 2, 97


class HashDevice:
    """A device that computes each step at once. A state is one integer, and there are no KV pages."""

    copies_aside = False

    def __init__(self) -> None:
        self.forward: list[Ran] = []  # results of steps, for forward's mailbox
        self._states = [INITIAL_STATE] * SLOTS
        self._tokens: dict[int, list[int]] = {}  # each row's history
        self._slots: dict[int, int] = {}  # each row's slot

    def clear(self, slot: int) -> None:
        self._states[slot] = INITIAL_STATE

    def copy(self, source: int, target: int) -> None:
        self._states[target] = self._states[source]

    def open_row(self, row: int, grant: int, slot: int, request: Request, pages: list[int]) -> None:
        self._tokens[row], self._slots[row] = unpack(request.tokens), slot

    def extend_row(self, row: int, pages: list[int]) -> None:
        """Do nothing: rows have no pages."""

    def run(self, work: Work) -> None:
        """Feed the chunks of prompts and one token to each decoding row, and draw the tokens that follow."""
        drawn = []
        for chunk in work.chunks:
            self._consume(chunk.row, chunk.start, chunk.stop)
            drawn += [self._draw(chunk.row)] if chunk.samples else []
        for row, position in zip(work.decodes, work.positions, strict=True):
            self._consume(row, position, position + 1)
            drawn.append(self._draw(row))
        self.forward.append(Ran(work.step, pack(drawn), [], []))

    def _consume(self, row: int, start: int, stop: int) -> None:
        for position in range(start, stop):
            self._states[self._slots[row]] = next_state(
                self._states[self._slots[row]], self._tokens[row][position], position
            )

    def _draw(self, row: int) -> int:
        token = next_token(self._states[self._slots[row]], 0, VOCABULARY)
        self._tokens[row].append(token)
        return token


class Client:
    """The actor in the place of the api. It records the tokens of every answer."""

    def __init__(self) -> None:
        self.answers: dict[str, list[int]] = {}

    def receive(self, message: Message) -> None:
        if isinstance(message, Delta):
            for output in message.outputs:
                self.answers.setdefault(output.request, []).extend(unpack(output.tokens))

    def act(self) -> None:
        pass

    def leases(self) -> Iterator[object]:
        return iter(())


class Words:
    """A vocabulary whose tokens are whole words, so that it is itself the text stream of every output."""

    def detokenizer(self, prompt_tail: Sequence[int], skip_special_tokens: bool) -> "Words":
        return self

    def push(self, ids: Sequence[int]) -> str:
        return "".join(f" {id}" for id in ids)

    def flush(self) -> str:
        return ""


class Ring:
    """Four actors and a client, carried by one loop that delivers one mailbox after another."""

    def __init__(self) -> None:
        self.events: list[Event] = [UnitEvent(0.0, SLOTS)]
        ledger = Ledger(SLOTS, on_move=lambda move: self.events.append(move_event(move, 0.0)))
        observer = MeasuringObserver(Traces(lambda grant: ""), Timings(), lambda: 0.0, on_event=self.events.append)
        self._runtime = Runtime(ledger, observer=observer)
        self._device, self.client = HashDevice(), Client()
        sender = self._runtime.sender
        actors: dict[Address, Actor] = {
            "scheduler": Scheduler(sender("scheduler"), Limits(ROWS)),
            "cache": self._make_cache(ledger),
            "forward": Forward(sender("forward"), self._device, ROWS),
            "results": ResultProcessor(sender("results"), Words()),
            "api": self.client,
        }
        for address, actor in actors.items():
            self._runtime.add(address, actor)

    def _make_cache(self, ledger: Ledger) -> Cache:
        """Make a cache without KV pages and without copies below the slots, which evicts the least recently used."""
        send, tree = self._runtime.sender("cache"), RadixTree(PagePool(0, 1))
        eviction = LeastRecentlyUsed(tree)
        return Cache(send, ledger, tree, eviction, NoTiers(send, ledger, tree, eviction))

    def ask(self, request: Request) -> list[int]:
        """Submit a request, and deliver messages until no mailbox has one."""
        self._runtime.send("api", "scheduler", Submit(request))
        while any(mailbox.envelopes for mailbox in self._runtime.mailboxes.values()):
            for address in self._runtime.mailboxes:
                self._runtime.turn(address)
                while self._device.forward:
                    self._runtime.send("device", "forward", self._device.forward.pop(0))
        return self.client.answers[request.id]


def main() -> None:
    ring, history = Ring(), [7, 7, 7, 7, 7]
    for turn in ("first", "second"):
        answer = ring.ask(Request(turn, pack(history), len(history), Sampling(temperature=0.0), Stops(max_tokens=3)))
        assert answer == expected_output(history, 3, VOCABULARY, page_fold=False)
        history += [*answer, 9, 9]
    print(*transcript(ring.events), sep="\n")


if __name__ == "__main__":
    main()
