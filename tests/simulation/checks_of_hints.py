"""What clients say of their states is heeded: positions, ends that nobody wants, and states that were not kept."""

from typing import TYPE_CHECKING

from baton.actors.cache.account import Account
from baton.actors.cache.radix import Node, path_to_root
from baton.actors.kinds import Kind
from baton.actors.messages import Acquire, Admit, Donate, Message, Requeue, SaveFromReq, Want
from baton.actors.requests import Request

if TYPE_CHECKING:
    from tests.simulation.unit import Unit


class HintChecks:
    """By grant. _going_on: those whose requests are not over, so that their last states are wanted in any case."""

    def __init__(self, unit: "Unit") -> None:
        self._unit = unit
        self._acquired: dict[int, Acquire] = {}
        self._requests: dict[int, Request] = {}
        self._going_on: set[int] = set()

    def sent(self, message: Message) -> None:
        match message:
            case Acquire(grant):
                self._acquired[grant] = message
            case Admit(grant, request):
                told = self._acquired.pop(grant)
                assert (told.checkpoints, told.keep) == (request.checkpoints, request.keep), (
                    f"the cache was told otherwise of grant {grant}"
                )
                self._requests[grant] = request
            case Want(grant, checkpoints):
                for position, kind in checkpoints:
                    self._check_wanted(grant, position, kind)
            case Requeue(request):
                self._going_on.add(self._unit.results.records[request.id].grant)
            case Donate(grant, _, position, _, True) | SaveFromReq(grant, _, _, position):
                assert not self.is_given_up(grant), f"the state of grant {grant} at {position} is wanted by nobody"

    def is_given_up(self, grant: int) -> bool:
        """Whether the client has said that nobody goes on from the end, which this is."""
        request = self._requests.get(grant)
        return request is not None and request.keep == "never" and grant not in self._going_on

    def _check_wanted(self, grant: int, position: int, kind: Kind) -> None:
        request = self._requests[grant]
        if kind is Kind.ASKED:
            assert position in request.checkpoints, f"grant {grant} wants {position}, for which nobody has asked"
        own = kind in (Kind.PROMPT_END, Kind.LAST_END)
        assert not own or request.keep != "never", f"grant {grant} wants {position}, from which nobody goes on"

    def check_kept(self, account: Account) -> None:
        """Of each position that was asked for, up to where the tree knows the tokens, there is a state or a note."""
        if account.epoch != self._unit.cache.tree.epoch:
            return
        path = list(path_to_root(account.node))
        for position in account.acquire.checkpoints:
            [step] = [step for step in path if step.start < position <= step.end] or [None]
            if step is not None:
                kept = step.end == position and (step.state is not None or step.evicted)
                assert kept or position in step.denied, f"grant {account.grant} lacks a state at {position} unsaid"


def check_denied(node: Node) -> None:
    """What was not kept is noted at its own tokens, and not where there is a state."""
    for position in node.denied:
        assert node.start < position <= node.end, f"node {node.id} tells of a state at {position}, not its own"
        assert position < node.end or node.state is None, f"node {node.id} has a state at {position}, and denies it"
