"""Planted bugs in how the hints of clients about their states (checkpoints, `keep`) are followed."""

from typing import Any

from baton.actors.cache.radix import Node, RadixTree
from baton.actors.kinds import Kind
from baton.actors.messages import Granted, Retired
from baton.actors.requests import Request
from baton.actors.results.actor import RequestHistory, ResultProcessor
from baton.actors.scheduler.rows import RunningRows
from tests.simulation.planting import Patch


def unneeded_end_donated(patch: Patch) -> None:
    """Planted bug: the end state of a request is donated although its client said that nothing will resume from it."""
    original = ResultProcessor._give_back_state

    def give_back(self: ResultProcessor, record: RequestHistory, retired: Retired, is_wanted: bool) -> None:
        original(self, record, retired, True)

    patch(ResultProcessor, "_give_back_state", give_back)


def retracted_state_freed(patch: Patch) -> None:
    """Planted bug: with `keep` "never", a retraction frees the request's state as if the request were over."""
    original = ResultProcessor._give_back_state

    def give_back(self: ResultProcessor, record: RequestHistory, retired: Retired, is_wanted: bool) -> None:
        original(self, record, retired, record.request.keep != "never")

    patch(ResultProcessor, "_give_back_state", give_back)


def requested_checkpoint_one_late(patch: Patch) -> None:
    """Planted bug: a checkpoint that the client requested is taken one token after its position."""
    original = RunningRows._targets

    def targets(self: RunningRows, request: Request, granted: Granted) -> dict[int, Kind]:
        found = original(self, request, granted)
        return {p + 1 if kind is Kind.ASKED else p: kind for p, kind in found.items()}

    patch(RunningRows, "_targets", targets)


def checkpoint_of_an_unneeded_end(patch: Patch) -> None:
    """Planted bug: a request with `keep` "never" checkpoints the end of its prompt like any other request."""

    def targets(self: RunningRows, request: Request, granted: Granted) -> dict[int, Kind]:
        return {request.prompt_len - 1: Kind.PROMPT_END} if request.prompt_len - 1 > granted.hit.cached_tokens else {}

    patch(RunningRows, "_targets", targets)


def denial_not_recorded(patch: Patch) -> None:
    """Planted bug: the tree does not record that a requested checkpoint was not kept."""
    patch(RadixTree, "deny", lambda self, node, positions: None)


def denial_stays_in_the_lower_node(patch: Patch) -> None:
    """Planted bug: when a node is split, the denials of positions in the upper half stay with the lower node."""
    original = RadixTree._split

    def split(self: RadixTree[Any], node: Node[Any], length: int) -> Node[Any]:
        denied = node.denied
        upper = original(self, node, length)
        upper.denied, node.denied = frozenset(), denied
        return upper

    patch(RadixTree, "_split", split)


def denial_outlives_the_state(patch: Patch) -> None:
    """Planted bug: a position stays recorded as denied after a state has been stored there."""
    original = RadixTree.set_state

    def set_state(self: RadixTree[Any], node: Node[Any], state: Any) -> None:
        denied = node.denied
        original(self, node, state)
        node.denied = denied

    patch(RadixTree, "set_state", set_state)
