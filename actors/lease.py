"""Ownership of state slots: the lease, which owns one slot, and the ledger, which records all of them."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NoReturn

from msgspec import Struct


class LeaseError(Exception):
    """A lease or loan was used after it had ended, or by an actor that does not hold it."""


class Place(StrEnum):
    """Where a slot is.

    FREE ─ take ─▶ OWNED ─ depart ─▶ TRANSIT ─ arrive ─▶ OWNED, by the receiver
                   OWNED ─ cache ──▶ CACHED ─ uncache ─▶ OWNED
    OWNED or CACHED ─ free ─▶ FREE
    any place ─ quarantine ─▶ QUARANTINED
    """

    FREE = "free"  # in the pool
    OWNED = "owned"  # held by an actor
    TRANSIT = "transit"  # inside a message
    CACHED = "cached"  # at a node of the radix tree
    QUARANTINED = "quarantined"  # out of use, because a rule was broken


class Loan(Struct, frozen=True, array_like=True):
    """The right to copy from a slot that another actor keeps. It ends exactly once, with Copied or Return."""

    slot: int
    generation: int


class Lease:
    """The only handle that owns a slot. A move makes a new handle; the old one is dead and names where it went."""

    __slots__ = ("_generation", "_gone", "_ledger", "_slot")

    def __init__(self, slot: int, generation: int, ledger: "Ledger") -> None:
        self._slot = slot
        self._generation = generation
        self._ledger = ledger
        self._gone: str | None = None  # how this handle ended; None while it is live

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
        """Raise LeaseError if this handle is dead, and say where it went."""
        if self._gone is not None:
            raise LeaseError(f"lease {self._slot}#{self._generation} was {self._gone}")

    def surrender(self, how: str) -> tuple[int, int]:
        """End this handle, and return (slot, generation). Called only by the ledger and the codec.

        how: how the handle ended, for error messages.
        """
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
    """The ledger's record of a slot."""

    place: Place = Place.FREE
    holder: str = "pool"  # an actor's name, `sender → receiver`, or `node` and its id
    generation: int = 0  # how many leases of the slot `take` has made
    loans: int = 0  # open loans
    since: float = 0.0  # when the slot came to this place, by the ledger's clock


