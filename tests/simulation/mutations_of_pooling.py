"""Planted bugs in the pooling of hidden states: tokens that are missing from a sum, and results that come twice."""

from msgspec.structs import replace as replaced

from baton.actors.messages import Stepped
from baton.actors.requests import Request, most_resumed, resubmission
from baton.actors.results.actor import ResultProcessor
from baton.actors.scheduler import actor as scheduler
from tests.simulation import client, hash_device
from tests.simulation.planting import Patch


def pooled_tokens_taken_from_the_cache(patch: Patch) -> None:
    """Planted bug: a request resumes from a state past tokens whose hidden states it pools."""

    def resumed(request: Request) -> int:
        return most_resumed(replaced(request, pooled=None))

    patch(scheduler, "most_resumed", resumed)


def pooled_again_after_a_restart(patch: Patch) -> None:
    """Planted bug: a request that is submitted again after its first token pools once more."""

    submitted_again: set[str] = set()  # request ids
    original = hash_device.admitted_with_output

    def again(request: Request, delivered: bytes, chars: int) -> Request:
        submitted_again.add(request.id)
        return replaced(resubmission(request, delivered, chars), pooled=request.pooled)

    def admitted_with_output(request: Request) -> bool:
        return original(request) and request.id not in submitted_again

    patch(client, "resubmission", again)
    patch(hash_device, "admitted_with_output", admitted_with_output)


def pooled_result_dropped_before_the_first_token(patch: Patch) -> None:
    """Planted bug: the result of tokens before the prompt's end is forgotten when another step comes first."""
    original = ResultProcessor._stepped

    def stepped(self: ResultProcessor, message: Stepped) -> None:
        for record in self.records.values():
            record.pooled = b""
        original(self, message)

    patch(ResultProcessor, "_stepped", stepped)
