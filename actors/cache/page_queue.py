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
    """The grants that wait for a page, in the order in which the scheduler asked for them.

    The scheduler retracts a row that `Extended` names as starved, so a grant is named only where waiting cannot help.
    It is not named while its own copy is under way, which may give it the page that it copies from. No grant is named
    while a state is copied out of the pool, which will free pages; an earlier report is then taken back.
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
        """Note that this grant's account is closed, which may have freed pages for others."""
        self._waiting.pop(grant, None)
        self._must_report |= bool(self._waiting)

    def loans_ended(self, grant: int) -> None:
        self._must_report |= grant in self._waiting

    def give(self) -> None:
        """Give a page to each grant in order as long as there are any, and report the grants that are starved."""
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
        """Free a page by dropping the end of the grant's own path from the tree; None unless the grant is alone.

        The grant holds all pages of its path itself, so it loses nothing. The path's nodes may name further pages:
        duplicates, where a Donate found the path in the tree already. So a grant that is alone can use the whole pool.
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
