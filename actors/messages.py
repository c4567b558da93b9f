"""Every message of the ring. Messages of the first part carry leases, in fields whose types contain Lease.

Terms in the texts below:

- A *grant* is one admission of a request: a state slot and KV pages. Its id is never reused. The cache keeps an
  *account* of each grant, which is closed when its slot, pages and loans have come back.
- A *position* is the number of tokens that a state has consumed: `history[:position]`.
- `Tokens` are packed int32 (see actors/tokens.py).
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
    Lend as Lend,
    Name as Name,
    Offered as Offered,
    Pause as Pause,
    Paused as Paused,
    Restarted as Restarted,
    Speeds as Speeds,
    Suspend as Suspend,
    Suspended as Suspended,
    Unlend as Unlend,
    Unname as Unname,
    Unoffered as Unoffered,
)
from baton.actors.grants import Advance, Chunk, Failure, Fill, GrantPages, PageCopy, Proposal, RowDrafts, RowMask
from baton.actors.kinds import Kind
from baton.actors.lease import Lease, Loan
from baton.actors.requests import EndReason, Hit, Keep, Output, PeerHint, Request, RetireReason, RowLogprobs, RowPooled
from baton.actors.tokens import Tokens


class Checkpoint(Struct, array_like=True):
    """A checkpoint slot, sent to the device, or sent back with the state of `grant` after exactly `position` tokens."""

    grant: int
    position: int
    lease: Lease


# Messages that carry leases


class Granted(Struct, tag=True, array_like=True):
    """cache → scheduler, the answer to Acquire: a state slot, KV pages, and the position to start from.

    Answered by Return if the Acquire has been cancelled in the meantime.
    """

    grant: int
    state: Lease  # a slot for the row's state; `moved`, `loan` and `fill` say how it gets its content
    hit: Hit  # `cached_tokens` is the position to start from
    moved: bool  # the slot was taken out of the tree, and holds the state already
    loan: Loan | None  # copy the state from this cached slot
    pages: list[int]  # the row's page table: pages of the cached tokens, and fresh ones for the others and one more
    page_copy: PageCopy | None  # a shared page that must be copied before the row appends to it
    branch: int | None  # the position where other requests diverge from this one, if past the hit: worth a checkpoint
    fill: Fill | None = None  # copy state and KV from host memory. Without moved, loan and fill: clear the slot


class Spare(Struct, tag=True, array_like=True):
    """cache → scheduler, the answer to Want: a slot for each position that is worth one."""

    grant: int
    leases: list[Lease]  # each lease may be used for any of the positions
    denied: list[int]  # positions that get no slot


class Return(Struct, tag=True, array_like=True):
    """scheduler → cache: undo a grant whose request was given up before it was admitted. Answered by Closed."""

    grant: int
    state: Lease


class Admit(Struct, tag=True, array_like=True):
    """scheduler → forward: give a granted request a row. Answered by Admitted, and by Copied if something is copied.

    Granted explains all fields except `request`.
    """

    grant: int
    request: Request
    state: Lease
    hit: Hit
    moved: bool
    loan: Loan | None
    pages: list[int]
    page_copy: PageCopy | None
    fill: Fill | None = None


class Step(Struct, tag=True, array_like=True):
    """scheduler → forward: run one step; answered by Settled, from results.

    Every row past its prompt decodes one token, unless it is listed in `sit_out` or has a chunk.
    """

    step: int  # the step's number, from 1
    chunks: list[Chunk]  # prompt tokens to feed
    sit_out: list[int]  # grants past their prompt that do not decode in this step
    checkpoints: list[Checkpoint]  # states to save during the step, each into the slot of its lease
    pages: list[GrantPages]  # pages that rows were given since the last Step
    masks: list[RowMask] = []  # of the rows with a grammar that draw a token in this step, except those in `late`
    late: list[int] = []  # rows with a grammar that draw a token in this step, whose masks follow in StepMasks
    drafts: list[RowDrafts] = []  # only rows that decode; such a row is in no other step until this one is settled
    propose: int = 0  # most tokens to propose for each row after this step
    predict: list[Chunk] = []  # rows that draw, each with the tokens that the model's head is to predict after the step


class StepMasks(Struct, tag=True, array_like=True):
    """scheduler → forward: the masks of the rows in Step.late, exactly once for each Step that has any.

    The step computes meanwhile, and draws when they are there. A row that ends in the step before has none: its token
    is discarded.
    """

    step: int
    masks: list[RowMask]


class Stepped(Struct, tag=True, array_like=True):
    """forward → results, in stream order: a step is done. tokens[i] was sampled for grants[i].

    A row with accepted drafts has several tokens, in their order.
    """

    step: int
    grants: list[int]
    tokens: Tokens
    checkpoints: list[Checkpoint]  # those of the Step; the slots hold the states now, except for failed rows
    logprobs: list[RowLogprobs]  # log probabilities of the sampled tokens, for rows that report them
    prompt_logprobs: list[RowLogprobs]
    failed: list[Failure] = []
    """Rows whose state is unusable, because this step or the one before raised or computed NaN or infinity for them.

    The states and checkpoints of these rows may only be freed.
    """
    error: str = ""  # why the rows failed
    drafted: list[Chunk] = []  # rows that fed drafts, each with the number of drafts
    propose: int = 0  # as in Step
    predicted: list[RowDrafts] = []  # tokens that may follow the row's newest token
    pooled: list[RowPooled] = []


class Retired(Struct, tag=True, array_like=True):
    """forward → results, in stream order: the row is gone, and this is its state."""

    grant: int
    reason: RetireReason
    state: Lease
    position: int  # tokens that the state has consumed
    poisoned: bool = False  # the row failed: the state may only be freed


class Donate(Struct, tag=True, array_like=True):
    """results → cache: keep this state in the radix tree."""

    grant: int
    state: Lease
    position: int  # tokens that the state has consumed
    tokens: Tokens  # tokens up to `position`, beginning at the grant's last Donate, or at its hit in the first Donate
    closes: bool  # this is the grant's last Donate: the cache closes its account and sends Closed


class SaveFromReq(Struct, tag=True, array_like=True):
    """results → cache: keep the state at the end of a session's turn, and move the session's name to it.

    The cache closes the grant's account and sends Closed.
    """

    grant: int
    session: str
    state: Lease
    position: int  # tokens that the state has consumed
    tokens: Tokens  # tokens up to `position`, beginning at the grant's last Donate, or at its hit if there was none


class Export(Struct, tag=True, array_like=True):
    """cache → forward: copy this state, and the KV of its tokens, to host memory. Answered by Exported."""

    key: int  # the copy's key in all later messages
    state: Lease
    pages: list[int]  # the pages that hold the KV of the state's tokens, in order
    position: int  # tokens that the state has consumed, and whose KV is copied


class Exported(Struct, tag=True, array_like=True):
    """forward → cache: slot and pages may be reused.

    The copy has been made; or, on a device with a single stream, it is enqueued ahead of any later use.
    """

    key: int
    state: Lease


class Free(Struct, tag=True, array_like=True):
    """scheduler or results → cache: put slots back into the pool."""

    leases: list[Lease]
    closes_grant: int | None = None  # the cache closes this grant's account and sends Closed


# Messages that carry no leases


class Submit(Struct, tag=True, array_like=True):
    """api → scheduler: a new request. Answered by Ended if the queue is full or the server is draining."""

    request: Request
    resubmitted: bool = False  # accepted before a restart of the actors, so queued even if the queue is full


class Abort(Struct, tag=True, array_like=True):
    """api → scheduler: end a request. Answered by Ended if the request has no row, else by its last Delta."""

    request: str
    reason: Literal["aborted", "timeout"] = "aborted"


class Acquire(Struct, tag=True, array_like=True):
    """scheduler → cache: a queued request wants a state slot and pages. Answered by Granted or Refused.

    The cache parks the Acquire until a slot and enough pages are free.
    """

    grant: int  # a new id for the grant
    tokens: Tokens
    limit: int  # the state to start from may have consumed at most this many of the tokens
    salt: str  # only states with the same salt match
    predecessor: int | None  # the grant whose state this one will resume from: wait until its account is closed
    session: str = ""
    priority: int = 0  # lower is served first
    checkpoints: tuple[int, ...] = ()  # as in Request: positions at which the client asks for a checkpoint
    keep: Keep = ""  # as in Request: whether the client will continue
    overtaken: int = 0  # how often the request's earlier Acquires were overtaken, as in Refused
    hint: PeerHint | None = None  # as in Request: the peer that asked for the state


class Cancel(Struct, tag=True, array_like=True):
    """scheduler → cache: forget a parked Acquire. Answered by Refused, unless Granted is on its way already."""

    grant: int


class Refused(Struct, tag=True, array_like=True):
    """cache → scheduler: an Acquire will not be granted, because it was cancelled or can never fit."""

    grant: int
    reason: Literal["cancelled", "too_large"]
    message: str
    overtaken: int = 0  # how many later Acquires were granted first, because they needed fewer slots or pages


class Want(Struct, tag=True, array_like=True):
    """scheduler → cache: slots for checkpoints of a running request. Answered by Spare at once."""

    grant: int
    checkpoints: list[tuple[int, Kind]]  # positions, each with the kind of the state there


class Mark(Struct, tag=True, array_like=True):
    """cache → scheduler: other requests wait for this grant's state at this position of its prompt.

    Answered by Passed if the state will not be saved; otherwise the state comes in a Donate.
    """

    grant: int
    position: int


class Passed(Struct, tag=True, array_like=True):
    """scheduler → cache: the state at the position of a Mark will not be saved."""

    grant: int
    position: int


class Extend(Struct, tag=True, array_like=True):
    """scheduler → cache: one more KV page for each of these grants, the most urgent first. Answered by Extended."""

    grants: list[int]


class Extended(Struct, tag=True, array_like=True):
    """cache → scheduler: pages for some of the grants that wait for one."""

    pages: list[GrantPages]
    starved: list[int]  # grants that still wait, until another grant gives its pages back


class Closed(Struct, tag=True, array_like=True):
    """cache → scheduler: this grant's account is closed; its slot and pages belong to the tree or the pool again."""

    grant: int


