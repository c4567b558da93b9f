"""Messages that concern no single request: session names, flush, pause, drain, restart. None carries a lease."""

from msgspec import Struct

from baton.actors.requests import PauseMode, Tier
from baton.actors.tokens import Tokens


class Flush(Struct, tag=True, array_like=True):
    """api → cache: forget the radix tree and all copies in lower tiers, files included. Answered by Flushed."""

    ticket: int  # chosen by the api, returned in the answer


class Cleared(Struct, tag=True, array_like=True):
    """disk → cache: the disk has carried out everything that the cache requested before this flush."""

    ticket: int  # the ticket of the Flush


class Flushed(Struct, tag=True, array_like=True):
    """cache → api, the answer to Flush: the tree, the copies and the files are gone."""

    ticket: int


class Name(Struct, tag=True, array_like=True):
    """api → cache: give the session's name to the deepest cached state on the path of these tokens.

    Answered by Kept with the same ticket. The cache delays the command while a grant of the session is open.
    """

    session: str
    salt: str
    tokens: Tokens
    ticket: int = 0  # chosen by the api, returned in the answer; 0 if the api does not wait for the answer


class Unname(Struct, tag=True, array_like=True):
    """api → cache: the session is closed. Copies that no other session names are dropped. No answer.

    The api never uses this name again.
    """

    session: str


class Suspend(Struct, tag=True, array_like=True):
    """api → cache: move the session's state to the lowest tier that the server has. Answered by Suspended."""

    ticket: int  # chosen by the api, returned in the answer
    session: str


class Suspended(Struct, tag=True, array_like=True):
    """cache → api, the answer to Suspend: where the session's state is now."""

    ticket: int
    tier: Tier
    position: int  # tokens that the state has consumed


class Kept(Struct, tag=True, array_like=True):
    """cache → api: the state with this session's name is in this tier from now on.

    Answers Name, and is sent again whenever the state moves.
    """

    session: str
    tier: Tier
    position: int  # tokens that the state has consumed
    ticket: int = 0  # the ticket of the Name that this answers; 0 if it reports a move


class Speeds(Struct, tag=True, array_like=True):
    """device → cache and scheduler: seconds that work takes on this device. 0 means not measured yet.

    A mixed step, in which rows decode while prompts are fed, takes `decode` + `mixed` + `prompt` × prompt tokens.
    """

    operation: float = 0.0  # seconds for one arithmetic operation of the model, in the unit of Costs.compute
    byte: float = 0.0  # seconds for one byte of a copy to or from host memory
    decode: float = 0.0  # seconds for a step without prompts, of `rows` rows
    prompt: float = 0.0  # seconds for each prompt token of a mixed step
    mixed: float = 0.0  # fixed extra seconds of a mixed step, however few prompt tokens it has
    draft: float = 0.0  # extra seconds for each draft that a step feeds
    turn: float = 0.0  # seconds from the end of a step with drafts to the start of the next step
    prediction: float = 0.0  # extra seconds for each token that the model's head predicts, for all rows together
    rows: int = 0  # rows of the steps that `decode` was measured with


class Pause(Struct, tag=True, array_like=True):
    """api → scheduler: plan no more steps. Answered by Paused."""

    ticket: int  # chosen by the api, returned in the answer
    mode: PauseMode
    """"in_place": rows keep their slots and pages, and Paused comes when no step is in flight.

    "retract": all rows return to the queue, and Paused also waits until their states are back in the cache.
    """


class Paused(Struct, tag=True, array_like=True):
    """scheduler → api, the answer to Pause: the pause is in effect, or Continue has ended it."""

    ticket: int


class Continue(Struct, tag=True, array_like=True):
    """api → scheduler: end the pause. Each Pause that has not been answered yet gets its Paused."""


class Drain(Struct, tag=True, array_like=True):
    """api → scheduler → forward → results → cache: one lap of the ring after the last request.

    Each actor passes the message on when it has nothing left to do. The cache answers with Drained.
    """


class Drained(Struct, tag=True, array_like=True):
    """cache → api, the answer to Drain: the lap is complete."""

    leaks: list[str]  # slots and pages that did not come back; empty if all is well


class Restarted(Struct, tag=True, array_like=True):
    """supervision → api: the four actors were replaced after a failure. Submit every open request again."""


class Offered(Struct, tag=True, array_like=True):
    """peers → cache: a peer lends a copy of the state at the end of these tokens. The cache then pulls or cancels."""

    ticket: int  # from `Peers.ask`, unless `is_gift`
    salt: str
    tokens: Tokens
    first_page: int  # the copy has no KV of the pages before this one
    is_gift: bool = False  # whether the cache did not ask for the state: it moves here ahead of its use


class Unoffered(Struct, tag=True, array_like=True):
    """peers → cache: the state of this ticket will not come from a peer."""

    ticket: int
    why: str


class Lend(Struct, tag=True, array_like=True):
    """peers → cache: lend a peer a copy of the deepest state on the path of these tokens, in host memory.

    Answered by the call `lent` or `not_lent` of Peers.
    """

    ticket: int
    salt: str
    tokens: Tokens
    least: int  # a state at a smaller position is of no use
    session: str = ""  # wait until no grant of this session is open: its last grant computes the state


class Unlend(Struct, tag=True, array_like=True):
    """peers → cache: the loan of this ticket has ended, or its Lend is withdrawn."""

    ticket: int
