"""Drives the real actors by a seed: which message is delivered next, who acts, how late the device is, what clients do.

First in, first out per sender and receiver is the contract; nothing more is taken for granted.
"""

import random
from collections import deque
from dataclasses import dataclass, field

from actors.actor import Actor, Address
from actors.cache import Cache
from actors.forward import Forward
from actors.lease import Ledger, Move, Place
from actors.messages import (
    Abort,
    Delta,
    Drain,
    Drained,
    Ended,
    Flush,
    Flushed,
    Message,
    Ran,
    Request,
    Sampling,
    Stops,
    Submit,
)
from actors.pages import Pages
from actors.plan import Limits
from actors.radix import path
from actors.result_processor import ResultProcessor
from actors.scheduler import Scheduler
from actors.strategy import Strategy
from actors.tokens import pack, unpack
from actors.transport import Codec, arrive, depart
from models.hash_definition import expected_output, next_state
from tests.simulation.hash_device import HashDevice

VOCABULARY = 61


class Letters:
    """Token i as a letter."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(ord("0") + i) for i in ids)


class ScribblingPages(Pages):
    """Tells the device of freed pages, so that it may overwrite them."""

    device: HashDevice | None = None

    def _reclaim(self, page: int) -> None:
        super()._reclaim(page)
        if not self.users[page] and not self.names[page] and self.device is not None:
            self.device.scribble_page(page)


@dataclass
class Asked:
    """A request of the client's, and what has come back of it."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    end: str | None = None
    answers: int = 0
    aborted: bool = False


