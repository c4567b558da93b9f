"""Several simulated engines with links between them: one seed draws their scenarios, cuts, and deaths of engines."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import combinations

from baton.actors.cache.radix import root_of, tokens_to
from baton.actors.control import Speeds
from baton.actors.peers.engines import PeerEngines, session_of
from baton.actors.peers.frames import VERSION, Beat, Compute, Hello, Role
from baton.actors.peers.link import Link
from baton.actors.requests import PeerHint
from baton.actors.tokens import unpack
from baton.models.hash_definition import next_state
from tests.simulation.checks import check_end
from tests.simulation.client import Exchange
from tests.simulation.driver import Simulation
from tests.simulation.network import Connection, Landed, LandingMemory
from tests.simulation.scenario import Scenario, draw
from tests.simulation.talks import STATE_BYTES, TOKEN_BYTES, draw_tiers

MOST_TURNS = 200_000
ROLES: tuple[Role, ...] = ("both", "prefill", "decode")


class Engine(Simulation):
    """A simulated engine with peers."""

    def __init__(self, name: str, scenario: Scenario, role: Role, rng: random.Random, tracing: bool) -> None:
        super().__init__(scenario, tracing)
        self.name, self._role, self._own = name, role, rng
        self.boots = 0
        self.waits_outside = True
        self.landing = LandingMemory()
        self._computing: dict[int, Exchange] = {}  # requests for peers, by loan
        self._buffers: dict[int, Landed] = {}
        self.peers: PeerEngines = self._boot()
        self.restart("it starts with peers")

    def _boot(self) -> PeerEngines:
        self.boots += 1
        size = self.device.page_size if self.device.entries else 0
        hello = Hello(
            VERSION,
            self.name,
            f"boot {self.boots}",
            self._role,
            "hash",
            "none",
            "none",
            "none",
            size,
            STATE_BYTES,
            TOKEN_BYTES * size,
            "pretended",
        )
        peers = Engines(hello, self, self, self.beat)
        peers.start(self.from_peers)
        return peers

    def _restart(self, actor: str) -> None:
        """Replace the four actors; the links stay."""
        self.peers.close()
        super()._restart(actor)
        self.peers.start(self.from_peers)

    def die(self) -> None:
        """Lose the process: its links, its states and its landing buffers. The clients submit their requests again."""
        self.counters["engine died"] += 1
        self.landing = LandingMemory()
        self._computing.clear()
        self.peers.close()
        self.peers = self._boot()
        self.restart("the engine died")

    def beat(self) -> Beat:
        """Draw a load."""
        return Beat(self._own.choice([0.0, 0.0, 50.0]), self._own.choice([0.0, 0.1, 1.0, 10.0]))

    # HostMemory

    def put(self, key: int, landed: Landed) -> None:
        """Store what a pull has read, after comparing it with the right state and entries."""
        copy = landed.copy(bool(self.device.entries))
        node = self.unit.cache.tiers.store._coming[key]
        state, right = 0, []
        for position, token in enumerate(unpack(tokens_to(node))):
            state = next_state(state, token, position)
            right.append(state)
        entries = tuple(right[landed.first :]) if self.device.entries else ()
        assert (copy.state, copy.entries, copy.position) == (state, entries, len(right)), (
            f"{self.name} has read {copy} from a peer, right is {state}, {entries}"
        )
        self.device.vault[key] = copy

    # Computing

    def begin(self, loan: int, frame: Compute, link: str) -> str:
        """Compute a state for a peer."""
        if self.client.draining:
            return "draining"
        prompt, hint = unpack(frame.tokens), PeerHint(link, frame.have)
        peers = self.peers

        def ended(reason: str) -> None:
            if self.peers is peers and self._computing.pop(loan, None) is not None:
                peers.computed(loan, "" if reason in ("stop", "length") else reason)

        name = f"{self.name}.{self.boots}.for a peer {loan}"
        self._computing[loan] = self.client.compute(name, prompt, frame.salt, hint, session_of(loan), ended)
        self.counters["computed for a peer"] += 1
        return ""

    def stop(self, loan: int) -> None:
        exchange = self._computing.pop(loan)
        self.client.give_up(exchange)


class Engines(PeerEngines):
    """PeerEngines that returns a landing buffer as soon as the link has reported on its pull."""

    _host: Engine

    def pull(self, ticket: int, key: int) -> None:
        link = self._asked.get(ticket)
        super().pull(ticket, key)
        found = link.imports.get(ticket) if link is not None else None
        if found is not None and found.key == key:
            pulls = [end for end in link._mover.pulls if end.ticket == ticket]
            self._host._buffers[key] = pulls[0].landed

    def landed(self, link: Link, key: int, landing: Landed | None, error: str, seconds: float, first_page: int) -> None:
        super().landed(link, key, landing, error, seconds, first_page)
        landed = self._host._buffers.pop(key, None)
        if landed is not None and landed.buffer in self._host.landing.in_use:
            self._host.landing.free(landed.buffer)


class Cluster:
    """Everything that one seed runs: two or three engines, and the network between them.

    may_draft: as in `draw`.
    is_narrow: whether engines have one row each.
    """

    def __init__(self, seed: int, tracing: bool = False, may_draft: bool = True, is_narrow: bool = False) -> None:
        rng = self.rng = random.Random(f"cluster of {seed}")
        self.counters: Counter[str] = Counter()
        scenarios = draw_scenarios(rng, seed, may_draft)
        if is_narrow:
            scenarios = [replace(each, limits=replace(each.limits, max_running=1)) for each in scenarios]
        self.engines = [
            Engine(f"engine {index}", scenario, rng.choice(ROLES), random.Random(f"{seed}.{index}"), tracing)
            for index, scenario in enumerate(scenarios)
        ]
        self.connections: list[Connection] = []
        self._cut_rate, self._death_rate = rng.choice([0.0, 0.0, 0.0005, 0.005]), rng.choice([0.0, 0.0, 0.0, 0.0005])
        self._frame_weight = rng.choice([0.2, 0.5, 0.5, 0.9])  # how often the network moves rather than an engine
        self._fetches = random.Random(f"fetches of {seed}")
        self._fetch_rate = self._fetches.choice([0.0, 0.0, 0.02])  # how often a state is moved ahead of its use
        self._fetching = 0
        self._giving: Counter[PeerEngines] = Counter()
        self._connect()

    def run(self) -> None:
        """Run until every request of every engine is answered and all rings are drained. Raises AssertionError."""
        try:
            for _ in range(MOST_TURNS):
                if not self._turn():
                    break
            else:
                raise AssertionError(f"no end after {MOST_TURNS} turns")
            self._check_end()
        finally:
            for engine in self.engines:
                engine.finish()
                self.counters += engine.counters
                for (_, outcome), number in engine.peers.outcomes.items():
                    self.counters[f"peer {outcome}"] += number

    def _turn(self) -> bool:
        """Let an engine take a turn or the network move. Return False when nothing is left to do."""
        self._disturb()
        engines = [engine for engine in self.engines if engine.can_move]
        network = [action for connection in self.connections for action in connection.actions()]
        self.connections = [connection for connection in self.connections if not connection.over]
        if network and (not engines or self.rng.random() < self._frame_weight):
            self.rng.choice(network)()
        elif engines:
            self.rng.choice(engines).turn()
        elif any(end.mover.pulls or end.mover.fencing for connection in self.connections for end in connection.ends):
            return True  # a slow mover, which will move
        else:
            return self._wind_down()
        for engine in self.engines:
            self._check(engine)
        return True

    def _disturb(self) -> None:
        """Cut a connection, kill an engine, or connect engines again, as the seed draws it."""
        whole = [connection for connection in self.connections if not connection.broken]
        pulling = [connection for connection in whole if connection.is_pulling]
        if self.rng.random() < self._cut_rate * (20 if pulling else 1):
            whole = pulling or whole
            if whole:
                self.counters["cut"] += 1
                self.rng.choice(whole).cut()
        if self.rng.random() < self._death_rate:
            engine = self.rng.choice(self.engines)
            for connection in self.connections:
                if engine in connection.engines:
                    connection.kill(engine)
            engine.die()
        if self.rng.random() < 0.05:
            self._connect()
        if self._fetches.random() < self._fetch_rate:
            self._fetch()

    def _fetch(self) -> None:
        """Move a state from one engine's pool to another engine, as when a session moves or the engine drains."""
        rng = self._fetches
        sink, source = rng.choice(self.engines), rng.choice(self.engines)
        links = sorted(name for name, link in sink.peers.links.items() if link.peer.engine == source.name)
        nodes = [node for node in source.unit.cache.tree.states if node.parent is not None]
        if links and nodes and not sink.client.draining:
            node = rng.choice(nodes)
            salt, tokens, link = root_of(node).salt, tokens_to(node), rng.choice(links)
            if rng.random() < 0.5:
                self._giving[source.peers] += 1
                source.peers.give(sink.name, salt, tokens, partial(self._given, source.peers))
            else:
                self._fetching += 1
                sink.peers.fetch(link, salt, tokens, self._fetched)

    def _given(self, giver: PeerEngines, error: str) -> None:
        self._giving[giver] -= 1
        self.counters["gift failed" if error else "given"] += 1

    def _fetched(self, error: str) -> None:
        self._fetching -= 1
        self.counters["fetch failed" if error else "fetched"] += 1

    def _connect(self) -> None:
        """Connect the engines that have no whole connection. Each end may still be at work on an older connection."""
        whole = [set(connection.engines) for connection in self.connections if not connection.broken]
        for pair in combinations(self.engines, 2):
            if set(pair) not in whole and not any(engine.client.draining for engine in pair):
                self.connections.append(Connection(pair, self.rng, self.counters))

    def _check(self, engine: Engine) -> None:
        """Check that what the links count as lent is what the cache counts as lent."""
        lending = engine.unit.cache.tiers.lending
        known = set(engine.peers._loans)
        on_the_way = {
            message.ticket
            for message in engine._queues.get(("peers", "cache"), ())
            if type(message).__name__ in ("Unlend", "Lend")
        }
        lent = set(lending._lent) | set(lending._asked)
        assert lent <= known | on_the_way, f"{engine.name} lends {lent - known}, and no link knows of it"

    def _wind_down(self) -> bool:
        """Take the next step of every engine's shutdown; return False when all are done."""
        for engine in self.engines:
            assert not engine.client.open, f"nothing moves, and {engine.client.open} are open at {engine.name}"
            engine.waits_outside = False
        moved = [engine.turn() for engine in self.engines]
        for engine in self.engines:
            engine.waits_outside = True
        return any(moved)

    def _check_end(self) -> None:
        assert self._fetching == 0, f"{self._fetching} fetches were not answered"
        for engine in self.engines:
            check_end(engine)
            tiers = engine.unit.cache.tiers
            assert not tiers.lending._lent and not tiers.lending._asked, f"{engine.name} still lends"
            assert not tiers.imports._inquiries and not tiers.imports._landing, f"{engine.name} still waits for a peer"
            at_rest = not engine.peers._loans and not engine.peers._asked
            assert not self._giving[engine.peers], f"{engine.name} waits for the answer to a gift"
            assert at_rest, f"{engine.name} has loans {engine.peers._loans} and asks {engine.peers._asked}"
            for link in engine.peers.links.values():
                assert not link.imports and not link.loans, f"{link.name} is not at rest"


