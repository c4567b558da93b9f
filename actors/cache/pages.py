"""KV pages by number: which pages are free, and how many grants and tree nodes refer to each of the others."""

from collections.abc import Iterable


class PageError(Exception):
    """Misuse of the page pool: a free page was shared or released, or more pages were taken than are free."""


class PagePool:
    """Reference counts of `count` pages of `size` positions each. Only the cache actor counts references.

    A page is free when neither a grant nor a tree node refers to it.
    """

    def __init__(self, count: int, size: int) -> None:
        self.size = size
        self.grant_refs = [0] * count  # for each page, the number of open grants that hold it
        self.node_refs = [0] * count  # for each page, the number of tree nodes that name it
        self.used = 0  # number of pages that at least one grant holds
        self._free = list(range(count - 1, -1, -1))

    def __len__(self) -> int:
        return len(self.grant_refs)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        """The number of pages to which only tree nodes refer: eviction can free at most these."""
        return len(self.grant_refs) - len(self._free) - self.used

    def cover(self, tokens: int) -> int:
        """Return how many pages `tokens` positions need; 0 if the model has no attention."""
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
        """Count one more grant for each of these pages; raise PageError if one of them is free."""
        for page in pages:
            self._check(page)
            self.used += not self.grant_refs[page]
            self.grant_refs[page] += 1

    def drop_grant_refs(self, pages: Iterable[int]) -> None:
        """Count one grant less for each of these pages, and free each page that is no longer referred to.

        Raise PageError if no grant holds one of them.
        """
        for page in pages:
            if not self.grant_refs[page]:
                raise PageError(f"no grant holds page {page}")
            self.grant_refs[page] -= 1
            self.used -= not self.grant_refs[page]
            self._reclaim(page)

    def add_node_refs(self, pages: Iterable[int]) -> None:
        """Count one more tree node for each of these pages; raise PageError if one of them is free."""
        for page in pages:
            self._check(page)
            self.node_refs[page] += 1

    def drop_node_refs(self, pages: Iterable[int]) -> None:
        """Count one tree node less for each of these pages, and free each page that is no longer referred to.

        Raise PageError if no node names one of them.
        """
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
