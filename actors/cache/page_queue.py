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
    """The grants that wait for a page, in the order of asking. A part of the cache.

    Of one whose copy is under way there is no word yet: when that is done the page copied from may be its own. Nor of
    any while a state leaves the pool, and its pages with it: an earlier word of them is taken back.
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
        self._is_to_tell = False

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, grants: list[int]) -> None:
        self._waiting.update(dict.fromkeys(grant for grant in grants if grant in self._accounts))
        self._is_to_tell = True

    def leave(self, grant: int) -> None:
        """Its account is closed, which may have made room."""
        self._waiting.pop(grant, None)
        self._is_to_tell |= bool(self._waiting)

    def loans_ended(self, grant: int) -> None:
        self._is_to_tell |= grant in self._waiting

    def give(self) -> None:
        """A page to each, as far as there are any, and word of those that still wait."""
        fed: list[GrantPages] = []
        for grant in list(self._waiting):
            pages = self._allocator.take_pages(1) or self._take_from_own_path(self._accounts[grant])
            if pages is None:
                break
            self._accounts[grant].pages += pages
            fed.append(GrantPages(grant, pages))
            del self._waiting[grant]
        if self._tiers.exports and self._waiting:
            if fed or self._is_to_tell:
                self._send("scheduler", Extended(fed, []))
            self._is_to_tell = True
        elif fed or self._is_to_tell:
            self._is_to_tell = False
            short = [grant for grant in self._waiting if not self._accounts[grant].on_loan]
            self._send("scheduler", Extended(fed, short))

    def _take_from_own_path(self, account: Account) -> list[int] | None:
        """A grant that is alone may use the whole pool: what its own path names twice goes too."""
        alone = len(self._accounts) == 1 and not self._tiers.exports
        while alone and account.epoch == self._tree.epoch and not account.on_loan:
            node = account.node
            if node.parent is None or node.children:
                return None
            account.node, account.tail = node.parent, node.tokens + account.tail
            self._allocator.drop(node)
            if self._tiers.exports:
                return None
            if self._pages.free:
                return self._pages.take(1)
        return None
