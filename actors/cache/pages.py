"""KV pages by number: which are free, and how many grants use and how many tree nodes name each of the others."""

from collections.abc import Iterable


class PageError(Exception):
    """A page was named by someone who does not hold it."""


class PagePool:
    """Reference counts of `count` pages of `size` positions each. Kept by the cache alone.

    grant_refs[p] counts the open grants that hold page p, node_refs[p] the nodes; a page is free when both are 0.
    """

    def __init__(self, count: int, size: int) -> None:
        self.size = size
        self.grant_refs = [0] * count
        self.node_refs = [0] * count
        self.used = 0
        self._free = list(range(count - 1, -1, -1))

    def __len__(self) -> int:
        return len(self.grant_refs)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        """Pages that only nodes name: what eviction can free at most."""
        return len(self.grant_refs) - len(self._free) - self.used

    def cover(self, tokens: int) -> int:
        """Pages needed for this many positions; none where the model has no attention."""
        return -(-tokens // self.size) if self.grant_refs else 0

    def take(self, count: int) -> list[int]:
        """`count` free pages for a grant; PageError if there are too few."""
        if count > len(self._free):
            raise PageError(f"{count} pages wanted, {len(self._free)} free")
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self.grant_refs[page] = 1
        self.used += count
        return taken

    def add_grant_refs(self, pages: Iterable[int]) -> None:
        """One more grant holds these pages."""
        for page in pages:
            self._check(page)
            self.used += not self.grant_refs[page]
            self.grant_refs[page] += 1

    def drop_grant_refs(self, pages: Iterable[int]) -> None:
        """A grant lets go of these pages."""
        for page in pages:
            if not self.grant_refs[page]:
                raise PageError(f"no grant holds page {page}")
            self.grant_refs[page] -= 1
            self.used -= not self.grant_refs[page]
            self._reclaim(page)

    def add_node_refs(self, pages: Iterable[int]) -> None:
        """One more node names these pages."""
        for page in pages:
            self._check(page)
            self.node_refs[page] += 1

    def drop_node_refs(self, pages: Iterable[int]) -> None:
        for page in pages:
            if not self.node_refs[page]:
                raise PageError(f"no node names page {page}")
            self.node_refs[page] -= 1
            self._reclaim(page)

    def _check(self, page: int) -> None:
        if not self.grant_refs[page] and not self.node_refs[page]:
            raise PageError(f"page {page} is free and cannot be shared")

    def _reclaim(self, page: int) -> None:
        if not self.grant_refs[page] and not self.node_refs[page]:
            self._free.append(page)
