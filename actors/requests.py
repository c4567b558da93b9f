"""Requests and their outputs."""

from typing import Literal, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from baton.actors.tokens import Tokens, count, cut

FinishReason: TypeAlias = Literal["stop", "length", "abort", "error", "grammar"]
"""Why an output ended. grammar: it reached a point at which its grammar cannot be followed, an error of the client."""
RetireReason: TypeAlias = Literal["finished", "limit", "capacity", "aborted", "timeout", "retracted", "failed"]
MissReason: TypeAlias = Literal["", "evicted", "denied", "misaligned", "never_kept", "damaged", "peer"]
"""Why there was no deeper state to resume from. evicted: the state was evicted. denied: a checkpoint that a client
asked for was not kept. misaligned: states exist only past the tokens that the request shares. never_kept: no state was
ever kept there. damaged: the file of the state is damaged. peer: a peer was asked for the state, and it did not come.
"""
Speculation: TypeAlias = Literal["auto", "ngram", "mtp", "off"]
"""The drafters that may be used. auto: all. ngram: n-grams of the request's own text. mtp: the model's head for
multi-token prediction. off: none.
"""
BY_NGRAMS, BY_HEAD = ("auto", "ngram"), ("auto", "mtp")
"""The values of Speculation that include n-grams, and those that include the model's head."""
Keep: TypeAlias = Literal["", "soon", "never"]
Origin: TypeAlias = Literal["slot", "tree", "host", "disk", "peer", "tokens"]
"""Where a grant's state comes from. slot: a slot of the tree, moved to the grant. tree: a copy of a slot of the tree.
host: host memory. disk: a file. peer: another engine. tokens: no state was found, so all tokens are computed.
"""
PauseMode: TypeAlias = Literal["in_place", "retract"]
Tier: TypeAlias = Literal["slot", "host", "disk", "tokens"]
EndReason: TypeAlias = Literal["queue_full", "too_large", "aborted", "timeout", "draining"]


class Sampling(Struct, frozen=True, array_like=True):
    """The sampling parameters of a request."""

    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: no limit
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}  # added to the logits of these tokens
    seed: int = 0


class Stops(Struct, frozen=True, array_like=True):
    """The conditions that finish a request."""

    max_tokens: int
    min_tokens: int = 0  # token_ids are not drawn before this many tokens of output
    strings: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()  # tokens that end the output, with the EOS ids unless the client ignores those
    keep_stop: bool = False  # the text includes the stop string or token that ended it


class PeerHint(Struct, frozen=True, array_like=True):
    """The peer that asked for a state at the end of a prompt, and the deepest state on that path that the peer has."""

    peer: str  # the link to the peer
    position: int  # tokens that the peer's state has consumed; 0: it has none


class Request(Struct, frozen=True, array_like=True):
    """One request, as the api submits it. It contains its seed, so that a replay samples the same tokens."""

    id: str
    tokens: Tokens  # the prompt; after a retraction or a resubmission also the output so far
    prompt_len: int  # tokens[:prompt_len] is the prompt
    sampling: Sampling
    stops: Stops
    priority: int = 0  # lower is served first
    salt: str = ""  # states are shared only between requests with the same salt
    message_ends: tuple[int, ...] = ()  # positions in the prompt where messages end: worth a checkpoint
    logprobs: int | None = None  # how many alternatives to report for each output token; None: no log probabilities
    prompt_logprobs_from: int | None = None  # report log probabilities of prompt tokens from this index on
    pooled: tuple[int, int] | None = None  # report the mean of the hidden states of the prompt's tokens [begin, end)
    logprob_ids: tuple[int, ...] = ()  # wherever log probabilities are reported, report those of these tokens too
    skip_special_tokens: bool = True  # leave special tokens out of the text
    delivered_chars: int = 0  # how many characters of the output in `tokens` the client has received as text
    session: str = ""  # the session whose turn this is: its name moves to the state at the turn's end
    flow: str = ""  # flows share the rows evenly, so that a flow with many requests does not delay others
    trace: str = ""  # the W3C trace id of the client's request, carried by the envelopes of all its messages
    grammar: str = ""  # what the output must follow, in the format of models/text/grammars/writing.py; "": anything
    checkpoints: tuple[int, ...] = ()  # positions in the prompt at which the client asks for a checkpoint
    keep: Keep = ""  # whether the client will continue from the end, soon or never; "": unknown
    hint: PeerHint | None = None  # the peer that asked for this state: it is never asked to compute it
    speculation: Speculation = "auto"  # the drafts that its tokens may be taken from, where the server makes them
    prediction: Tokens = b""  # what the client expects the output to be like; drafts are taken from it too


