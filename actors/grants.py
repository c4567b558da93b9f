"""Parts of messages that concern a single grant and hold no lease."""

from msgspec import Struct

from baton.actors.tokens import Tokens

LIKELY = 0.3
"""The least chance at which a row with a grammar gets drafts: each draft needs a mask of its own, which takes time."""


class PageCopy(Struct, frozen=True, array_like=True):
    """A KV page to copy: `source` is shared, and `target` is the grant's own."""

    source: int
    target: int


class Fill(Struct, frozen=True, array_like=True):
    """A copy in host memory to resume from: its state goes to the grant's slot, its KV to some of the grant's pages."""

    key: int  # the copy's key in host memory
    first_page: int  # the copy's KV is written to the grant's pages[first_page:end_page]; earlier pages are shared
    end_page: int


class Chunk(Struct, frozen=True, array_like=True):
    """A grant and how many prompt tokens it feeds in a step."""

    grant: int
    tokens: int


class GrantPages(Struct, frozen=True, array_like=True):
    """A grant and the pages that are appended to its page table."""

    grant: int
    pages: list[int]


class RowDrafts(Struct, frozen=True, array_like=True):
    """Tokens that may follow a row's last token: drafts that the row feeds in a step, or predictions after a step."""

    grant: int
    tokens: Tokens


class Proposal(Struct, frozen=True, array_like=True):
    """Tokens that are likely to continue a row's history. The scheduler decides how many of them a step feeds."""

    grant: int
    position: int  # index in the row's history where the tokens would follow: the length of the history so far
    tokens: Tokens
    chance: float  # probability that a token is right if all tokens before it are; in (0, 1)


class RowMask(Struct, frozen=True, array_like=True):
    """The tokens that a row's grammar allows at one position, and after each draft from there on."""

    grant: int
    position: int  # index in the row's history of the token to draw; the mask is valid only for this token
    words: bytes  # int32 [ceil(vocabulary / 32)]: bit i % 32 of word i // 32 says whether token i is allowed
    ahead: list[bytes] = []  # as `words`, after each token of `proposal`; in a Step, after each draft of the row
    proposal: Proposal | None = None  # tokens that the grammar allows


class Advance(Struct, frozen=True, array_like=True):
    """How many drafts of a row were accepted in a step, up to the token that finished the request, if one did."""

    grant: int
    accepted: int


class Failure(Struct, frozen=True, array_like=True):
    """A row whose state became unusable in a step: the step raised, or computed NaN or infinity for the row."""

    grant: int
    position: int  # the position that the step would have brought the row to
