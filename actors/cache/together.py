"""Acquires that wait for a state that an open grant is computing: which one waits for which grant and position."""

from baton.actors.actor import Send
from baton.actors.cache.account import Account
from baton.actors.cache.radix import RadixTree
from baton.actors.cache.waiting import Parked
from baton.actors.lease import Lease
from baton.actors.messages import Acquire, Mark
from baton.actors.tokens import common_prefix, count, cut

# An Acquire waits for at most this many grants, one after the other. After that its request computes the prompt itself.
MAX_LEADERS = 8


class Together:
    """The links from waiting Acquires to their leaders: open grants that compute a prefix which both prompts share.

    `Mark` asks for the leader's state at the position where the two prompts differ. If the leader ends before that
    position, the first of its waiting Acquires is granted and computes the prefix. The others wait for that grant.
    """

    def __init__(self, send: Send, accounts: dict[int, Account], tree: RadixTree[Lease], least: int) -> None:
        """accounts: by grant. least: an Acquire waits for a leader's state only if it saves more tokens than this."""
        self._send, self._accounts, self._tree, self._least = send, accounts, tree, least

    def is_waiting(self, parked: Parked) -> bool:
        """Return whether the leader of this Acquire can still donate the state that the Acquire waits for.

        It cannot if it has ended, if it has passed the position, or if it was granted before a flush: states of such
        grants are freed instead of cached.
        """
        account = self._accounts.get(parked.leader) if parked.leader is not None else None
        return account is not None and account.epoch == self._tree.epoch and parked.waits_at in account.marks

    def waits(self, parked: Parked, position: int) -> bool:
        """Find a leader for an Acquire that could resume from `position` now; return whether a leader was found."""
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
    """Return the position up to which a grant computes tokens that `acquire` needs too; 0 if it cannot be a leader.

    A grant cannot be a leader if it is less urgent than `acquire`, if it has not reached `position` yet (from which
    `acquire` could resume now), or if it is past the position where the two prompts differ.
    """
    running = account.acquire
    if running.salt != acquire.salt or running.priority > acquire.priority or account.position < position:
        return 0
    if cut(running.tokens, position, position + 1) != cut(acquire.tokens, position, position + 1):
        return 0
    shared = min(common_prefix(running.tokens, acquire.tokens), acquire.limit, count(running.tokens) - 1)
    return shared if shared > account.position else 0
