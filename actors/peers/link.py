"""One connection to a peer, after both sides' Hello: the states that are asked for, and the states that are lent.

A link does no input or output of its own. Frames and the ends of pulls are passed to it, and it calls its wire, its
mover and its owner. The connection is the lease: when it ends, the source ends its loans, and the sink fences its mover
and then fails what it was reading. No clock decides what is right; a clock only notices that a peer is silent.
"""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from baton.actors.peers.frames import (
    Beat,
    CancelTicket,
    Compute,
    Declined,
    Fetch,
    Frame,
    Give,
    Gone,
    Hand,
    Handed,
    Hello,
    Released,
    Rows,
    Taken,
)
from baton.actors.peers.mover import Landing, Mover
from baton.actors.storage.peers import StateQuery
from baton.actors.tokens import WIDTH, Tokens, count, cut

BEAT_SECONDS = 0.5  # a side sends a Beat this often
DEAD_SECONDS = 2.0  # a peer that has been silent for this long is dead


class ProtocolError(Exception):
    """The error for a frame that the peer may not send at this point. The connection is closed."""


class Stage(Enum):
    """How far an import or a loan has come."""

    ASKED = auto()  # sink: no answer yet
    OFFERED = auto()  # sink: the source lends a copy, and the cache has not decided yet
    PULLING = auto()  # sink: the mover reads the copy
    TAKEN = auto()  # sink: the copy is read, and the source has not confirmed yet
    COMPUTING = auto()  # source: a request computes the state
    LENDING = auto()  # source: the cache moves the state to host memory
    LENT = auto()  # source: the sink may read the copy


@dataclass(slots=True)
class Import:
    """A state that the peer was asked for."""

    salt: str
    tokens: Tokens
    least: int  # the least position of use
    first_page: int  # the first page whose KV is needed
    computed: bool  # whether the peer is to compute the state if it does not have it
    stage: Stage = Stage.ASKED
    where: bytes = b""
    position: int = 0
    key: int | None = None  # the cache's key for the copy; None: the cache has forgotten it
    landing: Landing | None = None
    seconds: float = 0.0  # how long the copy's bytes took to arrive
    failed: str = ""  # why the copy must not be used; the mover may still be reading it


@dataclass(slots=True)
class PeerLoan:
    """A state that the peer has asked for."""

    loan: int  # the number from `Owner.new_loan`
    salt: str
    tokens: Tokens
    least: int
    first_page: int
    stage: Stage


class Owner(Protocol):
    """The interface of the engine for its links."""

    def offered(self, ticket: int, salt: str, tokens: Tokens, first_page: int) -> None:
        """Note that a state can be pulled. `pull` or `cancel` follows."""

    def declined(self, link: "Link", ticket: int, why: str) -> None:
        """Note that a state will not come."""

    def landed(
        self, link: "Link", key: int, landing: Landing | None, error: str, seconds: float, first_page: int
    ) -> None:
        """Note that a pull has ended. landing: the copy if it was read and confirmed; None if it must not be used."""

    def new_loan(self, link: "Link", ticket: int) -> int:
        """Return a new number for a loan to the peer. ticket: the peer's ticket of the state."""
        ...

    def compute(self, loan: int, frame: Compute) -> str:
        """Begin to compute a state; return "", or why not. Answered by `Link.computed`."""
        ...

    def stop_computing(self, loan: int) -> None:
        """Abort the request that `compute` began."""

    def lend(self, loan: int, salt: str, tokens: Tokens, least: int, computed: bool) -> None:
        """Lend a copy of a state. Answered by `Link.lent` or `Link.not_lent`.

        computed: whether the state comes from `compute`
        """

    def unlend(self, loan: int) -> None:
        """End a loan, or withdraw a Lend that is not answered yet."""

    def take_over(self, link: "Link", frame: Hand) -> None:
        """Take over a session. Answered by `Link.taken_over`."""

    def take_state(self, link: "Link", frame: Give) -> None:
        """Fetch a state. Answered by `Link.taken_over`."""

    def handed(self, ticket: int, error: str) -> None:
        """Note the answer to a handover. error: why the peer did not take the session or state over; "" if it did."""


