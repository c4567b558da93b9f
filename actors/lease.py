"""Who holds which state slot: the lease that owns one, and the ledger that knows them all."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NoReturn

from msgspec import Struct


class LeaseError(Exception):
    """A lease was used by someone who does not hold it."""


class Place(StrEnum):
    FREE = "free"
    OWNED = "owned"
    TRANSIT = "transit"
    CACHED = "cached"
    QUARANTINED = "quarantined"


class Loan(Struct, frozen=True, array_like=True):
    """The right to copy from a slot that stays its holder's; it ends exactly once, by Copied or Return."""

    slot: int
    generation: int


class Lease:
    """The one handle that owns a slot. Moving it makes a new handle and leaves this one dead, with the reason why."""

    __slots__ = ("_generation", "_gone", "_ledger", "_slot")

    def __init__(self, slot: int, generation: int, ledger: "Ledger") -> None:
        self._slot = slot
        self._generation = generation
        self._ledger = ledger
        self._gone: str | None = None

    @property
    def slot(self) -> int:
        self.check()
        return self._slot

    @property
    def generation(self) -> int:
        self.check()
        return self._generation

    @property
    def live(self) -> bool:
        return self._gone is None

    def check(self) -> None:
        """Raise LeaseError, naming where it went, if this handle is dead."""
        if self._gone is not None:
            raise LeaseError(f"lease {self._slot}#{self._generation} was {self._gone}")

    def surrender(self, how: str) -> tuple[int, int]:
        """Kill this handle; returns (slot, generation). For the ledger."""
        self.check()
        self._gone = how
        return self._slot, self._generation

    def __repr__(self) -> str:
        return f"Lease({self._slot}#{self._generation}{'' if self._gone is None else ', ' + self._gone})"

    def __reduce__(self) -> NoReturn:
        raise LeaseError(f"{self!r} cannot be copied or pickled")

    def __del__(self) -> None:
        if self._gone is None:
            self._ledger.dropped(self._slot, self._generation)


@dataclass(slots=True)
class Entry:
    """What the ledger knows of a slot. `holder` is an actor's name, `sender → receiver`, or a node's id.

    since: when it came to this place, by the ledger's clock.
    """

    place: Place = Place.FREE
    holder: str = "pool"
    generation: int = 0
    loans: int = 0
    since: float = 0.0


