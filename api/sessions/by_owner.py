"""A collection of items by owner and id, with the order of use over all owners and for each owner."""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from typing import Generic, TypeAlias, TypeVar

Key: TypeAlias = tuple[bytes, str]
T = TypeVar("T")


class Changes:
    """The keys that have come or gone, while someone collects them."""

    def __init__(self) -> None:
        self._keys: dict[Key, None] | None = None

    def begin(self, keys: Iterable[Key]) -> None:
        """Collect from now on; begin with the keys that there are."""
        self._keys = dict.fromkeys(keys)

    def note(self, key: Key) -> None:
        if self._keys is not None:
            self._keys[key] = None

    def take(self) -> Collection[Key]:
        """Return what was collected since the last call."""
        keys, self._keys = self._keys or {}, {}
        return keys

    def end(self) -> None:
        self._keys = None


class ByOwner(Generic[T]):
    """Items by owner and id, least recently used first. A call, or a step of an iteration, takes constant time."""

    def __init__(self) -> None:
        self._all: OrderedDict[Key, T] = OrderedDict()
        self._of: dict[bytes, OrderedDict[str, T]] = {}  # items by id, for each owner that has some
        self.changes = Changes()

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, key: Key) -> bool:
        return key in self._all

    def __iter__(self) -> Iterator[T]:
        return iter(self._all.values())

    def __reversed__(self) -> Iterator[T]:
        return reversed(self._all.values())

    def items(self) -> Iterator[tuple[bytes, T]]:
        """Iterate over all items with their owners."""
        return ((owner, item) for (owner, _), item in self._all.items())

    @property
    def keys(self) -> Collection[Key]:
        return self._all.keys()

    @property
    def owners(self) -> Collection[bytes]:
        return self._of.keys()

    def of(self, owner: bytes) -> Collection[T]:
        """Return the items of one owner."""
        own = self._of.get(owner)
        return own.values() if own is not None else ()

    def get(self, key: Key) -> T | None:
        return self._all.get(key)

    def put(self, key: Key, item: T) -> None:
        """Add or replace an item. It becomes the most recently used item."""
        self.changes.note(key)
        self._all[key] = item
        self._of.setdefault(key[0], OrderedDict())[key[1]] = item
        self.touch(key)

    def touch(self, key: Key) -> None:
        """Make an item the most recently used item."""
        self._all.move_to_end(key)
        self._of[key[0]].move_to_end(key[1])

    def pop(self, key: Key) -> T | None:
        """Remove and return an item, or return None if there is none."""
        if key not in self._all:
            return None
        self.changes.note(key)
        own = self._of[key[0]]
        del own[key[1]]
        if not own:
            del self._of[key[0]]
        return self._all.pop(key)