class Wire(Protocol):
    """The sending half of a connection."""

    def send(self, frame: Frame) -> None:
        """Send a frame after all earlier ones. Returns at once; frames sent after the end are dropped."""


class Link:
    """One connection to a peer."""

    def __init__(self, name: str, peer: Hello, wire: Wire, mover: Mover, owner: Owner, now: float) -> None:
        """name: unique among this engine's connections. peer: the peer's Hello."""
        self.name, self.peer, self.beat, self.ended = name, peer, Beat(), False
        self.byte_seconds = 0.0  # seconds to read one byte, from the pulls so far; 0: unknown
        self._wire, self._mover, self._owner, self.now = wire, mover, owner, now
        self._heard = self._beaten = now
        self.imports: dict[int, Import] = {}  # by ticket
        self.loans: dict[int, PeerLoan] = {}  # by the peer's ticket
        self._handing: set[int] = set()  # tickets of the sessions and states that the peer is to take over

    # Time

    def tick(self, now: float, beat: Beat) -> bool:
        """Send a Beat if it is time; return False if the peer has been silent for too long."""
        self.now = now
        if now - self._beaten >= BEAT_SECONDS:
            self._beaten = now
            self._wire.send(beat)
        return now - self._heard < DEAD_SECONDS

    # The sink

    @property
    def waits_for_computing(self) -> bool:
        """Whether the peer has been asked to compute a state, and has not answered."""
        return any(found.computed and found.stage is Stage.ASKED for found in self.imports.values())

    def ask(self, ticket: int, query: StateQuery, trace: str) -> None:
        """Ask the peer for a state: to compute it, or (with a hint) to lend one that it has."""
        end = count(query.tokens)
        if query.hint is None:
            self.imports[ticket] = Import(query.salt, query.tokens, end, query.first_page, True)
            self._wire.send(
                Compute(ticket, query.salt, query.tokens, query.have, query.first_page, query.priority, trace)
            )
        else:
            self.fetch(ticket, query.salt, query.tokens, query.have + 1, query.first_page)

    def fetch(self, ticket: int, salt: str, tokens: Tokens, least: int, first_page: int = 0) -> None:
        """Ask the peer for a state that it has at position `least` or deeper on the path of these tokens."""
        self.imports[ticket] = Import(salt, tokens, least, first_page, False)
        self._wire.send(Fetch(ticket, salt, tokens, least, first_page))

    def cancel(self, ticket: int) -> None:
        """Give up an import that the mover is not reading yet."""
        if self.imports.pop(ticket, None) is not None:
            self._wire.send(CancelTicket(ticket))

    def pull(self, ticket: int, key: int) -> None:
        """Begin to read an offered copy. If the offer has been withdrawn, the pull fails at once."""
        found = self.imports.get(ticket)
        if found is None:
            self._owner.landed(self, key, None, "the loan has ended", 0.0, 0)
            return
        found.stage, found.key = Stage.PULLING, key
        self._mover.pull(ticket, found.where, found.position, found.first_page)

    def pulled(self, ticket: int, landing: Landing | None, error: str, seconds: float) -> None:
        """Note that the mover has read a copy, or has failed. Until Released arrives the copy must not be used."""
        found = self.imports.get(ticket)
        if found is None or self.ended:
            return
        error = found.failed or error
        if error:
            del self.imports[ticket]
            self._wire.send(CancelTicket(ticket))
            self._land(found, None, error)
        else:
            found.stage, found.landing, found.seconds = Stage.TAKEN, landing, seconds
            self._wire.send(Taken(ticket))

    def forget_imports(self) -> None:
        """Give up every import, because the cache was restarted.

        Copies that are being read are dropped when they have arrived.
        """
        for ticket, found in list(self.imports.items()):
            found.key = None
            if found.stage in (Stage.ASKED, Stage.OFFERED):
                self.cancel(ticket)

    # The source

    def computed(self, ticket: int, error: str) -> None:
        """Note that the request which computes a state has ended."""
        loan = self.loans.get(ticket)
        if loan is None or loan.stage is not Stage.COMPUTING:
            return
        if error:
            del self.loans[ticket]
            self._wire.send(Declined(ticket, error))
        else:
            self._lend(loan, computed=True)

    def lent(self, ticket: int, key: int, position: int, page_size: int) -> None:
        """Note that the cache lends a copy, and offer it to the peer."""
        loan = self.loans[ticket]
        loan.stage = Stage.LENT
        first_page = min(loan.first_page, position // page_size) if page_size else 0
        self._wire.send(Rows(ticket, position, first_page, self._mover.lend(ticket, key, first_page)))

    def not_lent(self, ticket: int, why: str) -> None:
        del self.loans[ticket]
        self._wire.send(Declined(ticket, why))

    def void_loans(self, why: str) -> None:
        """Send Gone for each loan, because the cache was restarted and has forgotten the loans."""
        for ticket, loan in list(self.loans.items()):
            if loan.stage is not Stage.COMPUTING:
                del self.loans[ticket]
                self._mover.withdraw(ticket)
                self._wire.send(Gone(ticket, why))

    # Sessions and states that this engine gives away

    def hand(self, ticket: int, log: bytes, position: int) -> None:
        """Hand a session over to the peer. position: tokens that its state has consumed; 0: no state."""
        self._handing.add(ticket)
        self._wire.send(Hand(ticket, log, position))

    def give(self, ticket: int, salt: str, tokens: Tokens) -> None:
        """Let the peer fetch a state."""
        self._handing.add(ticket)
        self._wire.send(Give(ticket, salt, tokens))

    def taken_over(self, ticket: int, error: str) -> None:
        """Answer the peer's Hand or Give."""
        self._wire.send(Handed(ticket, error))

    # Frames

    def receive(self, frame: Frame) -> None:
        """Handle a frame of the peer. Raises ProtocolError if it does not fit."""
        self._heard = self.now
        match frame:
            case Beat():
                self.beat = frame
            case Rows():
                self._offered(frame)
            case Declined(ticket, why) | Gone(ticket, why):
                self._lost(ticket, why)
            case Released(ticket):
                self._released(ticket)
            case Hand():
                self._owner.take_over(self, frame)
            case Give():
                if not frame.tokens or len(frame.tokens) % WIDTH:
                    raise ProtocolError("a Give without tokens, or with incomplete ones")
                self._owner.take_state(self, frame)
            case Handed(ticket, error):
                if ticket not in self._handing:
                    raise ProtocolError(f"Handed for ticket {ticket}, which was not handed over")
                self._handing.discard(ticket)
                self._owner.handed(ticket, error)
            case Compute():
                loan = self._new_loan(frame.ticket, frame.salt, frame.tokens, count(frame.tokens), frame.first_page)
                loan.stage = Stage.COMPUTING
                if why := self._owner.compute(loan.loan, frame):
                    self.computed(frame.ticket, why)
            case Fetch():
                self._lend(self._new_loan(frame.ticket, frame.salt, frame.tokens, frame.least, frame.first_page))
            case Taken(ticket):
                self._taken(ticket)
            case CancelTicket(ticket):
                self._end_loan(ticket)
            case _:
                raise ProtocolError(f"a second {type(frame).__name__}")

    def _offered(self, rows: Rows) -> None:
        found = self.imports.get(rows.ticket)
        if found is None:
            return  # The import was cancelled; CancelTicket is on its way to the source.
        if found.stage is not Stage.ASKED:
            raise ProtocolError(f"Rows for ticket {rows.ticket}, which is {found.stage.name}")
        fits = max(found.least, 1) <= rows.position <= count(found.tokens)
        if not fits or not 0 <= rows.first_page <= found.first_page:
            raise ProtocolError(f"{rows} does not match the request")
        found.stage, found.where, found.position = Stage.OFFERED, rows.where, rows.position
        found.first_page = rows.first_page
        self._owner.offered(rows.ticket, found.salt, cut(found.tokens, 0, rows.position), rows.first_page)

    def _lost(self, ticket: int, why: str) -> None:
        """Note that the peer will not lend a copy, or that its loan has ended early."""
        found = self.imports.get(ticket)
        if found is None:
            return
        if found.stage is Stage.PULLING:
            found.failed = why or "the loan has ended"  # The mover still writes to the host memory: wait for `pulled`.
            return
        del self.imports[ticket]
        if found.stage is Stage.ASKED:
            self._owner.declined(self, ticket, why)
        elif found.stage is Stage.TAKEN:
            self._land(found, None, why)
        # If the copy was offered, the cache will call `pull` or `cancel`, which then do not find the ticket.

    def _released(self, ticket: int) -> None:
        found = self.imports.get(ticket)
        if found is None or found.stage is not Stage.TAKEN:
            raise ProtocolError(f"Released for ticket {ticket}, which was not taken")
        del self.imports[ticket]
        self._land(found, found.landing, "")

    def _land(self, found: Import, landing: Landing | None, error: str) -> None:
        if found.key is not None:
            self._owner.landed(self, found.key, landing, error, found.seconds, found.first_page)

    def _new_loan(self, ticket: int, salt: str, tokens: Tokens, least: int, first_page: int) -> PeerLoan:
        if ticket in self.loans or len(tokens) % WIDTH or not 0 < least <= count(tokens) or first_page < 0:
            raise ProtocolError(f"the request with ticket {ticket} is invalid, or the ticket is in use")
        loan = PeerLoan(self._owner.new_loan(self, ticket), salt, tokens, least, first_page, Stage.LENDING)
        self.loans[ticket] = loan
        return loan

    def _lend(self, loan: PeerLoan, computed: bool = False) -> None:
        loan.stage = Stage.LENDING
        self._owner.lend(loan.loan, loan.salt, loan.tokens, loan.least, computed)

    def _taken(self, ticket: int) -> None:
        loan = self.loans.get(ticket)
        if loan is None:
            self._wire.send(Gone(ticket, "there is no such loan"))
        elif loan.stage is not Stage.LENT:
            raise ProtocolError(f"Taken for ticket {ticket}, which is {loan.stage.name}")
        else:
            self._end_loan(ticket)
            self._wire.send(Released(ticket))

    def _end_loan(self, ticket: int) -> None:
        loan = self.loans.pop(ticket, None)
        if loan is None:
            return
        if loan.stage is Stage.COMPUTING:
            self._owner.stop_computing(loan.loan)
            return
        if loan.stage is Stage.LENT:
            self._mover.withdraw(ticket)
        self._owner.unlend(loan.loan)

    # The end

    def end(self, why: str) -> None:
        """End all loans and imports. Imports that are being read fail when the fenced mover can write no more."""
        if self.ended:
            return
        self.ended = True
        for ticket in list(self.loans):
            self._end_loan(ticket)
        for ticket in self._handing:
            self._owner.handed(ticket, why)
        for ticket, found in list(self.imports.items()):
            if found.stage in (Stage.ASKED, Stage.OFFERED):
                del self.imports[ticket]
                if found.stage is Stage.ASKED:
                    self._owner.declined(self, ticket, why)
        self._mover.close(lambda: self._fenced(why))

    def _fenced(self, why: str) -> None:
        for found in self.imports.values():
            self._land(found, None, why)
        self.imports.clear()
