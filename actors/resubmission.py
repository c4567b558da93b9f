"""What the api submits again when the four actors were made anew."""

from msgspec.structs import replace

from actors.requests import Request
from actors.tokens import Tokens, cut


def resubmission(request: Request, delivered: Tokens, shown: int) -> Request:
    """`request` with the output tokens delivered so far, of whose text the client has `shown` characters.

    The log probabilities of the prompt came with the first of them.
    """
    return replace(
        request,
        tokens=cut(request.tokens, 0, request.prompt_len) + delivered,
        shown=shown,
        prompt_logprobs_from=None if delivered else request.prompt_logprobs_from,
    )
