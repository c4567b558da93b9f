"""The api's sessions in the simulation: a log and at most one running turn each, as the api keeps them."""

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

from baton.actors.actor import Send
from baton.actors.messages import Abort, Kept, Name, Suspend, Suspended, Unname
from baton.actors.tokens import pack, unpack
from tests.simulation.talks import Command, Talk, Turn

if TYPE_CHECKING:
    from tests.simulation.client import Asked

REFUSALS = ("queue_full", "too_large", "draining")
Later = Callable[[float, Any], None]
Log = list[tuple[int, ...]]


@dataclass(eq=False)
class Session:
    """log: the history behind each of its turns, but for those that were forgotten; the last is the session's own.

    strays: where an abandoned turn may have got to. kept: what the cache told last.
    """

    name: str
    salt: str
    turns: deque[Turn]
    commands: tuple[Command, ...]
    log: Log = field(default_factory=list)
    begun: int = 0
    running: "Asked | None" = None
    closed: bool = False
    strays: Log = field(default_factory=list)
    kept: Kept | None = None

    @property
    def history(self) -> tuple[int, ...]:
        return self.log[-1] if self.log else ()

    def may_stand_at(self, tokens: Iterable[int]) -> bool:
        """Whether its name may be on the state behind these tokens."""
        path = tuple(tokens)
        return any(known[: len(path)] == path for known in (*self.log, *self.strays, ()))


class Sessions:
    """ask: sends one turn, the whole history with what is new behind it. later: has `fire` called after some time."""

    def __init__(self, send: Send, ask: Callable[[Turn, Session, list[int]], "Asked"], later: Later) -> None:
        self.open: dict[str, Session] = {}
        self.suspending: dict[int, str] = {}
        self.counters: Counter[str] = Counter()
        self._send = send
        self._ask = ask
        self._later = later
        self._tickets = count(1)

    # Time

    def fire(self, what: Any) -> None:
        match what:
            case Talk(id, _, salt, turns, commands):
                self._begin(Session(id, salt, deque(turns), commands))
            case Session():
                self._next_turn(what)
            case (Session() as session, Command() as command):
                self._carry_out(session, command)

    def _begin(self, session: Session) -> None:
        self.open[session.name] = session
        self._name(session)
        self._next_turn(session)

    def _next_turn(self, session: Session) -> None:
        """The next one; what it goes on from is decided now, as the turns so far are known now."""
        if session.closed or session.running is not None or not session.turns:
            return
        turn = session.turns.popleft()
        base = list(session.history)
        if turn.back is not None and session.log:
            at = int(turn.back * len(session.log))
            base = list(session.log[at])
            self.counters["session rewound" if turn.rewinds else "session branched"] += 1
            if turn.rewinds:
                del session.log[at + 1 :]
                self._name(session)
        session.begun += 1
        session.running = self._ask(turn, session, [*base, *turn.ask.prompt])
        self._moment(session, "begun")

    def ended(self, session: Session, asked: "Asked") -> None:
        """A turn was answered, or its client went away: then it is over for the api, and not yet for the ring."""
        if session.running is not asked:
            return
        session.running = None
        prompt = unpack(asked.request.tokens)
        if asked.end not in REFUSALS or asked.tokens:
            session.log.append((*prompt, *asked.tokens))
        if asked.end is None:
            session.strays.append((*prompt, *asked.oracle))
        self._moment(session, "ended")
        if session.turns and not session.closed:
            self._later(session.turns[0].ask.at, session)

    def _moment(self, session: Session, moment: str) -> None:
        for command in session.commands:
            if command.turn == session.begun - 1 and command.moment == moment:
                self._later(command.after, (session, command))

    # Commands

    def _carry_out(self, session: Session, command: Command) -> None:
        busy = session.running is not None
        if session.closed:
            return
        match command.what:
            case "suspend" if not busy:
                self.suspend(session)
            case "rewind" if session.log and not busy:
                self.counters["session rewound"] += 1
                session.log.pop()
                self._name(session)
            case "fork":
                self.counters["session forked in a turn" if busy else "session forked"] += 1
                self._begin(Session(command.fork, session.salt, deque(command.turns), (), list(session.log)))
            case "close" | "idle" if command.what == "close" or not busy:
                self.counters["session closed in a turn" if busy else "session closed"] += 1
                self.close(session)
                if command.reopens and session.turns:
                    # For the ring it is another one: no name comes again.
                    self._begin(Session(f"{session.name}'", session.salt, session.turns, ()))

    def suspend(self, session: Session) -> None:
        ticket = next(self._tickets)
        self.suspending[ticket] = session.name
        self.counters["session suspended"] += 1
        self._send("cache", Suspend(ticket, session.name))

    def close(self, session: Session) -> None:
        session.closed = True
        del self.open[session.name]
        if session.running is not None:
            session.running.left = True
            self._send("scheduler", Abort(session.running.request.id, "aborted"))
        self._send("cache", Unname(session.name))

    def _name(self, session: Session) -> None:
        self._send("cache", Name(session.name, session.salt, pack(session.history)))

    # What the cache tells

    def receive(self, message: Kept | Suspended) -> None:
        match message:
            case Kept(name):
                if name in self.open:
                    self.open[name].kept = message
            case Suspended(ticket, tier):
                assert ticket in self.suspending, f"suspension {ticket} is answered twice"
                del self.suspending[ticket]
                self.counters[f"suspended to {tier}"] += 1

    def restarted(self) -> None:
        """The new unit knows of nothing: it is told again, what was asked of the old one too."""
        for session in self.open.values():
            session.kept = None
            self._name(session)
        for ticket, name in list(self.suspending.items()):
            if name in self.open:
                self._send("cache", Suspend(ticket, name))
            else:
                del self.suspending[ticket]
