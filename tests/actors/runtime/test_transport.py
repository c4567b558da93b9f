"""Which message fields may hold leases, and that every lease in such a field is found."""

from typing import get_args

import pytest
from msgspec import Struct

from baton.actors.lease import Lease, Ledger, Place
from baton.actors.messages import Checkpoint, Message, Step
from baton.actors.runtime.transport import LEASE_FIELDS, arrive, depart, lease_fields, leases_in


class Plain(Struct):
    grant: int
    pages: list[int]


class Optional(Struct):
    state: Lease | None


class Keyed(Struct):
    states: dict[int, Lease]


class Nested(Struct):
    checkpoint: Checkpoint


def test_every_message_is_known() -> None:
    assert set(LEASE_FIELDS) == set(get_args(Message))
    assert lease_fields(Plain) == ()


@pytest.mark.parametrize("kind", [Optional, Keyed, Nested])
def test_a_lease_that_would_not_be_found_is_refused(kind: type[Struct]) -> None:
    with pytest.raises(TypeError, match=f"{kind.__name__}.*: a lease cannot travel in"):
        lease_fields(kind)


def test_leases_of_a_list_of_structs_move() -> None:
    ledger = Ledger(2)
    slots = [ledger.take("scheduler"), ledger.take("scheduler")]
    step = Step(1, [], [], [Checkpoint(1, position, slot) for position, slot in enumerate(slots) if slot], [])
    before = list(leases_in(step))
    depart(step, "scheduler", "forward", ledger)
    assert not any(lease.live for lease in before)
    assert ledger.counts[Place.TRANSIT] == 2
    arrive(step, "forward", ledger)
    assert {ledger.entries[lease.slot].holder for lease in leases_in(step)} == {"forward"}
    for lease in leases_in(step):
        ledger.free(lease)
