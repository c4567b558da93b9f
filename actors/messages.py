"""Every message of the ring. Those in the first part carry leases: in the fields whose types say so, and in no others.

`Tokens` are int32 bytes (see actors.tokens). A grant id names one admission of a request and is never reused.
A *position* is the number of tokens that a state has consumed: `history[:position]`.
"""

from typing import Literal, TypeAlias

from msgspec import Struct

from baton.actors.control import (
    Cleared as Cleared,
    Continue as Continue,
    Drain as Drain,
    Drained as Drained,
    Flush as Flush,
    Flushed as Flushed,
    Kept as Kept,
    Name as Name,
    Pause as Pause,
    Paused as Paused,
    Restarted as Restarted,
    Speeds as Speeds,
    Suspend as Suspend,
    Suspended as Suspended,
    Unname as Unname,
)
from baton.actors.grants import Chunk, Failure, Fill, GrantPages, PageCopy, RowMask
from baton.actors.kinds import Kind
from baton.actors.lease import Lease, Loan
from baton.actors.requests import EndReason, Keep, MissReason, Origin, Output, Request, RetireReason, RowLogprobs
from baton.actors.tokens import Tokens


class Checkpoint(Struct, array_like=True):
    """A slot to hold, or holding, the state of `grant` at exactly `position`."""

    grant: int
    position: int
    lease: Lease


# Messages that carry leases


class Granted(Struct, tag=True, array_like=True):
    """cache → scheduler, the answer to Acquire: a state slot, pages, and the position to start from.

    state: copy it from `loan` or from `fill`; if `moved` it holds its state already; otherwise clear it.
    match: tokens that the state has then consumed. matched_tokens: how far the tree knows the tokens.
    miss_reason: why match is below that. pages: by page index, up to the tokens and one more.
    page_copy: a shared page that has to be copied before it is written to.
    branch: a position worth a checkpoint: where the tree's tokens part from the request's, if beyond match.
    origin: where the state at match comes from; "tokens" if there is none.
    """

    grant: int
    state: Lease
    match: int
    matched_tokens: int
    miss_reason: MissReason
    moved: bool
    loan: Loan | None
    pages: list[int]
    page_copy: PageCopy | None
    branch: int | None
    fill: Fill | None = None
    origin: Origin = "tokens"


class Spare(Struct, tag=True, array_like=True):
    """cache → scheduler, the answer to Want: a slot for each position, but for those that are not worth one."""

    grant: int
    leases: list[Lease]
    denied: list[int]


class Return(Struct, tag=True, array_like=True):
    """scheduler → cache: a grant that was not admitted, to be undone whole."""

    grant: int
    state: Lease


class Admit(Struct, tag=True, array_like=True):
    """scheduler → forward: give a granted request a row. The other fields are those of Granted."""

    grant: int
    request: Request
    state: Lease
    match: int
    matched_tokens: int
    miss_reason: MissReason
    moved: bool
    loan: Loan | None
    pages: list[int]
    page_copy: PageCopy | None
    fill: Fill | None = None
    origin: Origin = "tokens"


class Step(Struct, tag=True, array_like=True):
    """scheduler → forward: run one step. Each row past its prompt decodes one token, unless it is in sit_out.

    step: its number, from 1. chunks: prompt tokens to feed. checkpoints: states to save on the way, and their slots.
    pages: those that rows were given since the last Step. masks: one for each row with a grammar that draws a token.
    """

    step: int
    chunks: list[Chunk]
    sit_out: list[int]
    checkpoints: list[Checkpoint]
    pages: list[GrantPages]
    masks: list[RowMask] = []


class Stepped(Struct, tag=True, array_like=True):
    """forward → results, in stream order: tokens[i] was sampled for grants[i]; each checkpoint has been written.

    failed: rows of a step that raised, in that step and the next; their states and checkpoints may only be freed.
    """

    step: int
    grants: list[int]
    tokens: Tokens
    checkpoints: list[Checkpoint]
    logprobs: list[RowLogprobs]
    prompt_logprobs: list[RowLogprobs]
    failed: list[Failure] = []
    error: str = ""


