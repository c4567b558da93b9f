"""What one request is computing others need not compute again: who waits for whose state, and at which position."""

from baton.actors.actor import Send
from baton.actors.cache.account import Account
from baton.actors.cache.radix import RadixTree
from baton.actors.cache.waiting import Parked
from baton.actors.lease import Lease
from baton.actors.messages import Acquire, Mark
from baton.actors.tokens import common_prefix, count, cut

# How many an Acquire may wait for, one after the other, before it computes by itself.
MAX_LEADERS = 8


class Together:
    """Has an Acquire wait for a grant that is computing what they have in common. A part of the cache.

    The grant is asked, with Mark, to keep its state where the two part. If it ends before, the next of those who wait
    computes, and the others wait for that one. accounts: the open grants.
    tree: a grant from before it was flushed keeps nothing in it. least: fewer tokens in common are computed again at
    once.
    """

    def __init__(self, send: Send, accounts: dict[int, Account], tree: RadixTree[Lease], least: int) -> None:
        self._send, self._accounts, self._tree, self._least = send, accounts, tree, least

    def is_waiting(self, parked: Parked) -> bool:
        """Whether the state that this one waits for may still come."""
        account = self._accounts.get(parked.leader) if parked.leader is not None else None
        return account is not None and account.epoch == self._tree.epoch and parked.waits_at in account.marks

    def waits(self, parked: Parked, position: int) -> bool:
        """Whether this one, which might go on from `position` now, waits for somebody."""
        parked.leader = None
        if parked.leaders == MAX_LEADERS or parked.acquire.limit - position <= self._least:
            return False
        for account in self._accounts.values():
            if account.epoch != self._tree.epoch:
                continue
            shared = shared_with(account, parked.acquire, position)
            if shared - position > self._least and shared not in account.passed:
                self._wait_for(account, parked, shared)
                return True
        return False

    def _wait_for(self, account: Account, parked: Parked, position: int) -> None:
        parked.leader, parked.waits_at = account.acquire.grant, position
        parked.leaders += 1
        if position not in account.marks:
            account.marks.add(position)
            self._send("scheduler", Mark(account.acquire.grant, position))


def shared_with(account: Account, acquire: Acquire, position: int) -> int:
    """Up to where a grant is about to compute what this one needs from `position` on; 0 if it is not.

    Not where it is less urgent, has more to compute before, or stands in its prompt further on than the two agree.
    """
    running = account.acquire
    if running.salt != acquire.salt or running.priority > acquire.priority or account.position < position:
        return 0
    if cut(running.tokens, position, position + 1) != cut(acquire.tokens, position, position + 1):
        return 0
    shared = min(common_prefix(running.tokens, acquire.tokens), acquire.limit, count(running.tokens) - 1)
    return shared if shared > account.position else 0
