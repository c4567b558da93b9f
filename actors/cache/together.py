"""Requests that need what another one is computing: which waits for which grant, and at which position."""

from baton.actors.actor import Send
from baton.actors.cache.account import Account
from baton.actors.cache.radix import RadixTree
from baton.actors.cache.waiting import Parked
from baton.actors.lease import Lease
from baton.actors.messages import Acquire, Mark
from baton.actors.tokens import common_prefix, count, cut

# An Acquire waits for at most this many grants, one after the other. After that it computes its prompt itself.
MAX_LEADERS = 8


class Together:
    """The link between an Acquire that waits and its leader, a grant that computes a prefix which both prompts share.

    `Mark` asks the leader to keep its state where the two prompts part. If the leader ends before it gets there, the
    first of the Acquires that wait for it computes, and the others wait for that one.
    """

    def __init__(self, send: Send, accounts: dict[int, Account], tree: RadixTree[Lease], least: int) -> None:
        """accounts: the open grants, by id. least: prefixes of at most this many tokens are computed twice."""
        self._send, self._accounts, self._tree, self._least = send, accounts, tree, least

    def is_waiting(self, parked: Parked) -> bool:
        """Return whether the state that this Acquire waits for may still come.

        It will not if the leader has ended or passed the position, or was granted before a flush: then its states are
        freed instead of cached.
        """
        account = self._accounts.get(parked.leader) if parked.leader is not None else None
        return account is not None and account.epoch == self._tree.epoch and parked.waits_at in account.marks

    def waits(self, parked: Parked, position: int) -> bool:
        """Find a leader for an Acquire that could resume from `position` now; return whether it waits for one."""
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
    """Return up to where a grant is about to compute what `acquire` needs beyond `position`; 0 if it is no leader.

    A grant is no leader if it is less urgent, if it has to compute tokens before `position` first, or if it is past
    the point where the two prompts part.
    """
    running = account.acquire
    if running.salt != acquire.salt or running.priority > acquire.priority or account.position < position:
        return 0
    if cut(running.tokens, position, position + 1) != cut(acquire.tokens, position, position + 1):
        return 0
    shared = min(common_prefix(running.tokens, acquire.tokens), acquire.limit, count(running.tokens) - 1)
    return shared if shared > account.position else 0