class Retired(Struct, tag=True, array_like=True):
    """forward → results: the row is gone; `state` has consumed exactly `position` tokens, or is poisoned."""

    grant: int
    reason: RetireReason
    state: Lease
    position: int
    poisoned: bool = False


class Donate(Struct, tag=True, array_like=True):
    """results → cache: a state at `position`, and the tokens since its last Donate (first: since the match)."""

    grant: int
    state: Lease
    position: int
    tokens: Tokens
    closes: bool


class SaveFromReq(Struct, tag=True, array_like=True):
    """results → cache: the state at the end of a session's turn, which takes its name; closes the grant."""

    grant: int
    session: str
    state: Lease
    position: int
    tokens: Tokens


class Export(Struct, tag=True, array_like=True):
    """cache → forward: copy this state, and the KV of its `position` tokens in `pages`, to host memory under `key`."""

    key: int
    state: Lease
    pages: list[int]
    position: int


class Exported(Struct, tag=True, array_like=True):
    """forward → cache: slot and pages may be used again; the copy is made, or on the one stream."""

    key: int
    state: Lease


class Free(Struct, tag=True, array_like=True):
    """anyone → cache: slots back to the pool; `closes_grant` names the grant whose account ends with it."""

    leases: list[Lease]
    closes_grant: int | None = None


# Messages that carry none


class Submit(Struct, tag=True, array_like=True):
    """api → scheduler: a new request. Answered by Ended if the queue is full or the server is draining.

    resubmitted: it was accepted before a restart of the actors, so a full queue takes it.
    """

    request: Request
    resubmitted: bool = False


class Abort(Struct, tag=True, array_like=True):
    """api → scheduler."""

    request: str
    reason: Literal["aborted", "timeout"] = "aborted"


class Acquire(Struct, tag=True, array_like=True):
    """scheduler → cache: a state slot and pages for `tokens`, matched no further than `limit`.

    predecessor: a grant whose state this one is to go on from; the cache waits until that account is closed.
    priority: lower is served first. checkpoints, keep: as in Request. overtaken: as an earlier one was for the request.
    """

    grant: int
    tokens: Tokens
    limit: int
    salt: str
    predecessor: int | None
    session: str = ""
    priority: int = 0
    checkpoints: tuple[int, ...] = ()
    keep: Keep = ""
    overtaken: int = 0


class Cancel(Struct, tag=True, array_like=True):
    """scheduler → cache: forget a parked Acquire. Answered by Refused, unless Granted is already under way."""

    grant: int


class Refused(Struct, tag=True, array_like=True):
    """cache → scheduler: an Acquire is not granted, because it was cancelled or can never fit.

    overtaken: how many were granted past it, which waited for less.
    """

    grant: int
    reason: Literal["cancelled", "too_large"]
    message: str
    overtaken: int = 0


class Want(Struct, tag=True, array_like=True):
    """scheduler → cache: slots for checkpoints of a running request, as (position, kind); answered at once by Spare."""

    grant: int
    checkpoints: list[tuple[int, Kind]]


class Mark(Struct, tag=True, array_like=True):
    """cache → scheduler: others wait for the state of this grant at this position of its prompt."""

    grant: int
    position: int


class Passed(Struct, tag=True, array_like=True):
    """scheduler → cache: the state that a Mark asked for will not be kept."""

    grant: int
    position: int


class Extend(Struct, tag=True, array_like=True):
    """scheduler → cache: one more page for each of these grants, most urgent first."""

    grants: list[int]


class Extended(Struct, tag=True, array_like=True):
    """cache → scheduler: the pages that could be given; `starved` names those that wait for others to go."""

    pages: list[GrantPages]
    starved: list[int]


class Closed(Struct, tag=True, array_like=True):
    """cache → scheduler: this grant's account is closed; its pages and slot have gone to the tree or the pool."""

    grant: int


class Retire(Struct, tag=True, array_like=True):
    """scheduler → forward: exactly one per Admit."""

    grant: int
    reason: RetireReason