class Retire(Struct, tag=True, array_like=True):
    """scheduler → forward: take a row off the device, exactly once per Admit. Forward then sends Retired to results."""

    grant: int
    reason: RetireReason
    position: int  # the position to bring the state to, by accepted drafts that it has not consumed yet


class Admitted(Struct, tag=True, array_like=True):
    """forward → results, in stream order: the request has a row. The fields are those of Admit."""

    grant: int
    request: Request
    hit: Hit


class Copied(Struct, tag=True, array_like=True):
    """forward → cache: the copies that Admit named have been made, or are enqueued on the steps' stream.

    This message ends the grant's loans.
    """

    grant: int


class Filled(Struct, tag=True, array_like=True):
    """forward → scheduler: this grant's state has arrived from host memory, so steps may include the row."""

    grant: int


class Settled(Struct, tag=True, array_like=True):
    """results → scheduler, exactly one per Step, in order: the rows that finished and the rows that failed in it."""

    step: int
    finished: list[int]
    failed: list[int] = []
    advanced: list[Advance] = []  # the rows that fed drafts and did not fail
    proposals: list[Proposal] = []
    chance: float = 0.0  # probability that a predicted token is right if those before it are; 0: unknown


class Masked(Struct, tag=True, array_like=True):
    """results → scheduler: which tokens rows with a grammar may draw next.

    Each such row gets one mask after its Admitted, and one after each Stepped that drew a token for it.
    """

    masks: list[RowMask]
    finished: list[int]  # rows that end here: their grammar allows no further token, or it failed


