"""The sessions of the simulated client. As in the api, each has a log and at most one running turn."""

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
    from tests.simulation.client import Exchange

REFUSALS = ("queue_full", "too_large", "draining")
Later = Callable[[float, Any], None]
Log = list[tuple[int, ...]]


@dataclass(eq=False)
class Session:
    """A session, as the client knows it."""

    name: str
    salt: str
    turns: deque[Turn]  # the turns that have not begun
    commands: tuple[Command, ...]
    log: Log = field(default_factory=list)
    """The history at the end of each turn that was not rewound. The last entry is the session's history."""
    turns_begun: int = 0  # number of turns that have begun
    running: "Exchange | None" = None
    closed: bool = False
    strays: Log = field(default_factory=list)  # possible histories of abandoned turns
    last_report: Kept | None = None  # the cache's last report about this session

    @property
    def history(self) -> tuple[int, ...]:
        return self.log[-1] if self.log else ()

    def may_stand_at(self, tokens: Iterable[int]) -> bool:
        """Return whether the session's name may be on the state after these tokens."""
        path = tuple(tokens)
        return any(known[: len(path)] == path for known in (*self.log, *self.strays, ()))


class Sessions:
    """The open sessions, and the turns and commands that are still to come."""

    def __init__(self, send: Send, ask: Callable[[Turn, Session, list[int]], "Exchange"], call_later: Later) -> None:
        self.open: dict[str, Session] = {}
        self.naming: set[int] = set()  # the tickets of the names without an answer
        self.suspending: dict[int, str] = {}  # the session of each suspension without an answer, by ticket
        self.counters: Counter[str] = Counter()
        self._send = send
        self._ask = ask  # submits a turn; the list is the whole history with the new tokens
        self._call_later = call_later  # calls `fire` with a value after a delay
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
        """Begin the next turn. Choose only now which earlier turn it continues, among those that have been answered."""
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
        session.turns_begun += 1
        session.running = self._ask(turn, session, [*base, *turn.ask.prompt])
        self._moment(session, "begun")

    def turn_ended(self, session: Session, exchange: "Exchange") -> None:
        """End a turn that was answered or abandoned by its client.

        The ring may still be computing an abandoned turn.
        """
        if session.running is not exchange:
            return
        session.running = None
        prompt = unpack(exchange.request.tokens)
        if exchange.end not in REFUSALS or exchange.tokens:
            session.log.append((*prompt, *exchange.tokens))
        if exchange.end is None:
            session.strays.append((*prompt, *exchange.oracle))
        self._moment(session, "ended")
        if session.turns and not session.closed:
            self._call_later(session.turns[0].ask.at, session)

    def _moment(self, session: Session, moment: str) -> None:
        """Schedule the session's commands for this moment ("begun" or "ended") of its current turn."""
        for command in session.commands:
            if command.turn == session.turns_begun - 1 and command.moment == moment:
                self._call_later(command.after, (session, command))

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
                    # Use a new name, because the ring must not see the name of a closed session again.
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
        ticket = next(self._tickets)
        self.naming.add(ticket)
        self._send("cache", Name(session.name, session.salt, pack(session.history), ticket))

    # Messages of the cache

    def receive(self, message: Kept | Suspended) -> None:
        match message:
            case Kept(name, ticket=ticket):
                assert not ticket or ticket in self.naming, f"name {ticket} is answered twice"
                self.naming.discard(ticket)
                if name in self.open:
                    self.open[name].last_report = message
            case Suspended(ticket, tier):
                assert ticket in self.suspending, f"suspension {ticket} is answered twice"
                del self.suspending[ticket]
                self.counters[f"suspended to {tier}"] += 1

    def restart(self) -> None:
        """Name all open sessions again after a restart, and repeat the suspensions without an answer."""
        self.naming.clear()
        for session in self.open.values():
            session.last_report = None
            self._name(session)
        for ticket, name in list(self.suspending.items()):
            if name in self.open:
                self._send("cache", Suspend(ticket, name))
            else:
                del self.suspending[ticket]