class Admitted(Struct, tag=True, array_like=True):
    """forward → results, in stream order: the request has a row. The fields are those of Admit."""

    grant: int
    request: Request
    match: int
    matched_tokens: int
    miss_reason: MissReason
    origin: Origin = "tokens"


class Copied(Struct, tag=True, array_like=True):
    """forward → cache: the copies of this grant are made, or on the one stream; its loans have ended."""

    grant: int


class Filled(Struct, tag=True, array_like=True):
    """forward → scheduler: what this grant goes on from has come from host memory, so that a step may have it."""

    grant: int


class Settled(Struct, tag=True, array_like=True):
    """results → scheduler: exactly one per Step, in order; these grants are finished, these failed."""

    step: int
    finished: list[int]
    failed: list[int] = []


class Masked(Struct, tag=True, array_like=True):
    """results → scheduler: what rows with a grammar may draw next; one mask for each Admitted or Stepped of them.

    finished: rows that have none, because their grammars allow nothing more, or cannot say what.
    """

    masks: list[RowMask]
    finished: list[int]


class Requeue(Struct, tag=True, array_like=True):
    """results → scheduler: a retracted or failed request that is still open, its output appended to its tokens.

    suspect_until: it runs in steps of its own up to this position.
    """

    request: Request
    suspect_until: int = 0


class Over(Struct, tag=True, array_like=True):
    """results → scheduler: an admitted request has been answered for good."""

    request: str


class Ended(Struct, tag=True, array_like=True):
    """A request ends without a row: refused, aborted in the queue, timed out in it, or too large.

    scheduler → api if the request never had a row; else → results, which has its output and answers for it.
    """

    request: str
    reason: EndReason
    message: str


class Delta(Struct, tag=True, array_like=True):
    """results → api: what is new of all requests since the last Delta."""

    outputs: list[Output]


class Unmade(Struct, tag=True, array_like=True):
    """forward → cache, after Exported: the copy under `key` could not be made."""

    key: int
    error: str


class Drop(Struct, tag=True, array_like=True):
    """cache → forward: these copies in host memory are wanted no more."""

    keys: list[int]


class Written(Struct, tag=True, array_like=True):
    """disk → cache: the copy `key` is in its file; `error` says why it is not."""

    key: int
    error: str = ""


class Loaded(Struct, tag=True, array_like=True):
    """disk → cache: the file's state is in host memory under `key`; `error` says why it is not, and never will be.

    seconds: how long it took to read.
    """

    key: int
    error: str = ""
    seconds: float = 0.0


class Ran(Struct, tag=True, array_like=True):
    """device → forward: the step's event has passed. tokens[i] was sampled by the i-th row of the step that samples.

    error: why the step failed, if it did; then the states of all its rows are worth nothing. not_finite: of which
    tokens no logit was finite; nor is the state. unsound: behind which of the step's chunks what the model computed was
    not finite, of those that sample nothing.
    """

    step: int
    tokens: Tokens
    logprobs: list[RowLogprobs]
    prompt_logprobs: list[RowLogprobs]
    error: str = ""
    not_finite: list[int] = []
    unsound: list[int] = []


class Transferred(Struct, tag=True, array_like=True):
    """device → forward: the copy `key` has been made, or read for `grant`; `error` says why it has not."""

    key: int
    grant: int | None = None
    error: str = ""


DiskReport: TypeAlias = Written | Loaded | Cleared
Message: TypeAlias = (
    Granted | Spare | Return | Admit | Step | Stepped | Retired | Donate | Free
    | SaveFromReq | Export | Exported | Unmade | Drop | Written | Loaded | Cleared | Name | Unname | Suspend
    | Suspended | Kept | Submit | Abort | Acquire | Cancel | Refused | Want | Extend | Extended | Closed
    | Mark | Passed | Retire | Admitted | Copied | Settled | Masked | Requeue | Over | Ended | Delta | Flush | Flushed
    | Pause | Paused | Continue | Drain | Drained | Ran | Transferred | Filled | Restarted | Speeds
)  # fmt: skip
