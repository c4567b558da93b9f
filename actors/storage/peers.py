"""The interface between the cache and peers, which are other engines. Calls return at once; answers are messages."""

from typing import Protocol

from msgspec import Struct

from baton.actors.requests import PeerHint
from baton.actors.tokens import Tokens


class StateQuery(Struct, frozen=True):
    """A state that the cache prefers to get from a peer, if a peer has it sooner than it could be computed here."""

    salt: str
    tokens: Tokens  # the state is wanted at the end of these tokens
    have: int  # position of the state here from which the other tokens would be computed
    first_page: int  # the KV of this many leading pages is here already
    seconds: float  # how long this engine would take to compute the tokens from `have` on; 0: unknown
    priority: int  # lower is served first
    grant: int  # the grant that waits for the state
    hint: PeerHint | None = None  # take an existing state from this peer; None: any peer may compute the state


class Peers(Protocol):
    """The peers, as the cache uses them.

    As the sink the cache asks for states and reads copies of them into its own host memory. As the source it lends
    copies in its host memory: the peers send Lend, and Unlend when the loan has ended.
    """

    def ask(self, query: StateQuery) -> int | None:
        """Ask the peer that would have the state soonest; return a ticket, or None if no peer would be sooner.

        Answered by Offered or Unoffered, unless `cancel` is called first.
        """
        ...

    def cancel(self, ticket: int) -> None:
        """Give up a state that was asked for or offered, and that is not being read."""

    def pull(self, ticket: int, key: int) -> None:
        """Read an offered copy into host memory under `key`, then send Loaded(key)."""

    def lent(self, ticket: int, key: int, position: int) -> None:
        """Answer a Lend: the copy under `key` is lent until Unlend arrives.

        On a device with one stream the copy may be enqueued only, as with Exported: `HostStates.wait_for` waits for it.

        position: tokens that the state has consumed
        """

    def not_lent(self, ticket: int, why: str) -> None:
        """Answer a Lend: there is no such state, or host memory has no room for its copy."""


class NoPeers:
    """The Peers of a server that has none. The cache calls only `ask`."""

    def ask(self, query: StateQuery) -> int | None:
        return None

    def cancel(self, ticket: int) -> None:
        raise AssertionError("there are no peers")

    def pull(self, ticket: int, key: int) -> None:
        raise AssertionError("there are no peers")

    def lent(self, ticket: int, key: int, position: int) -> None:
        raise AssertionError("there are no peers")

    def not_lent(self, ticket: int, why: str) -> None:
        raise AssertionError("there are no peers")