@dataclass(frozen=True, slots=True)
class Move:
    """One change of a slot's place: the ledger can be rebuilt from these."""

    slot: int
    generation: int
    place: Place
    holder: str
    how: str


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken rule: which slot, what the ledger knows, and what was claimed."""

    slot: int
    known: str
    claimed: str


class Ledger:
    """The record of every slot of the state pool: its place, holder, generation and open loans.

    It makes, moves and ends leases. A slot has exactly one Place, so the five counts sum to the pool at every moment.
    LeaseError where a lease or loan is not what the call needs. All but `quarantine` and `audit` take O(1).
    on_move: called after each change of place. on_violation: whenever a slot is quarantined.
    clock: seconds, for Entry.since.
    """

    def __init__(
        self,
        slots: int,
        on_move: Callable[[Move], None] | None = None,
        on_violation: Callable[[Violation], None] | None = None,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._clock = clock
        self.entries = [Entry() for _ in range(slots)]
        self.counts: Counter[Place] = Counter({Place.FREE: slots})
        self.moves: Counter[str] = Counter()
        self.violations = 0
        self._free = list(range(slots - 1, -1, -1))
        self._on_move = on_move
        self._on_violation = on_violation
        self._closed = False

    def close(self) -> None:
        """The pool is gone: handles that are still about may drop silently."""
        self._closed = True

    def take(self, holder: str) -> Lease | None:
        """A lease of a free slot, with a generation of its own; None if there is none."""
        if not self._free:
            return None
        slot = self._free.pop()
        self.entries[slot].generation += 1
        self._place(slot, Place.OWNED, holder, "take")
        return Lease(slot, self.entries[slot].generation, self)

    def free(self, lease: Lease) -> None:
        entry = self._entry(lease, Place.OWNED, Place.CACHED)
        if entry.loans:
            raise LeaseError(f"{lease!r} has {entry.loans} loans and cannot be freed")
        slot, _ = lease.surrender("freed")
        self._place(slot, Place.FREE, "pool", "free")
        self._free.append(slot)

    def depart(self, lease: Lease, sender: str, receiver: str, message: str) -> Lease:
        """The sender's handle dies; the new one is in transit until `arrive`."""
        self._entry(lease, Place.OWNED)
        slot, generation = lease.surrender(f"sent by {sender} to {receiver} in {message}")
        self._place(slot, Place.TRANSIT, f"{sender} → {receiver}", message)
        return Lease(slot, generation, self)

    def arrive(self, lease: Lease, receiver: str) -> None:
        self._entry(lease, Place.TRANSIT)
        self._place(lease.slot, Place.OWNED, receiver, "arrive")

    def cache(self, lease: Lease, node: int) -> None:
        """The cache keeps the state at a node of its tree."""
        self._entry(lease, Place.OWNED)
        self._place(lease.slot, Place.CACHED, f"node {node}", "cache")

    def uncache(self, lease: Lease, holder: str) -> None:
        """The state leaves its node with its lease."""
        entry = self._entry(lease, Place.CACHED)
        if entry.loans:
            raise LeaseError(f"{lease!r} has {entry.loans} loans and cannot leave its node")
        self._place(lease.slot, Place.OWNED, holder, "uncache")

    def lend(self, lease: Lease) -> Loan:
        self._entry(lease, Place.CACHED).loans += 1
        return Loan(lease.slot, lease.generation)

    def end_loan(self, loan: Loan) -> None:
        entry = self.entries[loan.slot]
        if entry.generation != loan.generation or not entry.loans:
            raise LeaseError(f"{loan} has ended before: {entry}")
        entry.loans -= 1

    def loans(self, lease: Lease) -> int:
        return self.entries[lease.slot].loans

    def dropped(self, slot: int, generation: int) -> None:
        """A live handle was garbage-collected: nobody can free this slot any more."""
        if not self._closed and self.entries[slot].generation == generation:
            self.quarantine(slot, "its lease was dropped")

    def quarantine(self, slot: int, claimed: str) -> None:
        """Take a slot out of use, and report what was known and what was claimed of it."""
        entry = self.entries[slot]
        self.violations += 1
        violation = Violation(slot, f"{entry.place} by {entry.holder} (generation {entry.generation})", claimed)
        if entry.place is Place.FREE:
            self._free.remove(slot)
        if entry.place is not Place.QUARANTINED:
            self._place(slot, Place.QUARANTINED, "nobody", claimed)
        if self._on_violation is not None:
            self._on_violation(violation)

    def audit(self, holdings: Mapping[str, Iterable[Lease]]) -> list[Violation]:
        """Compare what each holder says it has with the ledger. Quarantines nothing: the caller decides."""
        found = []
        claims: dict[int, str] = {}
        for holder, leases in holdings.items():
            for lease in leases:
                entry = self.entries[lease.slot]
                known = f"{entry.place} by {entry.holder} (generation {entry.generation})"
                at = holder if entry.place is not Place.CACHED else "cache"
                expected = entry.place in (Place.OWNED, Place.CACHED) and (
                    entry.holder == holder or entry.place is Place.CACHED
                )
                if lease.slot in claims or not expected or at != holder or entry.generation != lease.generation:
                    other = f", also by {claims[lease.slot]}" if lease.slot in claims else ""
                    found.append(Violation(lease.slot, known, f"held by {holder} as {lease!r}{other}"))
                claims[lease.slot] = holder
        held = (Place.OWNED, Place.CACHED)
        for slot, entry in enumerate(self.entries):
            if entry.place in held and slot not in claims:
                found.append(Violation(slot, f"{entry.place} by {entry.holder}", "held by nobody"))
        if self.counts.total() != len(self.entries) or self.counts[Place.FREE] != len(self._free):
            found.append(Violation(-1, f"{self.counts}", f"{len(self.entries)} slots, {len(self._free)} free"))
        return found

    def _entry(self, lease: Lease, *places: Place) -> Entry:
        entry = self.entries[lease.slot]
        if entry.generation != lease.generation or entry.place not in places:
            raise LeaseError(f"{lease!r} is {entry.place} by {entry.holder} (generation {entry.generation})")
        return entry

    def _place(self, slot: int, place: Place, holder: str, how: str) -> None:
        entry = self.entries[slot]
        self.counts[entry.place] -= 1
        self.counts[place] += 1
        self.moves[how] += 1
        entry.place, entry.holder, entry.since = place, holder, self._clock()
        if self._on_move is not None:
            self._on_move(Move(slot, entry.generation, place, holder, how))
