"""Search for parts of a schema, or rules of a grammar, that can never be complete because they need themselves."""

from collections.abc import Mapping, Sequence, Set
from typing import TypeAlias

Group: TypeAlias = Sequence[Sequence[str]]
"""Alternative sets of names. All names of at least one set are needed."""
Needs: TypeAlias = Mapping[str, Sequence[Group]]
"""The groups that each name needs; it needs all of them. A name that is no key can always be complete."""

MOST_PASSES = 64


def endless_in(needs: Needs) -> dict[str, None]:
    """Return the names that can never be complete, in the order of `needs`."""
    endless = dict.fromkeys(needs)
    for _ in range(MOST_PASSES):
        before = len(endless)
        # Callers list names before those that they need, so that one pass backwards usually finds most.
        for name in [*reversed(endless)]:
            if all(any(endless.keys().isdisjoint(names) for names in group) for group in needs[name]):
                del endless[name]
        if len(endless) == before:
            return endless
    return {}


def cycle_from(name: str, needs: Needs, endless: Set[str]) -> list[str]:
    """Return a cycle that can be reached from `name`: each name needs the next one, and the last is the first again."""
    chain = [name]
    while chain[-1] not in chain[:-1]:
        blocked = next(g for g in needs[chain[-1]] if not any(endless.isdisjoint(names) for names in g))
        chain.append(next(each for each in blocked[0] if each in endless))
    return chain[chain.index(chain[-1]) :]
