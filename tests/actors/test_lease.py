import copy
import gc
import pickle

import pytest

from baton.actors.lease import LeaseError, Ledger, Move, Place, Violation
from baton.actors.messages import Donate, Free
from baton.actors.runtime.codec import Codec
from baton.actors.runtime.transport import arrive, depart


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


def test_generations_distinguish_a_reused_slot(ledger: Ledger) -> None:
    first = ledger.take("cache")
    assert first
    slot, generation = first.slot, first.generation
    ledger.free(first)
    second = ledger.take("cache")
    assert second and second.slot == slot and second.generation == generation + 1
    ledger.free(second)


def test_the_ledger_reports_each_move_and_its_time() -> None:
    now, moves = 1.0, list[Move]()
    ledger = Ledger(2, on_move=moves.append, clock=lambda: now)
    lease = ledger.take("cache")
    assert lease
    slot = lease.slot
    now = 2.0
    ledger.cache(lease, 7)
    ledger.uncache(lease, "cache")
    moving = ledger.depart(lease, "cache", "forward", "Export")
    now = 3.0
    ledger.arrive(moving, "forward")
    assert (ledger.entries[slot].since, ledger.entries[slot].holder) == (3.0, "forward")
    ledger.free(moving)
    assert [(m.slot, m.generation, m.place, m.holder, m.how) for m in moves] == [
        (slot, 1, Place.OWNED, "cache", "take"),
        (slot, 1, Place.CACHED, "node 7", "cache"),
        (slot, 1, Place.OWNED, "cache", "uncache"),
        (slot, 1, Place.TRANSIT, "cache → forward", "Export"),
        (slot, 1, Place.OWNED, "forward", "arrive"),
        (slot, 1, Place.FREE, "pool", "free"),
    ]
    assert ledger.moves == dict.fromkeys(("take", "cache", "uncache", "Export", "arrive", "free"), 1)
    assert ledger.counts.total() == 2 and ledger.counts[Place.FREE] == 2


def test_slots_are_taken_from_the_first_on_until_none_is_free(ledger: Ledger) -> None:
    leases = [ledger.take("cache") for _ in range(5)]
    assert [lease.slot if lease else None for lease in leases] == [0, 1, 2, 3, None]
    ledger.close()


def test_a_quarantined_slot_is_out_of_use_and_each_claim_is_reported() -> None:
    found: list[Violation] = []
    ledger = Ledger(2, on_violation=found.append)
    ledger.quarantine(1, "somebody wrote to it")
    ledger.quarantine(1, "and again")
    assert ledger.violations == 2 and [violation.claimed for violation in found] == [
        "somebody wrote to it",
        "and again",
    ]
    assert found[0].known == "free by pool (generation 0)"
    assert (ledger.counts[Place.QUARANTINED], ledger.counts[Place.FREE]) == (1, 1) and ledger.audit({}) == []
    lease = ledger.take("cache")
    assert lease and lease.slot == 0 and ledger.take("cache") is None
    ledger.free(lease)


def test_a_stale_handle_may_be_garbage_collected() -> None:
    ledger = Ledger(1)
    lease = ledger.take("cache")
    assert lease
    ledger.dropped(lease.slot, lease.generation - 1)
    assert ledger.violations == 0
    ledger.close()
    del lease
    gc.collect()
    assert ledger.violations == 0, "the pool is gone"


def test_a_lease_allows_only_what_its_place_allows(ledger: Ledger) -> None:
    lease = ledger.take("cache")
    assert lease
    for use in (ledger.lend, lambda held: ledger.uncache(held, "cache"), lambda held: ledger.arrive(held, "cache")):
        with pytest.raises(LeaseError, match="is owned by cache"):
            use(lease)
    ledger.cache(lease, 7)
    for use in (lambda held: ledger.cache(held, 8), lambda held: ledger.depart(held, "cache", "forward", "Free")):
        with pytest.raises(LeaseError, match="is cached by node 7"):
            use(lease)
    assert lease.live
    first, second = ledger.lend(lease), ledger.lend(lease)
    assert ledger.loans(lease) == 2
    ledger.end_loan(first)
    assert ledger.loans(lease) == 1
    ledger.end_loan(second)
    ledger.free(lease)
    with pytest.raises(LeaseError, match="ended before"):
        ledger.end_loan(first)


def test_the_audit_names_each_way_in_which_claims_differ(ledger: Ledger) -> None:
    cached, owned, moving = ledger.take("cache"), ledger.take("forward"), ledger.take("results")
    assert cached and owned and moving
    ledger.cache(cached, 7)
    moving = ledger.depart(moving, "results", "cache", "Free")
    assert ledger.audit({"cache": [cached], "forward": [owned]}) == []
    [astray] = ledger.audit({"cache": [], "forward": [owned, cached]})
    assert astray.slot == cached.slot and astray.claimed.startswith("held by forward as Lease(0#1)")
    [early] = ledger.audit({"cache": [cached, moving], "forward": [owned]})
    assert early.slot == moving.slot and early.known == "transit by results → cache (generation 1)"
    twice = ledger.audit({"cache": [cached], "forward": [owned, owned]})
    assert [violation.claimed for violation in twice] == ["held by forward as Lease(1#1), also by forward"]
    lost = ledger.audit({"cache": [cached]})
    assert [(violation.slot, violation.known, violation.claimed) for violation in lost] == [
        (owned.slot, "owned by forward", "held by nobody")
    ]
    ledger.entries[owned.slot].generation += 1
    assert len(ledger.audit({"cache": [cached], "forward": [owned]})) == 1
    ledger.entries[owned.slot].generation -= 1
    ledger.counts[Place.FREE] += 1
    [sum_] = ledger.audit({"cache": [cached], "forward": [owned]})
    assert sum_.slot == -1 and sum_.claimed == "4 slots, 1 free"
    ledger.close()
