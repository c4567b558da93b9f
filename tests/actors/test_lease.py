import copy
import gc
import pickle

import pytest

from actors.lease import LeaseError, Ledger, Place
from actors.messages import Donate, Free
from actors.runtime.transport import Codec, arrive, depart


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(4)


def test_a_moved_lease_is_dead_and_names_the_send(ledger: Ledger) -> None:
    lease = ledger.take("scheduler")
    assert lease is not None
    message = Free([lease])
    depart(message, "scheduler", "cache", ledger)
    with pytest.raises(LeaseError, match="sent by scheduler to cache in Free"):
        _ = lease.slot
    assert ledger.counts[Place.TRANSIT] == 1
    arrive(message, "cache", ledger)
    ledger.free(message.leases[0])
    assert ledger.counts[Place.FREE] == 4


def test_a_refused_send_moves_nothing(ledger: Ledger) -> None:
    good, spent = ledger.take("results"), ledger.take("results")
    assert good and spent
    ledger.free(spent)
    with pytest.raises(LeaseError):
        depart(Free([good, spent]), "results", "cache", ledger)
    assert good.live and ledger.entries[good.slot].holder == "results"
    ledger.free(good)


def test_handles_cannot_be_copied_or_pickled(ledger: Ledger) -> None:
    lease = ledger.take("cache")
    assert lease
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(LeaseError, match="cannot be copied or pickled"):
            duplicate(lease)
    ledger.free(lease)


def test_a_dropped_handle_is_reported_and_its_slot_quarantined() -> None:
    found = []
    ledger = Ledger(2, on_violation=found.append)
    lease = ledger.take("forward")
    assert lease
    slot = lease.slot
    del lease
    gc.collect()
    assert found[0].slot == slot and "forward" in found[0].known and "dropped" in found[0].claimed
    assert ledger.counts == {Place.FREE: 1, Place.OWNED: 0, Place.QUARANTINED: 1}
    assert ledger.violations == 1


def test_freeing_twice_raises(ledger: Ledger) -> None:
    lease = ledger.take("cache")
    assert lease
    ledger.free(lease)
    with pytest.raises(LeaseError, match="freed"):
        ledger.free(lease)


def test_a_lent_state_can_neither_be_freed_nor_moved(ledger: Ledger) -> None:
    lease = ledger.take("cache")
    assert lease
    ledger.cache(lease, 7)
    loan = ledger.lend(lease)
    for use in (ledger.free, lambda held: ledger.uncache(held, "cache")):
        with pytest.raises(LeaseError, match="loans"):
            use(lease)
    ledger.end_loan(loan)
    with pytest.raises(LeaseError, match="ended before"):
        ledger.end_loan(loan)
    ledger.free(lease)


def test_every_lease_message_survives_the_codec(ledger: Ledger) -> None:

    def take() -> object:
        return ledger.take("scheduler")

    messages = [
        Free([take(), take()], closes_grant=3),
        Donate(1, take(), 5, b"1234", True),
    ]
    codec = Codec(ledger)
    for message in messages:
        depart(message, "scheduler", "cache", ledger)
        decoded = codec.round_trip(message)
        arrive(decoded, "cache", ledger)
        assert type(decoded) is type(message)
        for lease in getattr(decoded, "leases", None) or [decoded.state]:
            ledger.free(lease)
    ledger.close()


def test_the_audit_names_what_is_missing_and_what_is_held_twice(ledger: Ledger) -> None:
    lease, other = ledger.take("cache"), ledger.take("forward")
    assert lease and other
    assert ledger.audit({"cache": [lease], "forward": [other]}) == []
    assert [v.slot for v in ledger.audit({"cache": [lease], "forward": []})] == [other.slot]
    assert [v.slot for v in ledger.audit({"cache": [lease, other], "forward": []})] == [other.slot]
    assert [v.slot for v in ledger.audit({"cache": [lease, lease], "forward": [other]})] == [lease.slot]
    ledger.close()


def test_generations_tell_a_reused_slot_apart(ledger: Ledger) -> None:
    first = ledger.take("cache")
    assert first
    slot, generation = first.slot, first.generation
    ledger.free(first)
    second = ledger.take("cache")
    assert second and second.slot == slot and second.generation == generation + 1
    ledger.free(second)
