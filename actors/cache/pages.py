"""KV pages by number: which are free, and how many grants and tree nodes hold each of the others."""

from collections.abc import Iterable


class PageError(Exception):
    """A page that is free was used, or too many pages were asked for."""


class PagePool:
    """Reference counts of `count` pages of `size` positions each. Only the cache keeps any.

    A page is free when neither a grant nor a tree node refers to it.
    """

    def __init__(self, count: int, size: int) -> None:
        self.size = size
        self.grant_refs = [0] * count  # for each page, the number of open grants that hold it
        self.node_refs = [0] * count  # for each page, the number of tree nodes that name it
        self.used = 0  # pages that grants hold
        self._free = list(range(count - 1, -1, -1))

    def __len__(self) -> int:
        return len(self.grant_refs)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        """Pages that only tree nodes refer to: the most that eviction can free."""
        return len(self.grant_refs) - len(self._free) - self.used

    def cover(self, tokens: int) -> int:
        """Return how many pages this many positions need; 0 if the model has no attention."""
        return -(-tokens // self.size) if self.grant_refs else 0

    def take(self, count: int) -> list[int]:
        """Take `count` free pages for a grant; raise PageError if there are too few."""
        if count > len(self._free):
            raise PageError(f"{count} pages wanted, {len(self._free)} free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self.grant_refs[page] = 1
        self.used += count
        return pages

    def add_grant_refs(self, pages: Iterable[int]) -> None:
        """Add a grant that holds these pages, which must not be free."""
        for page in pages:
            self._check(page)
            self.used += not self.grant_refs[page]
            self.grant_refs[page] += 1

    def drop_grant_refs(self, pages: Iterable[int]) -> None:
        """Remove a grant that holds these pages; free those that nothing else refers to."""
        for page in pages:
            if not self.grant_refs[page]:
                raise PageError(f"no grant holds page {page}")
            self.grant_refs[page] -= 1
            self.used -= not self.grant_refs[page]
            self._reclaim(page)

    def add_node_refs(self, pages: Iterable[int]) -> None:
        """Add a tree node that names these pages, which must not be free."""
        for page in pages:
            self._check(page)
            self.node_refs[page] += 1

    def drop_node_refs(self, pages: Iterable[int]) -> None:
        """Remove a tree node that names these pages; free those that nothing else refers to."""
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