def draw_scenarios(rng: random.Random, seed: int, may_draft: bool) -> list[Scenario]:
    """Draw the scenarios of two or three engines whose states have the same layout. may_draft: as in `draw`."""
    drawn = [draw(seed * 3 + index, may_draft=may_draft) for index in range(rng.choice([2, 2, 3]))]
    first = drawn[0]
    return [_adapt(rng, first, scenario) for scenario in drawn]


def _adapt(rng: random.Random, first: Scenario, scenario: Scenario) -> Scenario:
    """Give a scenario the page size of the first one, tiers, and speeds at which peers may pay."""
    size = first.limits.page_size
    pages = 0
    if size:
        tokens = max(scenario.pages * scenario.limits.page_size, 60)
        pages = -(-tokens // size)
    limits = replace(scenario.limits, page_size=size)
    tiers = replace(draw_tiers(rng, size > 0), page_size=max(size, 1))
    if not tiers.host_bytes:
        tiers = replace(tiers, host_bytes=3 * tiers.memory_bytes(30))
    speeds = Speeds(rng.choice([0.0, 1.0, 1.0]), rng.choice([1e-7, 1e-5, 1e-3]))
    return replace(
        scenario, pages=pages, limits=limits, tiers=tiers, speeds=speeds, worth_asking=rng.choice([0, 0, 3, 12])
    )


def first_failure(seeds: range, make: Callable[[int], Cluster] = Cluster) -> int | None:
    """Return the first of these seeds whose cluster fails; None if none does."""
    for seed in seeds:
        try:
            make(seed).run()
        except Exception:
            return seed
    return None