@dataclass
class World:
    """What a seed draws before anything runs."""

    slots: int
    pages: int
    limits: Limits
    requests: int
    ask_rate: float
    abort_rate: float
    flush_rate: float
    codec: bool

    @classmethod
    def draw(cls, rng: random.Random) -> "World":
        page_size = rng.choice([1, 2, 3, 4, 7])
        paged = rng.random() < 0.7
        longest = 60
        pages = -(-longest // page_size) + rng.choice([0, 0, 1, 5, 20, 200]) if paged else 0
        max_running = rng.randint(1, 6)
        limits = Limits(
            max_running=max_running,
            max_queue=rng.choice([3, 100, 100, 100]),
            step_tokens=rng.choice([max_running + 1, 8, 16, 64]),
            page_size=page_size if paged else 0,
            chunk_size=rng.choice([2, 4, 8]),
            track_interval=rng.choice([0, 3, 4, 8]),
            depth=rng.choice([1, 2, 2]),
            strategy=rng.choice(list(Strategy)),
        )
        slots = rng.choice([1, 2, 3, max_running, max_running + 2, 4 * max_running])
        return cls(
            slots=slots,
            pages=pages,
            limits=limits,
            requests=rng.randint(3, 20),
            ask_rate=rng.choice([0.01, 0.03, 0.1, 0.5]),
            abort_rate=rng.choice([0, 0, 0.1, 0.4]),
            flush_rate=rng.choice([0, 0, 0, 0.02]),
            codec=rng.random() < 0.2,
        )


class Client:
    """The api actor of the simulation: it asks, aborts, and remembers what it was told."""

    def __init__(self) -> None:
        self.asked: dict[str, Asked] = {}
        self.flushed = 0
        self.drained: list[list[str]] = []

    def receive(self, message: Message) -> None:
        match message:
            case Delta(outputs):
                for output in outputs:
                    asked = self.asked[output.request]
                    assert asked.end is None, f"{output.request} was answered after its end"
                    asked.tokens += unpack(output.tokens)
                    asked.text += output.text
                    assert output.completion_tokens == len(asked.tokens)
                    if output.finish_reason is not None:
                        asked.end, asked.answers = output.finish_reason, asked.answers + 1
            case Ended(request, reason):
                asked = self.asked[request]
                asked.end, asked.answers = reason, asked.answers + 1
            case Flushed():
                self.flushed += 1
            case Drained(astray):
                self.drained.append(astray)
            case _:
                raise TypeError(f"the api got {message!r}")

    def act(self) -> None:
        pass

    def leases(self) -> list[object]:
        return []


class Simulation:
    """One seed's world. `trace` is the schedule as it went, for reading."""

    def __init__(self, seed: int, world: World | None = None) -> None:
        self.rng = random.Random(seed)
        self.world = world or World.draw(self.rng)
        world = self.world
        self.queues: dict[tuple[str, Address], deque[Message]] = {}
        self.due: set[Address] = set()
        self.trace: list[str] = []
        self.ledger = Ledger(world.slots, self._moved, self._violated)
        self.codec = Codec(self.ledger) if world.codec else None
        self.device = HashDevice(world.slots, world.pages, max(world.limits.page_size, 1), VOCABULARY, self._ran)
        pages = ScribblingPages(world.pages, max(world.limits.page_size, 1))
        pages.device = self.device
        self.client = Client()
        self.cache = Cache(self._sender("cache"), self.ledger, pages)
        self.scheduler = Scheduler(self._sender("scheduler"), world.limits)
        self.forward = Forward(self._sender("forward"), self.device, world.limits.max_running)
        self.results = ResultProcessor(self._sender("results"), Letters())
        self.actors: dict[Address, Actor] = {
            "cache": self.cache,
            "scheduler": self.scheduler,
            "forward": self.forward,
            "results": self.results,
            "api": self.client,
        }
        self.to_ask = [self._draw_request(i) for i in range(world.requests)]
        self.delivered = 0

    def run(self, check_every: int = 16) -> None:
        """Until every request is answered and the ring is drained; AssertionError or an actor's error if not."""
        draining = False
        for _ in range(200_000):
            self._client_moves()
            if not self._something():
                if draining:
                    break
                if self.to_ask:
                    continue
                open_ = [asked.request.id for asked in self.client.asked.values() if asked.end is None]
                assert not open_, f"nothing moves, and {open_} are open"
                draining = True
                self._send("api", "scheduler", Drain())
            self._audit()
            if self.delivered % check_every == 0:
                self._check_tree()
        self._check_end()

    def _something(self) -> bool:
        """One delivery, one turn to act, or one call on the device."""
        choices: list[object] = [pair for pair, queue in self.queues.items() if queue]
        choices += sorted(self.due)
        if self.device.stream:
            choices += ["device"] * 2
        if not choices:
            return False
        choice = self.rng.choice(choices)
        if choice == "device":
            self.device.execute()
        elif isinstance(choice, tuple):
            self._deliver(*choice)
        else:
            self.due.discard(choice)
            self.actors[choice].act()
        return True

    def _deliver(self, sender: str, to: Address) -> None:
        message = self.queues[sender, to].popleft()
        self.trace.append(f"{sender} → {to}: {message}")
        arrive(message, to, self.ledger)
        self.actors[to].receive(message)
        self.due.add(to)
        self.delivered += 1

    def _send(self, sender: str, to: Address, message: Message) -> None:
        depart(message, sender, to, self.ledger)
        if self.codec is not None:
            message = self.codec.round_trip(message)
        self.queues.setdefault((sender, to), deque()).append(message)

    def _sender(self, name: str):
        return lambda to, message: self._send(name, to, message)

    def _ran(self, ran: Ran) -> None:
        self._send("device", "forward", ran)

    def _moved(self, move: Move) -> None:
        if move.place is Place.FREE:
            self.device.scribble_slot(move.slot)

    def _violated(self, violation: object) -> None:
        raise AssertionError(violation)

    # Clients

    def _draw_request(self, index: int) -> Request:
        rng = self.rng
        family = random.Random(rng.randrange(3))
        shared = [family.randrange(VOCABULARY) for _ in range(40)]
        prompt = shared[: rng.randint(1, 30)] + [rng.randrange(VOCABULARY) for _ in range(rng.choice([0, 0, 1, 5, 12]))]
        stop_ids = tuple(rng.sample(range(VOCABULARY), rng.choice([0, 0, 3, 12])))
        stops = Stops(rng.randint(1, 17), strings=("0",) if rng.random() < 0.2 else (), token_ids=stop_ids)
        ends = tuple(sorted(rng.sample(range(1, len(prompt) + 1), min(len(prompt), rng.choice([0, 0, 1, 2])))))
        return Request(
            id=f"r{index}",
            tokens=pack(prompt),
            prompt_len=len(prompt),
            sampling=Sampling(temperature=0.0),
            stops=stops,
            priority=rng.choice([0, 0, 0, 1, -1]),
            salt=rng.choice(["", "", "", "tenant"]),
            message_ends=ends,
        )

    def _client_moves(self) -> None:
        rng = self.rng
        if self.to_ask and rng.random() < self.world.ask_rate:
            request = self._continue(self.to_ask.pop())
            self.client.asked[request.id] = Asked(request)
            self._send("api", "scheduler", Submit(request))
        live = [asked for asked in self.client.asked.values() if asked.end is None and not asked.aborted]
        if live and rng.random() < self.world.abort_rate * 0.02:
            asked = rng.choice(live)
            asked.aborted = True
            self._send("api", "scheduler", Abort(asked.request.id, rng.choice(["aborted", "timeout"])))
        if rng.random() < self.world.flush_rate * 0.1:
            self._send("api", "cache", Flush(1))

    def _continue(self, request: Request) -> Request:
        """Half of the requests are the next turn of one that was answered."""
        answered = [asked for asked in self.client.asked.values() if asked.tokens and asked.end is not None]
        if not answered or self.rng.random() < 0.5:
            return request
        asked = self.rng.choice(answered)
        tokens = (unpack(asked.request.tokens) + asked.tokens + unpack(request.tokens)[-3:])[:42]
        ends = tuple(end for end in request.message_ends if end <= len(tokens))
        return Request(
            request.id,
            pack(tokens),
            len(tokens),
            request.sampling,
            request.stops,
            salt=asked.request.salt,
            message_ends=ends,
        )

    # Checks

    def _audit(self) -> None:
        found = self.ledger.audit({name: actor.leases() for name, actor in self.actors.items()})
        assert not found, found

    def _check_tree(self) -> None:
        """Every state and page of the tree holds what its path says."""
        tree, device = self.cache.tree, self.device
        named = [0] * len(tree.pages)
        for node in tree.nodes:
            for page in node.pages:
                named[page] += 1
        assert named == tree.pages.names, "page names differ from the tree's"
        for node in tree.nodes:
            tokens = unpack(b"".join(step.tokens for step in reversed(list(path(node)))))
            state, entries = 0, []
            for position, token in enumerate(tokens):
                state = next_state(state, token, position)
                entries.append(state)
            if node.state is not None:
                assert device.states[node.state.slot] == state, f"node {node.id} at {node.end} holds a wrong state"
            if device.entries:
                assert device.read(tree.table(node), len(tokens)) == entries, f"node {node.id} names a wrong page"

    def _check_end(self) -> None:
        self._check_tree()
        assert self.client.drained == [[]], self.client.drained
        for asked in self.client.asked.values():
            assert asked.answers == 1, f"{asked.request.id} was answered {asked.answers} times"
            self._check_answer(asked)
        counts, pages = self.ledger.counts, self.cache.pages
        assert counts[Place.FREE] + counts[Place.CACHED] == self.world.slots, counts
        assert pages.free + pages.cached == len(pages)
        assert not self.results.records and not self.cache.accounts and not self.forward.rows
        self.ledger.close()

    def _check_answer(self, asked: Asked) -> None:
        """Every token is the oracle's, and the answer ends where it should."""
        stops = asked.request.stops
        paged = bool(self.world.pages)
        oracle = expected_output(unpack(asked.request.tokens), stops.max_tokens, VOCABULARY, page_fold=paged)
        assert asked.tokens == oracle[: len(asked.tokens)], f"{asked.request.id}: {asked.tokens} is not {oracle}"
        if asked.aborted or asked.end in ("queue_full", "draining"):
            return
        letters = Letters().decode(oracle)
        ends = [at + 1 for at, token in enumerate(oracle) if token in stops.token_ids or letters[at] in stops.strings]
        expected = min([*ends, stops.max_tokens])
        assert asked.end == ("stop" if ends else "length"), f"{asked.request.id} ended with {asked.end}"
        assert len(asked.tokens) == expected, f"{asked.request.id} has {len(asked.tokens)} tokens, not {expected}"
