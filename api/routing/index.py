"""The index from the digests of cached states to the engines that have them."""

from collections.abc import Iterable

Engine = int  # the number of an engine; numbers are not reused
NOWHERE: frozenset[Engine] = frozenset()


class StateIndex:
    """The engines that have each state.

    Almost every state is on one engine. To save memory an entry is the engine's number, and only for several engines a
    set of numbers. Figures: docs/scale.md.
    """

    def __init__(self) -> None:
        self._engines: dict[int, Engine | set[Engine]] = {}
        self._states: dict[Engine, set[int]] = {}

    def __len__(self) -> int:
        return len(self._engines)

    def count(self, engine: Engine) -> int:
        """Return how many states an engine has."""
        return len(self._states.get(engine, ()))

    def engines(self, digest: int) -> Iterable[Engine]:
        """Return the engines that have a state."""
        found = self._engines.get(digest, NOWHERE)
        return (found,) if isinstance(found, int) else found

    def add(self, engine: Engine, digests: Iterable[int]) -> None:
        own = self._states.setdefault(engine, set())
        for digest in digests:
            own.add(digest)
            found = self._engines.get(digest)
            if found is None:
                self._engines[digest] = engine
            elif isinstance(found, set):
                found.add(engine)
            elif found != engine:
                self._engines[digest] = {found, engine}

    def remove(self, engine: Engine, digests: Iterable[int]) -> None:
        """Remove states of an engine. Digests of states that it does not have are ignored."""
        own = self._states.get(engine, set())
        for digest in digests:
            if digest in own:
                own.discard(digest)
                self._forget(engine, digest)

    def remove_all(self, engine: Engine) -> None:
        """Remove every state of an engine."""
        for digest in self._states.pop(engine, ()):
            self._forget(engine, digest)

    def _forget(self, engine: Engine, digest: int) -> None:
        found = self._engines[digest]
        if isinstance(found, int):
            del self._engines[digest]
            return
        found.discard(engine)
        if len(found) == 1:
            [self._engines[digest]] = found