def resubmission(request: Request, delivered: Tokens, delivered_chars: int) -> Request:
    """Return the request to submit again after the four actors were restarted.

    delivered: the output tokens that the api has received.
    delivered_chars: how many characters of text the api has received.

    Reports about the prompt come with the first output token. They are repeated if `delivered` is empty.
    """
    return replace(
        request,
        tokens=cut(request.tokens, 0, request.prompt_len) + delivered,
        delivered_chars=delivered_chars,
        prompt_logprobs_from=None if delivered else request.prompt_logprobs_from,
        pooled=None if delivered else request.pooled,
    )


def most_resumed(request: Request) -> int:
    """Return how many tokens a state may have consumed for the request to resume from it.

    At least one token must be fed to draw the next. Reports about the prompt need more hidden states, unless the output
    has begun: a prompt token's log probability follows from the hidden state of the token before it.
    """
    limit = count(request.tokens) - 1
    if limit >= request.prompt_len:
        return limit
    if request.prompt_logprobs_from is not None:
        limit = min(limit, max(request.prompt_logprobs_from - 1, 0))
    return min(limit, request.pooled[0]) if request.pooled is not None else limit


class TokenLogprob(Struct, frozen=True, array_like=True):
    """The log probabilities at one index of a history."""

    token: int
    logprob: float | None  # None for the first token of a prompt
    top: list[tuple[int, float]]  # the most likely tokens here, each with its log probability
    id_logprobs: list[float] = []  # log probabilities here of the tokens in the request's logprob_ids


class RowLogprobs(Struct, frozen=True, array_like=True):
    """Log probabilities of the tokens at indices start, start + 1, … of a grant's history."""

    grant: int
    start: int
    items: list[TokenLogprob]


class RowPooled(Struct, frozen=True, array_like=True):
    """The mean of hidden states that a grant's request asks for."""

    grant: int
    values: bytes  # float32


class Hit(Struct, frozen=True, array_like=True):
    """The result of looking up a request's tokens in the cache."""

    cached_tokens: int = 0  # tokens that the state to resume from has consumed, so that they need not be computed
    matched_tokens: int = 0  # tokens that the radix tree knows; at least cached_tokens
    miss_reason: MissReason = ""  # why cached_tokens is smaller than it could be; "" if it is not
    origin: Origin = "tokens"  # which tier the state comes from; "tokens" if there is none


class Output(Struct, array_like=True):
    """New output of one request, from one step. The first Output has no tokens: it reports the admission."""

    request: str
    text: str  # new text, without the start of a possible stop string and without an incomplete character
    tokens: Tokens  # new tokens
    prompt_tokens: int
    completion_tokens: int  # output tokens so far
    finish_reason: FinishReason | None = None  # None: the output is not finished
    stop_reason: str | int | None = None  # the stop string or token, or what went wrong
    logprobs: list[TokenLogprob] = []  # log probabilities of the new tokens
    prompt_logprobs: list[TokenLogprob] = []  # log probabilities of the next prompt tokens
    hit: Hit = Hit()  # the cache hit of the request's first admission, limited to the prompt
    accepted: int = 0  # drafts of this output that were right so far
    rejected: int = 0  # drafts of this output that were wrong so far
    pooled: bytes = b""  # as in RowPooled, in the output with the first token
