"""What a request asks for, and what comes back of it."""

from typing import Literal, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from baton.actors.tokens import Tokens, cut

FinishReason: TypeAlias = Literal["stop", "length", "abort", "error"]
RetireReason: TypeAlias = Literal["finished", "limit", "capacity", "aborted", "timeout", "retracted", "failed"]
MissReason: TypeAlias = Literal["", "evicted", "denied", "misaligned", "never_kept", "damaged"]
Keep: TypeAlias = Literal["", "soon", "never"]
Origin: TypeAlias = Literal["slot", "tree", "host", "disk", "tokens"]
PauseMode: TypeAlias = Literal["in_place", "retract"]
Tier: TypeAlias = Literal["slot", "host", "disk", "tokens"]
EndReason: TypeAlias = Literal["queue_full", "too_large", "aborted", "timeout", "draining"]


class Sampling(Struct, frozen=True, array_like=True):
    """How the next token is drawn. temperature 0 is greedy, top_k 0 no limit; logit_bias maps ids to addends."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int = 0


class Stops(Struct, frozen=True, array_like=True):
    """When a request is finished. `token_ids` already holds the EOS ids unless the client ignores them.

    Until min_tokens are out, token_ids are not drawn. keep_stop: the text ends with what stopped it, string or token.
    """

    max_tokens: int
    min_tokens: int = 0
    strings: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()
    keep_stop: bool = False


class Request(Struct, frozen=True, array_like=True):
    """One request, drawn up by the api; seeds are drawn there too, so that a replay samples alike.

    tokens[:prompt_len] is the prompt. A retracted or resubmitted request comes back with its output appended.
    delivered_chars: how many characters of that output's text the client has been given.
    logprobs: how many alternatives to report for each output token; None reports no log probabilities at all.
    prompt_logprobs_from: report log probabilities of prompt tokens from this index on. logprob_ids: wherever any are
    reported, report those of these tokens too.
    message_ends: positions in the prompt at which a checkpoint is worth having.
    session: the session whose turn this is; its name goes to the state at the turn's end.
    flow: whose it is: flows take turns, so that one that asks for much does not keep the others waiting.
    grammar: what the output has to follow, as models/text/grammars/writing.py writes it; empty for anything.
    checkpoints: positions in the prompt at which the client asks for a state. keep: whether it says that it will go on
    from the end soon, or never.
    trace: the W3C trace id of the client's request; every message about this one carries it in its envelope.
    """

    id: str
    tokens: Tokens
    prompt_len: int
    sampling: Sampling
    stops: Stops
    priority: int = 0
    salt: str = ""
    message_ends: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs_from: int | None = None
    logprob_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True
    delivered_chars: int = 0
    session: str = ""
    flow: str = ""
    trace: str = ""
    grammar: str = ""
    checkpoints: tuple[int, ...] = ()
    keep: Keep = ""


def resubmission(request: Request, delivered: Tokens, delivered_chars: int) -> Request:
    """What the api submits again when the four actors were made anew.

    That is `request` with the output tokens `delivered` so far, and the number of characters that came with them.
    The log probabilities of the prompt came with the first of them.
    """
    return replace(
        request,
        tokens=cut(request.tokens, 0, request.prompt_len) + delivered,
        delivered_chars=delivered_chars,
        prompt_logprobs_from=None if delivered else request.prompt_logprobs_from,
    )


class TokenLogprob(Struct, frozen=True, array_like=True):
    """The log probability of one token (None for the first of a prompt), and the best alternatives with theirs.

    asked: the log probabilities, in this place, of the tokens in the request's logprob_ids.
    """

    token: int
    logprob: float | None
    top: list[tuple[int, float]]
    asked: list[float] = []


class RowLogprobs(Struct, frozen=True, array_like=True):
    """Log probabilities of the tokens at indices start, start + 1, … of a grant's history."""

    grant: int
    start: int
    items: list[TokenLogprob]


class Output(Struct, array_like=True):
    """What one step adds to one request. The first one comes, empty, when the request is admitted.

    `tokens` holds every new token, `text` what may be shown of them; the counts are totals up to here. Of the prompt,
    matched_tokens were known to the tree and cached_tokens not computed again; `miss_reason` says why those are fewer.
    """

    request: str
    text: str
    tokens: Tokens
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprob] = []
    prompt_logprobs: list[TokenLogprob] = []
    matched_tokens: int = 0
    miss_reason: MissReason = ""
    origin: Origin = "tokens"
