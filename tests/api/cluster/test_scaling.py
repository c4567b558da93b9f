import msgspec

from baton.api.cluster.file import Scaling
from baton.api.cluster.scaling import GroupLoad, Scaler

BUSY, IDLE = GroupLoad([3.0, 1.0], [8, 8]), GroupLoad([0.0, 0.0], [1, 0])


def scaler() -> Scaler:
    return Scaler(msgspec.convert({"queue": 1.0, "up_after": 5.0, "down_after": 20.0}, Scaling))


def changes(load: GroupLoad, times: list[float], least: int = 1, most: int = 3) -> list[int]:
    decides = scaler()
    return [decides.change("a", load, least, most, now) for now in times]


def test_a_group_grows_when_its_queues_are_long_for_long_enough() -> None:
    assert changes(BUSY, [0, 4, 5, 6, 11]) == [0, 0, 1, 0, 1]
    assert changes(BUSY, [0, 10], most=2) == [0, 0]
    assert changes(GroupLoad([1.5, 0.1], [8, 8]), [0, 10]) == [0, 0], "the mean counts, not one engine"


def test_a_group_shrinks_when_one_fewer_is_enough() -> None:
    assert changes(IDLE, [0, 19, 20, 21]) == [0, 0, -1, 0]
    assert changes(IDLE, [0, 30], least=2) == [0, 0]
    assert changes(GroupLoad([0.0, 0.0], [4, 4]), [0, 30]) == [0, 0], "the other one would have twice as many"
    assert changes(GroupLoad([0.0, 0.2], [4, 0]), [0, 30]) == [0, 0], "something waits"
    assert changes(GroupLoad([0.0], [0]), [0, 30], least=0) == [0, 0], "the last one stays"


def test_what_does_not_last_counts_anew() -> None:
    decides = scaler()
    loads = [(BUSY, 0.0), (IDLE, 4.0), (BUSY, 5.0), (BUSY, 9.0), (BUSY, 10.0)]
    assert [decides.change("a", load, 1, 3, now) for load, now in loads] == [0, 0, 0, 0, 1]


def test_groups_are_counted_apart() -> None:
    decides = scaler()
    assert decides.change("a", BUSY, 1, 3, 0.0) == decides.change("b", BUSY, 1, 3, 4.0) == 0
    assert (decides.change("a", BUSY, 1, 3, 5.0), decides.change("b", BUSY, 1, 3, 5.0)) == (1, 0)
