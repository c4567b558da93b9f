"""The decision when the heap is worth trimming."""

from baton.api.machine.heap import WORTH_A_TRIM, FreedMemory, find_trim


def looks(freed: FreedMemory, used: int, count: int) -> list[bool]:
    return [freed.is_worth_a_trim(used) for _ in range(count)]


def test_much_freed_memory_is_worth_one_trim_at_the_second_look() -> None:
    freed = FreedMemory()
    freed.grow(WORTH_A_TRIM + 5)
    assert looks(freed, WORTH_A_TRIM, 2) == [False, False]
    assert looks(freed, 5, 3) == [False, True, False]


def test_little_freed_memory_is_worth_none() -> None:
    freed = FreedMemory()
    for used in (WORTH_A_TRIM - 1, 0):
        freed.grow(used)
    assert looks(freed, 0, 3) == [False, False, False]


def test_memory_that_is_in_use_again_is_worth_none() -> None:
    freed = FreedMemory()
    freed.grow(WORTH_A_TRIM)
    assert [freed.is_worth_a_trim(0), freed.is_worth_a_trim(1), freed.is_worth_a_trim(0)] == [False, False, False]
    assert freed.is_worth_a_trim(0)


def test_this_machine_can_trim() -> None:
    find_trim()()
