"""Running rows that wait for a KV page."""

from baton.actors.actor import Send
from baton.actors.cache.account import Account
from baton.actors.cache.allocator import Allocator
from baton.actors.cache.pages import PagePool
from baton.actors.cache.radix import RadixTree
from baton.actors.cache.tiers import Tiers
from baton.actors.grants import GrantPages
from baton.actors.lease import Lease
from baton.actors.messages import Extended


class PageQueue:
    """The grants whose rows wait for a page, in the order in which the scheduler requested the pages.

    The scheduler retracts a row if `Extended` reports starved grants, so a grant is reported only if waiting cannot
    help it. It is not reported while forward copies its state or page: the copied page may be free afterwards. No grant
    is reported while a state is copied out of the pool, which frees pages: a report without grants then replaces the
    earlier one.
    """

    def __init__(
        self,
        send: Send,
        accounts: dict[int, Account],
        pages: PagePool,
        tree: RadixTree[Lease],
        tiers: Tiers,
        allocator: Allocator,
    ) -> None:
        self._send, self._accounts, self._pages, self._tree = send, accounts, pages, tree
        self._tiers, self._allocator = tiers, allocator
        self._waiting: dict[int, None] = {}
        self._must_report = False  # whether Extended is due even if no grant gets a page

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, grants: list[int]) -> None:
        self._waiting.update(dict.fromkeys(grant for grant in grants if grant in self._accounts))
        self._must_report = True

    def leave(self, grant: int) -> None:
        """Note that this grant's account is closed, which may have freed pages for other grants."""
        self._waiting.pop(grant, None)
        self._must_report |= bool(self._waiting)

    def loans_ended(self, grant: int) -> None:
        self._must_report |= grant in self._waiting

    def give(self) -> None:
        """Give one page to each waiting grant, in order, while pages last; report the grants that are starved."""
        fed: list[GrantPages] = []
        for grant in list(self._waiting):
            pages = self._allocator.take_pages(1) or self._take_from_own_path(self._accounts[grant])
            if pages is None:
                break
            self._accounts[grant].pages += pages
            fed.append(GrantPages(grant, pages))
            del self._waiting[grant]
        if self._tiers.exporting and self._waiting:
            if fed or self._must_report:
                self._send("scheduler", Extended(fed, []))
            self._must_report = True
        elif fed or self._must_report:
            self._must_report = False
            starved = [grant for grant in self._waiting if not self._accounts[grant].on_loan]
            self._send("scheduler", Extended(fed, starved))

    def _take_from_own_path(self, account: Account) -> list[int] | None:
        """Return a page freed by dropping the end of the grant's own path from the tree; None if other grants are open.

        The grant holds all pages of its own page table, so it loses nothing. Nodes of its path may name duplicates of
        these pages: a Donate that finds its tokens in the tree keeps the nodes' pages. With the duplicates freed, a
        grant that is alone can use the whole pool.
        """
        alone = len(self._accounts) == 1 and not self._tiers.exporting
        while alone and account.epoch == self._tree.epoch and not account.on_loan:
            node = account.node
            if node.parent is None or node.children:
                return None
            # The tokens of the dropped node become part of the tail, from which the next Donate inserts them again.
            account.node, account.tail = node.parent, node.tokens + account.tail
            self._allocator.drop(node)
            if self._tiers.exporting:
                return None
            if self._pages.free:
                return self._pages.take(1)
        return None