@dataclass(frozen=True, slots=True)
class Move:
    """One change of a slot's place. The moves of all slots, in order, determine what the ledger records."""

    slot: int
    generation: int
    place: Place
    holder: str  # the new holder, as in Entry
    how: str  # the method of the ledger, or the name of the message that carries the slot


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken rule: what the ledger records of a slot, and what contradicts that record."""

    slot: int  # -1 if the violation concerns the pool as a whole
    known: str  # what the ledger records
    claimed: str  # what an actor claims, or what happened


class Ledger:
    """The record of every slot of the state pool: its place, holder, generation and open loans.

    Only the ledger makes, moves and ends leases. A slot has exactly one Place, so the five counts always sum to the
    pool. Methods raise LeaseError if a lease or loan is dead, or its slot is not in the place that the method needs.
    All but `quarantine` and `audit` take O(1).

    on_move: called after each change of place.
    on_violation: called whenever a slot is quarantined.
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
        """Stop reporting dropped leases: the pool is no longer used, so live handles may be garbage-collected."""
        self._closed = True

    def take(self, holder: str) -> Lease | None:
        """Return a lease of a free slot, with a new generation; None if no slot is free."""
        if not self._free:
            return None
        slot = self._free.pop()
        self.entries[slot].generation += 1
        self._place(slot, Place.OWNED, holder, "take")
        return Lease(slot, self.entries[slot].generation, self)

    def free(self, lease: Lease) -> None:
        """End a lease, and put its slot back into the pool."""
        entry = self._entry(lease, Place.OWNED, Place.CACHED)
        if entry.loans:
            raise LeaseError(f"{lease!r} has {entry.loans} loans and cannot be freed")
        slot, _ = lease.surrender("freed")
        self._place(slot, Place.FREE, "pool", "free")
        self._free.append(slot)

    def depart(self, lease: Lease, sender: str, receiver: str, message: str) -> Lease:
        """End the sender's handle, and return a new one, which is in transit until `arrive`."""
        self._entry(lease, Place.OWNED)
        slot, generation = lease.surrender(f"sent by {sender} to {receiver} in {message}")
        self._place(slot, Place.TRANSIT, f"{sender} → {receiver}", message)
        return Lease(slot, generation, self)

    def arrive(self, lease: Lease, receiver: str) -> None:
        """Record that a lease in transit has reached its receiver."""
        self._entry(lease, Place.TRANSIT)
        self._place(lease.slot, Place.OWNED, receiver, "arrive")

    def cache(self, lease: Lease, node: int) -> None:
        """Record that the cache keeps the state at a node of its tree."""
        self._entry(lease, Place.OWNED)
        self._place(lease.slot, Place.CACHED, f"node {node}", "cache")

    def uncache(self, lease: Lease, holder: str) -> None:
        """Record that the state has left its node: `holder` owns the slot now."""
        entry = self._entry(lease, Place.CACHED)
        if entry.loans:
            raise LeaseError(f"{lease!r} has {entry.loans} loans and cannot leave its node")
        self._place(lease.slot, Place.OWNED, holder, "uncache")

    def lend(self, lease: Lease) -> Loan:
        """Open a loan of a cached slot. Until the loan ends, the slot cannot be freed and cannot leave its node."""
        self._entry(lease, Place.CACHED).loans += 1
        return Loan(lease.slot, lease.generation)

    def end_loan(self, loan: Loan) -> None:
        entry = self.entries[loan.slot]
        if entry.generation != loan.generation or not entry.loans:
            raise LeaseError(f"{loan} has ended before: {entry}")
        entry.loans -= 1

    def loans(self, lease: Lease) -> int:
        """Return how many loans of the slot are open."""
        return self.entries[lease.slot].loans

    def dropped(self, slot: int, generation: int) -> None:
        """Quarantine a slot whose live handle was garbage-collected: nothing can free it any more."""
        if not self._closed and self.entries[slot].generation == generation:
            self.quarantine(slot, "its lease was dropped")

    def quarantine(self, slot: int, claimed: str) -> None:
        """Take a slot out of use, and report a Violation. claimed: what contradicts the ledger's record."""
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
        """Compare the leases that each actor holds with the ledger, and return the differences.

        Nothing is quarantined here; the caller decides that.
        """
        found = []
        claims: dict[int, str] = {}
        for holder, leases in holdings.items():
            for lease in leases:
                entry = self.entries[lease.slot]
                known = f"{entry.place} by {entry.holder} (generation {entry.generation})"
                # The ledger names a node as the holder of a cached slot; its lease must be with the cache.
                at = holder if entry.place is not Place.CACHED else "cache"
                expected = entry.place in (Place.OWNED, Place.CACHED) and (
                    entry.holder == holder or entry.place is Place.CACHED
                )
                if lease.slot in claims or not expected or at != holder or entry.generation != lease.generation:
                    other = f", also by {claims[lease.slot]}" if lease.slot in claims else ""
                    found.append(Violation(lease.slot, known, f"held by {holder} as {lease!r}{other}"))
                claims[lease.slot] = holder
        # Leases in transit are in mailboxes, which are not among `holdings`.
        held = (Place.OWNED, Place.CACHED)
        for slot, entry in enumerate(self.entries):
            if entry.place in held and slot not in claims:
                found.append(Violation(slot, f"{entry.place} by {entry.holder}", "held by nobody"))
        if self.counts.total() != len(self.entries) or self.counts[Place.FREE] != len(self._free):
            found.append(Violation(-1, f"{self.counts}", f"{len(self.entries)} slots, {len(self._free)} free"))
        return found

    def _entry(self, lease: Lease, *places: Place) -> Entry:
        """Return the slot's entry. Raises LeaseError unless the lease is current and in one of these places."""
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
