"""Known bugs in what becomes of the hints that clients give."""

from typing import Any

from baton.actors.cache.radix import Node, RadixTree
from baton.actors.kinds import Kind
from baton.actors.messages import Granted, Retired
from baton.actors.requests import Request
from baton.actors.results.actor import RequestHistory, ResultProcessor
from baton.actors.scheduler.actor import Scheduler
from tests.simulation.planting import Patch


def end_kept_for_nobody(patch: Patch) -> None:
    """The state at the end of a request from which nobody will go on is donated."""
    original = ResultProcessor._give_back_state

    def give_back(self: ResultProcessor, record: RequestHistory, retired: Retired, is_wanted: bool) -> None:
        original(self, record, retired, True)

    patch(ResultProcessor, "_give_back_state", give_back)


def retracted_state_given_up(patch: Patch) -> None:
    """That of a request which is only retracted is freed as if it were over."""
    original = ResultProcessor._give_back_state

    def give_back(self: ResultProcessor, record: RequestHistory, retired: Retired, is_wanted: bool) -> None:
        original(self, record, retired, record.request.keep != "never")

    patch(ResultProcessor, "_give_back_state", give_back)


def asked_for_a_token_too_late(patch: Patch) -> None:
    """A checkpoint that the client has asked for is taken one token behind."""
    original = Scheduler._targets

    def targets(self: Scheduler, request: Request, granted: Granted) -> dict[int, Kind]:
        found = original(self, request, granted)
        return {p + 1 if kind is Kind.ASKED else p: kind for p, kind in found.items()}

    patch(Scheduler, "_targets", targets)


def own_checkpoints_of_a_last_request(patch: Patch) -> None:
    """A prompt from which nobody will go on is checkpointed like any other."""

    def targets(self: Scheduler, request: Request, granted: Granted) -> dict[int, Kind]:
        return {request.prompt_len - 1: Kind.PROMPT_END} if request.prompt_len - 1 > granted.hit.cached_tokens else {}

    patch(Scheduler, "_targets", targets)


def denied_without_a_word(patch: Patch) -> None:
    """Nothing is noted of a checkpoint that was asked for and not kept."""
    patch(RadixTree, "deny", lambda self, node, positions: None)


def denial_stays_below_a_split(patch: Patch) -> None:
    """Where a path is cut in two, what was not kept on its upper half is told of its lower one."""
    original = RadixTree._split

    def split(self: RadixTree[Any], node: Node[Any], length: int) -> Node[Any]:
        noted = node.denied
        upper = original(self, node, length)
        upper.denied, node.denied = frozenset(), noted
        return upper

    patch(RadixTree, "_split", split)


def denial_outlives_the_state_that_came(patch: Patch) -> None:
    """A state that was not kept once is still said to be missing when it has come."""
    original = RadixTree.set_state

    def set_state(self: RadixTree[Any], node: Node[Any], state: Any) -> None:
        noted = node.denied
        original(self, node, state)
        node.denied = noted

    patch(RadixTree, "set_state", set_state)
