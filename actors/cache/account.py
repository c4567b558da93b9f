"""What the cache knows of an open grant."""

from dataclasses import dataclass, field

from baton.actors.cache.radix import Node
from baton.actors.cache.state_copy import StateCopy
from baton.actors.kinds import Kind
from baton.actors.lease import Lease, Loan
from baton.actors.messages import Acquire
from baton.actors.requests import Origin
from baton.actors.tokens import Tokens, count


@dataclass(slots=True)
class Account:
    """What an open grant holds of the cache: its node in the tree, its pages by index, and its loans.

    acquire: what it was asked for with. node: pinned until the account closes. tail: the tokens between its end and the
    account's position.
    loan_node, loan: the node whose state is lent, and the loan. copy_source: the shared page to copy from.
    fill: the copy below the pool that the slot is filled from.
    named: the session's name was on the state that was moved. closing: it closes when its loans have ended.
    checkpoints: the positions that slots were given for, and what they are. marks: the positions at which others wait
    for its state; passed: at these it will not come.
    """

    acquire: Acquire
    node: Node[Lease]
    epoch: int
    pages: list[int]
    loan_node: Node[Lease] | None = None
    loan: Loan | None = None
    copy_source: int | None = None
    fill: Node[StateCopy] | None = None
    named: bool = False
    closing: bool = False
    tail: Tokens = b""
    checkpoints: dict[int, Kind] = field(default_factory=dict)
    marks: set[int] = field(default_factory=set)
    passed: set[int] = field(default_factory=set)

    @property
    def grant(self) -> int:
        return self.acquire.grant

    @property
    def session(self) -> str:
        return self.acquire.session

    def pass_by(self, position: int) -> None:
        """There will be no state at this position."""
        self.marks.discard(position)
        self.passed.add(position)

    @property
    def position(self) -> int:
        return self.node.end + count(self.tail)

    @property
    def on_loan(self) -> bool:
        return self.loan is not None or self.copy_source is not None or self.fill is not None

    def origin(self, moved: bool, read: bool) -> Origin:
        """Where the state was that the grant goes on from. read: its copy was read from disk."""
        if self.fill is not None:
            return "disk" if read else "host"
        if moved:
            return "slot"
        return "tree" if self.position else "tokens"
