"""Checks that clients' hints are followed: checkpoint positions, ends that are not needed, and recorded denials."""

from typing import TYPE_CHECKING

from baton.actors.cache.account import Account
from baton.actors.cache.radix import Node, path_to_root
from baton.actors.kinds import Kind
from baton.actors.messages import Acquire, Admit, Donate, Message, Requeue, SaveFromReq, Want
from baton.actors.requests import Request

if TYPE_CHECKING:
    from tests.simulation.unit import Unit


class HintChecks:
    """Checks of messages and accounts of grants whose requests carry hints."""

    def __init__(self, unit: "Unit") -> None:
        self._unit = unit
        self._acquired: dict[int, Acquire] = {}  # by grant, until the grant's Admit
        self._requests: dict[int, Request] = {}  # by grant
        self._requeued: set[int] = set()  # grants that were requeued: their last state is needed

    def on_send(self, message: Message) -> None:
        match message:
            case Acquire(grant):
                self._acquired[grant] = message
            case Admit(grant, request):
                acquire = self._acquired.pop(grant)
                assert (acquire.checkpoints, acquire.keep) == (request.checkpoints, request.keep), (
                    f"the hints in the Acquire are not those of grant {grant}"
                )
                self._requests[grant] = request
            case Want(grant, checkpoints):
                for position, kind in checkpoints:
                    self._check_wanted(grant, position, kind)
            case Requeue(request):
                self._requeued.add(self._unit.results.records[request.id].grant)
            case Donate(grant, _, position, _, True) | SaveFromReq(grant, _, _, position):
                assert not self.is_given_up(grant), f"the state of grant {grant} at {position} is not needed"

    def is_given_up(self, grant: int) -> bool:
        """Return whether the grant ends with its request, whose client said that nothing will resume from that end."""
        request = self._requests.get(grant)
        return request is not None and request.keep == "never" and grant not in self._requeued

    def _check_wanted(self, grant: int, position: int, kind: Kind) -> None:
        request = self._requests[grant]
        if kind is Kind.ASKED:
            assert position in request.checkpoints, f"grant {grant} wants {position}, which the client did not request"
        own = kind in (Kind.PROMPT_END, Kind.LAST_END)
        assert not own or request.keep != "never", f"grant {grant} wants {position} for an end that is not needed"

    def check_checkpoints(self, account: Account) -> None:
        """Check that each requested position that the tree knows has or had a state, or is recorded as denied."""
        if account.epoch != self._unit.cache.tree.epoch:
            return
        path = list(path_to_root(account.node))
        for position in account.acquire.checkpoints:
            [step] = [step for step in path if step.start < position <= step.end] or [None]
            if step is not None:
                is_stored = step.end == position and (step.state is not None or step.evicted)
                is_denied = position in step.denied
                assert is_stored or is_denied, f"grant {account.grant} has no state and no denial at {position}"


def check_denied(node: Node) -> None:
    """Check that each denial is at a position of the node's own tokens, where the node keeps no state."""
    for position in node.denied:
        assert node.start < position <= node.end, f"node {node.id} records a denial at {position}, which is not its own"
        assert position < node.end or node.state is None, f"node {node.id} has a denied state at {position}"