class Requeue(Struct, tag=True, array_like=True):
    """results → scheduler: a retracted or failed request that is still open; its tokens now include its output."""

    request: Request
    suspect_until: int = 0  # up to this position the request must run in steps of its own


class Over(Struct, tag=True, array_like=True):
    """results → scheduler: an admitted request has been answered for good, and its id may be used again."""

    request: str


class Ended(Struct, tag=True, array_like=True):
    """scheduler → api or results: a request ends without a row: refused, too large, or given up in the queue.

    Sent to results if the request had a row before, because results has its output: it sends the last Delta and Over.
    """

    request: str
    reason: EndReason
    message: str


class Delta(Struct, tag=True, array_like=True):
    """results → api: the new output of all requests since the last Delta."""

    outputs: list[Output]


class Unmade(Struct, tag=True, array_like=True):
    """forward → cache, after Exported: the copy to host memory failed."""

    key: int
    error: str


class Drop(Struct, tag=True, array_like=True):
    """cache → forward: delete these copies from host memory."""

    keys: list[int]


class Written(Struct, tag=True, array_like=True):
    """disk → cache: the copy is in its file."""

    key: int
    error: str = ""  # why the file could not be written; "" if it was


class Loaded(Struct, tag=True, array_like=True):
    """disk or peers → cache: the state from a file or from a peer is in host memory."""

    key: int
    error: str = ""  # why the state can never be read; "" if it was read
    seconds: float = 0.0  # how long the file took to read


class Ran(Struct, tag=True, array_like=True):
    """device → forward: the step's event has passed. tokens[i] was sampled by the i-th of the rows that sample."""

    step: int
    tokens: Tokens
    logprobs: list[RowLogprobs]
    prompt_logprobs: list[RowLogprobs]
    error: str = ""  # why the whole step failed, so that the states of all its rows are unusable; "" if it did not
    broken: dict[int, str] = {}  # by grant: why a row could not be set up or grow; the step ran without it
    not_finite: list[int] = []  # indices of tokens whose greatest logit was not finite: their rows' states are unusable
    unsound: list[int] = []  # indices of chunks that sample nothing and ended in hidden states that were not finite
    predicted: dict[int, list[int]] = {}  # by row: tokens that may follow its last valid draw
    pooled: list[RowPooled] = []


class Transferred(Struct, tag=True, array_like=True):
    """device → forward: a copy to host memory is complete, or (if `grant` is set) a copy from host memory."""

    key: int
    grant: int | None = None
    error: str = ""  # why the copy failed; "" if it did not


DiskReport: TypeAlias = Written | Loaded | Cleared
PeerReport: TypeAlias = Offered | Unoffered | Loaded | Lend | Unlend
Message: TypeAlias = (
    Granted | Spare | Return | Admit | Step | StepMasks | Stepped | Retired | Donate | Free | SaveFromReq | Export
    | Exported | Unmade | Drop | Written | Loaded | Cleared | Name | Unname | Suspend | Suspended | Kept | Submit
    | Abort | Acquire | Cancel | Refused | Want | Extend | Extended | Closed | Mark | Passed | Retire | Admitted
    | Copied | Settled | Masked | Requeue | Over | Ended | Delta | Flush | Flushed | Pause | Paused | Continue | Drain
    | Drained | Ran | Transferred | Filled | Restarted | Speeds | Lend | Unlend | Offered | Unoffered
)  # fmt: skip
