"""The accounts of open grants: the tree node, the pages and the loans that each grant holds."""

from dataclasses import dataclass, field

from baton.actors.cache.radix import LowerCopy, Node
from baton.actors.kinds import Kind
from baton.actors.lease import Lease, Loan
from baton.actors.messages import Acquire
from baton.actors.requests import Origin
from baton.actors.tokens import Tokens, count


@dataclass(slots=True)
class Account:
    """The record of an open grant: its node in the tree, its pages, and its loans."""

    acquire: Acquire  # the message that asked for the grant
    node: Node[Lease]  # the deepest node that the grant has reached; pinned until the account closes
    epoch: int  # the tree's epoch at opening; if the tree's epoch differs now, a flush has removed `node` from the tree
    pages: list[int]  # the grant's page table: page numbers, in order of position
    shared: int  # how many leading pages of the table the tree had when the grant was opened
    loan_node: Node[Lease] | None = None  # the node whose state is lent
    loan: Loan | None = None
    copy_source: int | None = None  # the shared page that forward copies before the grant writes to it
    fill: LowerCopy | None = None  # the copy below the pool that the slot is filled from
    named: bool = False  # whether a state was moved to the grant, and had the session's name
    closing: bool = False  # whether the account closes as soon as its loans have ended
    tail: Tokens = b""  # the tokens between the node's end and the grant's position
    checkpoints: dict[int, Kind] = field(default_factory=dict)  # kind by position, of checkpoints that have a slot
    marks: set[int] = field(default_factory=set)  # positions at which other Acquires wait for this grant's state
    passed: set[int] = field(default_factory=set)  # positions at which this grant will not donate its state

    @property
    def grant(self) -> int:
        return self.acquire.grant

    @property
    def session(self) -> str:
        return self.acquire.session

    def pass_by(self, position: int) -> None:
        """Note that this grant will not donate its state at this position."""
        self.marks.discard(position)
        self.passed.add(position)

    @property
    def position(self) -> int:
        """The position of the grant's last Donate, or of the state that it resumed from if there was no Donate yet."""
        return self.node.end + count(self.tail)

    @property
    def on_loan(self) -> bool:
        """Whether forward still has to copy a state or a page for this grant."""
        return self.loan is not None or self.copy_source is not None or self.fill is not None

    def origin(self, moved: bool, copy_origin: Origin) -> Origin:
        """Return where the state that the grant resumes from was found. copy_origin: as in Parked."""
        if self.fill is not None:
            return copy_origin
        if moved:
            return "slot"
        return "tree" if self.position else "tokens"
