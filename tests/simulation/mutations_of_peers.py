"""Planted bugs in the links between engines. The cluster's simulation must find each."""

from typing import Any

from baton.actors.cache.below.copies import CopyStore
from baton.actors.cache.below.host_and_disk import HostAndDisk
from baton.actors.peers.engines import PeerEngines
from baton.actors.peers.frames import Released, Taken
from baton.actors.peers.link import Link, Stage
from tests.simulation.planting import Patch


def used_before_released(patch: Patch) -> None:
    """Planted bug: a copy is used when it is read, although its loan may have ended in the meantime."""

    def pulled(self: Link, ticket: int, landing: Any, error: str, seconds: float) -> None:
        found = self.imports.get(ticket)
        if found is not None and not self.ended:
            del self.imports[ticket]
            self._wire.send(Taken(ticket))
            self._land(found, landing, error)

    patch(Link, "pulled", pulled)
    patch(Link, "_released", lambda self, ticket: None)


def landing_buffer_reused_before_the_fence(patch: Patch) -> None:
    """Planted bug: reads are failed when the link ends, although the mover still writes to their buffers."""
    end = Link.end

    def end_at_once(self: Link, why: str) -> None:
        close = self._mover.close
        self._mover.close = lambda fenced: (fenced(), close(lambda: None))  # type: ignore[method-assign]
        end(self, why)

    patch(Link, "end", end_at_once)


def loans_outlive_the_connection(patch: Patch) -> None:
    """Planted bug: the source does not end its loans when the connection ends."""
    end_loan = Link._end_loan

    def end_before_the_end(self: Link, ticket: int) -> None:
        if not self.ended:
            end_loan(self, ticket)

    patch(Link, "_end_loan", end_before_the_end)


def ticket_of_an_old_connection_accepted(patch: Patch) -> None:
    """Planted bug: a new connection takes over the imports of the one before, so that an old offer is used again."""
    end, receive = Link.end, Link.receive
    left: dict[int, dict[int, Any]] = {}

    def end_and_leave(self: Link, why: str) -> None:
        left.setdefault(id(self._owner), {}).update(
            {ticket: found for ticket, found in self.imports.items() if found.stage is Stage.ASKED}
        )
        end(self, why)

    def receive_with_old(self: Link, frame: Any) -> None:
        self.imports.update(left.pop(id(self._owner), {}))
        receive(self, frame)

    patch(Link, "end", end_and_leave)
    patch(Link, "receive", receive_with_old)


def released_for_a_loan_that_had_ended(patch: Patch) -> None:
    """Planted bug: the source confirms every Taken, also if the loan has ended."""
    end_of_read = Link._taken

    def confirm(self: Link, ticket: int) -> None:
        if ticket in self.loans:
            end_of_read(self, ticket)
        else:
            self._wire.send(Released(ticket))

    patch(Link, "_taken", confirm)
    lost = Link._lost

    def ignore_what_was_read(self: Link, ticket: int, why: str) -> None:
        found = self.imports.get(ticket)
        if found is None or found.key is None:
            lost(self, ticket, why)

    patch(Link, "_lost", ignore_what_was_read)


def partial_copy_used_without_the_pages_above(patch: Patch) -> None:
    """Planted bug: a copy without its first pages is used by a grant whose path has lost these pages."""
    match = CopyStore.match
    patch(HostAndDisk, "first_page", lambda self, copy: 0)
    patch(CopyStore, "match", lambda self, salt, tokens, limit, pages=0: match(self, salt, tokens, limit, 1 << 30))


def acquire_not_woken_when_the_link_ends(patch: Patch) -> None:
    """Planted bug: Acquires that wait for a peer's answer wait for ever when the link ends."""
    declined = PeerEngines.declined
    patch(
        PeerEngines,
        "declined",
        lambda self, link, ticket, why: None if link.ended else declined(self, link, ticket, why),
    )


def loan_to_a_peer_ended_twice(patch: Patch) -> None:
    """Planted bug: a loan ends with Taken, and again when the connection ends."""
    end_of_read = Link._taken

    def end_twice(self: Link, ticket: int) -> None:
        loan = self.loans.get(ticket)
        end_of_read(self, ticket)
        if loan is not None:
            self.loans[ticket] = loan

    patch(Link, "_taken", end_twice)


def engines_wait_in_a_circle(patch: Patch) -> None:
    """Planted bug: an engine that waits for a peer computes for peers too, and all rows may wait for each other."""
    patch(PeerEngines, "_why_not", lambda self: "" if self._deliver is not None else "the engine is restarting")
